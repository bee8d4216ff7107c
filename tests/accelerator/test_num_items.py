# SPDX-License-Identifier: Apache-2.0
"""`backward(loss_sum, num_items=n)`: the gradient of `sum(loss) / sum(n)`, however the batch is cut up."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from farflung import Accelerator
from farflung.base.errors import StateError
from farflung.outer import local_sgd
from farflung.process.world import joined_world
from farflung.state import AcceleratorState
from farflung.testing.ranks import run_ranks
from farflung.utils import GradScalerKwargs
from tests.accelerator.conftest import on_ranks
from tests.accelerator.test_join import loss_of as loss_sum, network, tokens

# For each rank the sizes of the micro-batches of one window: all different, one of them empty.
SHARES = {1: [(3, 0, 7)], 2: [(3, 0, 7), (1, 12, 2)], 4: [(3, 7), (1, 2), (0, 0), (9, 5)]}
PLANS = [(precision, clip) for precision in ("no", "bf16", "fp16") for clip in (None, 0.05)]


def expected(shares, clip):
    model = network()
    everything = torch.cat([tokens(rank, k, n) for rank, sizes in enumerate(shares) for k, n in enumerate(sizes)])
    (loss_sum(model, everything) / len(everything)).backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    return [parameter.grad for parameter in model.parameters()]


def entered(group):
    """How many collectives this rank has started; alone it starts none."""
    return sum(group.waits.entered.values()) if hasattr(group, "waits") else 0


def gradients(shares, precision, clip):
    """The gradients of one window, and how many collectives of Farflung's that took."""
    sizes = shares[int(torch.distributed.get_rank()) if torch.distributed.is_initialized() else 0]
    scaling = {"kwargs_handlers": [GradScalerKwargs(init_scale=256.0)]} if precision == "fp16" else {}  # no overflow
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(sizes), mixed_precision=precision, **scaling)
    model = accelerator.prepare(network())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    group = joined_world().group
    before = entered(group)
    list(window(accelerator, model, sizes))
    collectives = entered(group) - before
    if clip is not None:
        accelerator.clip_grad_norm_(model.parameters(), clip)
    else:
        accelerator.unscale_gradients(optimizer)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    AcceleratorState._reset_state()  # the next one may have another precision
    return found, collectives


@pytest.mark.parametrize("num_ranks", SHARES)
@on_ranks()
def test_the_gradient_is_that_of_the_whole_batch(num_ranks):
    for precision, clip in PLANS:
        found, collectives = gradients(SHARES[num_ranks], precision, clip)
        tolerance = {"no": 1e-6, "fp16": 5e-3, "bf16": 3e-2}[precision]
        for ours, whole in zip(found, expected(SHARES[num_ranks], clip), strict=True):
            assert torch.allclose(ours, whole, atol=tolerance, rtol=tolerance), (precision, clip)
        assert collectives == (num_ranks > 1)  # one scalar a window, whatever the number of its micro-batches


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any))
def test_any_cut_of_one_process_gives_the_same_gradient(sizes):
    ours, _ = gradients([tuple(sizes)], "no", None)
    AcceleratorState._reset_state(reset_partial_state=True)
    for mine, whole in zip(ours, expected([tuple(sizes)], None), strict=True):
        assert torch.allclose(mine, whole, atol=1e-6)


def window(accelerator, model, sizes, first=0):
    """Accumulate the gradients of one window; yields after each of its micro-batches."""
    for number, count in enumerate(sizes, first):
        with accelerator.accumulate(model):
            x = tokens(accelerator.process_index, number, count)
            accelerator.backward(loss_sum(model, x), num_items=count)
            yield


def test_without_accumulation_each_call_is_a_window_of_its_own():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(network())
    for _ in range(2):
        model.zero_grad()
        accelerator.backward(loss_sum(model, tokens(0, 0, 5)), num_items=torch.tensor(5))
    for mine, whole in zip(model.parameters(), expected([(5,)], None), strict=True):
        assert torch.allclose(mine.grad, whole, atol=1e-6)


