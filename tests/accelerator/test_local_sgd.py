# SPDX-License-Identifier: Apache-2.0
"""LocalSGD and `accelerator.outer` around a prepared loop, on real gloo ranks."""

import time

import pytest
import torch

from farflung import LocalSGD
from farflung.base.errors import RankFailure, StateError
from farflung.methods.recipes import local_sgd
from farflung.testing.ranks import run_ranks
from tests.accelerator.conftest import on_ranks
from tests.accelerator.test_outer_attached import Net, alike, differs, is_equal, one_step, prepared, weights


def trained(step_of=one_step, **options):
    """Train under LocalSGD with a round each second step; whether replicas differ after each batch, and the weights."""
    accelerator, model, optimizer, loader = prepared(shuffle=False, **options)
    apart = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as averaging:
        for batch in loader:
            step_of(accelerator, model, optimizer, batch)
            averaging.step()
            apart.append(differs(accelerator, model))
    return apart, weights(accelerator, model)


def by_hand():
    """The same run as a bare loop whose weights and statistics are averaged by plain collectives."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(1)
    for number, batch in enumerate(torch.randn(32, 3).split(2)[rank::size], 1):
        (model(batch) / 2).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        if number % 4 == 0:
            for value in (*model.out.parameters(), *model.norm.parameters(), *model.norm.buffers()):
                if value.is_floating_point():
                    torch.distributed.all_reduce(value.data)
                    value.data /= size
    return model.state_dict()


def both_ways():
    return *trained(steps=2, samples=32), by_hand()


@pytest.fixture(scope="module")
def both():
    return run_ranks(both_ways, 2)


def test_rounds_count_optimizer_steps_not_calls(both):
    (apart, first, _), (_, second, _) = both
    assert apart == [False, True, True, False, False, True, True, False]
    assert alike([first, second])


def test_local_sgd_is_training_alone_and_averaging(both):
    (_, ours, expected), _ = both
    for name in expected:
        assert torch.allclose(ours[name], expected[name], atol=1e-6), name


@pytest.mark.parametrize("form", ["compiled", "unwrapped"])
@on_ranks(2, each=[True, False])
def test_a_model_that_was_compiled_or_unwrapped_after_it_was_prepared_trains_alone(form):
    accelerator, model, optimizer, loader = prepared()
    named = torch.compile(model, backend="eager") if form == "compiled" else accelerator.unwrap_model(model)
    apart = []
    with LocalSGD(accelerator=accelerator, model=named, local_sgd_steps=2) as averaging:
        for _, batch in zip(range(2), loader, strict=False):
            one_step(accelerator, named if form == "compiled" else model, optimizer, batch)
            averaging.step()
            apart.append(differs(accelerator, model))
    return apart


@on_ranks(2, each=[True, False, True, False] * 2)
def test_a_block_can_be_entered_again():
    accelerator, model, optimizer, loader = prepared()
    averaging, apart = LocalSGD(accelerator, model, 2), []
    for _ in range(2):
        with averaging:
            for _, batch in zip(range(3), loader, strict=False):
                one_step(accelerator, model, optimizer, batch)
                averaging.step()
                apart.append(differs(accelerator, model))
        apart.append(differs(accelerator, model))
    return apart


@on_ranks(2, each=[True, False, True, False])
def test_an_optimizer_that_is_prepared_inside_a_block_is_counted():
    accelerator, model, first, _ = prepared()
    apart, torch_optimizer = [], torch.optim.SGD([scale := torch.nn.Parameter(torch.ones(1))], lr=0.1)
    accelerator.unwrap_model(model).scale = scale
    torch.manual_seed(accelerator.process_index)
    with accelerator.outer(model, local_sgd(2)):
        second = accelerator.prepare(torch_optimizer)
        for _ in range(4):
            accelerator.backward(model(torch.randn(4, 3)) * scale.sum())
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
            apart.append(not is_equal(scale))
    return apart


def one_rank_raises():
    def step(accelerator, model, optimizer, batch):
        if accelerator.process_index == 1 and next(steps) == 3:
            raise ValueError("bad sample")
        one_step(accelerator, model, optimizer, batch)

    steps, started = iter(range(9)), time.monotonic()
    try:
        trained(step)
    except (RankFailure, ValueError) as error:
        return type(error).__name__, str(error), time.monotonic() - started


def test_an_exception_leaves_without_a_collective_and_the_others_learn_of_it():
    (kind, message, took), (other, _, _) = run_ranks(one_rank_raises, 2)
    assert (kind, other) == ("RankFailure", "ValueError")
    assert "rank 1" in message
    assert "bad sample" in message
    assert took < 10


def test_in_one_process_it_does_nothing():
    accelerator, model, optimizer, loader = prepared()
    with LocalSGD(accelerator, model, 2) as averaging:
        for batch in loader:
            one_step(accelerator, model, optimizer, batch)
            averaging.step()
    assert not averaging.enabled


@on_ranks(2)
def test_step_outside_the_block_is_refused():
    accelerator, model, *_ = prepared()
    with pytest.raises(StateError, match="with"):
        LocalSGD(accelerator, model, 2).step()
    for number in (2, 0, None):
        LocalSGD(accelerator, model, number, enabled=False).step()
