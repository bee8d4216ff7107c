# SPDX-License-Identifier: Apache-2.0
"""LocalSGD and `accelerator.outer` around a prepared loop, on real gloo ranks."""

import time
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from farflung import Accelerator, LocalSGD
from farflung.base.errors import RankFailure, StateError
from farflung.testing.patience import patience
from farflung.testing.ranks import run_ranks
from tests.faults import kill


def net():
    """Something of everything: a frozen layer, batch statistics, a counter."""
    frozen = nn.Linear(3, 4).requires_grad_(False)
    return nn.Sequential(OrderedDict(frozen=frozen, norm=nn.BatchNorm1d(4), out=nn.Linear(4, 1)))


def prepared(steps=1, num_batches=8, lr=0.1, **options):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **options)
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(num_batches * accelerator.num_processes * 2, 3))
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))


def one_step(accelerator, model, optimizer, batch):
    with accelerator.accumulate(model):
        accelerator.backward(model(batch[0]).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()


def weights(accelerator, model):
    return {name: value.clone() for name, value in accelerator.unwrap_model(model).state_dict().items()}


def differs(accelerator, model):
    """Whether the ranks' trainable weights differ now."""
    mine = accelerator.unwrap_model(model).out.weight.detach()
    everyone = accelerator.gather(mine)
    return not all(torch.equal(part, everyone[:1]) for part in everyone.split(1))


def rounds_by_micro_batch():
    """Accumulation 2, LocalSGD every 2 optimizer steps: replicas agree after each fourth micro-batch only."""
    accelerator, model, optimizer, loader = prepared(steps=2)
    apart = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as averaging:
        for batch in loader:
            one_step(accelerator, model, optimizer, batch)
            averaging.step()
            apart.append(differs(accelerator, model))
    return apart, weights(accelerator, model)


def test_rounds_count_optimizer_steps_not_calls():
    (apart, first), (_, second) = run_ranks(rounds_by_micro_batch, 2)
    assert apart == [False, True, True, False, False, True, True, False]
    assert all(torch.equal(first[name], second[name]) for name in first)


def by_hand():
    """The same run as a bare loop whose weights and statistics are averaged by plain collectives."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    batches = torch.randn(8 * size * 2, 3).split(2)[rank::size]
    for number, batch in enumerate(batches, 1):
        (model(batch).pow(2).mean() / 2).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        if number % 4 == 0:
            for value in (*model.out.parameters(), *model.norm.parameters(), *model.norm.buffers()):
                if value.is_floating_point():
                    torch.distributed.all_reduce(value.data)
                    value.data /= size
    return model.state_dict()


def apart_in_other_forms():
    """Whether replicas are apart after one of two steps, where LocalSGD is given the model in another form."""
    found = []
    for form in ("compiled", "unwrapped"):
        accelerator, model, optimizer, loader = prepared()
        named = torch.compile(model, backend="eager") if form == "compiled" else accelerator.unwrap_model(model)
        with LocalSGD(accelerator=accelerator, model=named, local_sgd_steps=2) as averaging:
            for number, batch in zip(range(2), loader, strict=False):
                one_step(accelerator, named if form == "compiled" else model, optimizer, batch)
                averaging.step()
                found.append((form, number, differs(accelerator, model)))
        accelerator.free_memory()
    return found


def test_a_model_that_was_compiled_or_unwrapped_after_it_was_prepared_trains_alone():
    expected = [(form, number, number == 0) for form in ("compiled", "unwrapped") for number in range(2)]
    assert run_ranks(apart_in_other_forms, 2) == [expected] * 2


def test_local_sgd_is_training_alone_and_averaging():
    expected = run_ranks(by_hand, 2)[0]
    _, ours = run_ranks(rounds_by_micro_batch, 2)[0]
    for name in expected:
        assert torch.allclose(ours[name], expected[name], atol=1e-6), name


def nothing_of_a_model_travels_meanwhile():
    accelerator, model, optimizer, loader = prepared()
    with LocalSGD(accelerator, model, 100):
        for number, batch in enumerate(loader):
            if accelerator.is_main_process or number < 2:  # were anything sent, this rank would wait for the other
                one_step(accelerator, model, optimizer, batch)
    return weights(accelerator, model)


def test_gradients_and_buffers_stay_at_home_and_uneven_ranks_agree_at_the_end():
    first, second = run_ranks(nothing_of_a_model_travels_meanwhile, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)


def one_rank_raises():
    accelerator, model, optimizer, loader = prepared()
    started = time.monotonic()
    try:
        with LocalSGD(accelerator, model, 2) as averaging:
            for number, batch in enumerate(loader):
                if number == 3 and accelerator.process_index == 1:
                    raise ValueError("bad sample")
                one_step(accelerator, model, optimizer, batch)
                averaging.step()
    except (RankFailure, ValueError) as error:
        return type(error).__name__, str(error), time.monotonic() - started


def test_an_exception_leaves_without_a_collective_and_the_others_learn_of_it():
    (kind, message, took), (other, _, _) = run_ranks(one_rank_raises, 2)
    assert (kind, other) == ("RankFailure", "ValueError")
    assert "rank 1" in message
    assert "bad sample" in message
    assert took < 10


def one_rank_is_killed():
    accelerator, model, optimizer, loader = prepared()
    with LocalSGD(accelerator, model, 2) as averaging:
        for number, batch in enumerate(loader):
            if number == 3 and accelerator.process_index == 1:
                kill()
            one_step(accelerator, model, optimizer, batch)
            averaging.step()


def test_a_killed_rank_is_an_error_on_the_other_within_seconds():
    started = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 0(.|\n)*RankFailure(.|\n)*exit code -9"):
        run_ranks(one_rank_is_killed, 2)
    assert time.monotonic() - started < patience(15)


def test_in_one_process_it_does_nothing():
    accelerator, model, optimizer, loader = prepared()
    with LocalSGD(accelerator, model, 2) as averaging:
        for batch in loader:
            one_step(accelerator, model, optimizer, batch)
            averaging.step()
    assert not averaging.enabled


def step_outside():
    accelerator, model, *_ = prepared()
    averaging = LocalSGD(accelerator, model, 2)
    with pytest.raises(StateError, match="with"):
        averaging.step()
    disabled = LocalSGD(accelerator, model, 2, enabled=False)
    disabled.step()


def test_step_outside_the_block_is_refused():
    run_ranks(step_outside, 2)