def test_no_items_at_all_give_a_gradient_of_zero():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(network())
    accelerator.backward(loss_sum(model, tokens(0, 0, 0)), num_items=0)
    assert not model.weight.grad.any()


def test_what_cannot_be_is_refused():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(network())
    with accelerator.accumulate(model):
        accelerator.backward(loss_sum(model, tokens(0, 0, 1)), num_items=1)
    with accelerator.accumulate(model), pytest.raises(StateError, match="num_items"):
        accelerator.backward(loss_sum(model, tokens(0, 0, 1)))


def weights_of_replicas(shares, weigh_by):
    """Two windows and one round between them: the weights of each replica before it, and everyone's after it."""
    sizes = shares[torch.distributed.get_rank()]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(sizes))
    model = accelerator.prepare(network())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    apart = []
    optimizer.register_step_post_hook(lambda *_: apart.append(model.module.weight.detach().clone()))
    with accelerator.outer(model, replace(local_sgd(2), weigh_by=weigh_by)):
        for first in (0, 10):
            for _ in window(accelerator, model, sizes, first):
                optimizer.step()
                optimizer.zero_grad()
    return apart[-1], model.module.weight.detach().clone()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("weigh_by", ["steps", "items", "items_squared"])
def test_a_replica_weighs_in_a_round_as_much_as_it_did(ranks, weigh_by):
    shares = [sizes if any(sizes) else (1, 0) for sizes in SHARES[ranks]]
    outcome = run_ranks(weights_of_replicas, ranks, shares, weigh_by)
    power = {"steps": 0, "items": 1, "items_squared": 2}[weigh_by]
    parts = torch.tensor([float(sum(sizes)) ** power for sizes in shares])
    mean = sum(part * apart for part, (apart, _) in zip(parts, outcome, strict=True)) / parts.sum()
    for _, agreed in outcome:
        assert torch.allclose(agreed, mean, atol=1e-6)


@pytest.mark.parametrize("num_ranks", [2, 4])
@on_ranks()
def test_under_an_outer_loop_the_window_is_that_of_the_replica(num_ranks):
    sizes = SHARES[num_ranks][torch.distributed.get_rank()]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(sizes))
    model = accelerator.prepare(network())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    with accelerator.outer(model, local_sgd(8)):
        list(window(accelerator, model, sizes))
        optimizer.step()
    reference = network()
    alone = torch.cat([tokens(accelerator.process_index, number, count) for number, count in enumerate(sizes)])
    (loss_sum(reference, alone) / max(len(alone), 1)).backward()
    assert torch.allclose(accelerator.unwrap_model(model).weight.grad, reference.weight.grad, atol=1e-6)


@on_ranks(2)
def test_the_gradient_is_the_same_in_whatever_form_a_script_names_its_model():
    shares = [(3, 7), (12, 1)]
    forms = {
        "alone": lambda _, model: model,
        "unwrapped": lambda accelerator, model: accelerator.unwrap_model(model),
        "compiled": lambda _, model: torch.compile(model, backend="eager"),
        "held": lambda _, model: nn.Sequential(model),  # a script's own module around a prepared one
        "beside one that is frozen": lambda accelerator, _: accelerator.prepare(network().requires_grad_(False)),
        "beside one in evaluation": lambda accelerator, _: accelerator.prepare_model(network(), evaluation_mode=True),
    }
    for form, make in forms.items():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, _ = accelerator.prepare(plain := network(), torch.optim.SGD(plain.parameters()))
        named = make(accelerator, model)
        models = () if form.startswith("beside") else (named,)
        computes = named if form in ("compiled", "held") else model
        for number, count in enumerate(shares[accelerator.process_index]):
            with accelerator.accumulate(*models):
                x = tokens(accelerator.process_index, number, count)
                accelerator.backward(loss_sum(computes, x), num_items=count)
        for ours, whole in zip(model.parameters(), expected(shares, None), strict=True):
            torch.testing.assert_close(ours.grad, whole, msg=lambda text, form=form: f"{form}: {text}")
        AcceleratorState._reset_state()
