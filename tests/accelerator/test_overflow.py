# SPDX-License-Identifier: Apache-2.0
"""fp16 gradients that overflow: a DDP group skips together, a replica alone, and their learning rates stay one."""

import itertools
from collections import OrderedDict
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from farflung import Accelerator, LocalSGD
from farflung.outer import diloco, local_sgd
from farflung.state import AcceleratorState
from farflung.testing.ranks import run_ranks
from farflung.utils import GradScalerKwargs
from tests.accelerator.conftest import on_ranks
from tests.integrations.takeover import is_the_same

STEPS = 5


def two_layers():
    return nn.Sequential(OrderedDict(body=nn.Linear(2, 2), head=nn.Linear(2, 1)))


def training(mode, accumulation, parts, sick):
    """Train two layers by one optimizer, or by one for each part; in the step `sick[rank]` its gradients overflow.

    Returns: for each step of each optimizer, whether it was skipped, the learning rate and the weights.
    """
    precision = {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=16.0)]}
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulation, scheduler_ticks="per_update", **precision
    )
    rank = accelerator.process_index
    torch.manual_seed(0)
    net = two_layers()
    groups = [net.parameters()] if parts == 1 else [net.body.parameters(), net.head.parameters()]
    inner = [torch.optim.SGD(group, lr=0.1, fused=number == 1) for number, group in enumerate(groups)]
    model, *optimizers = accelerator.prepare(net, *inner)
    schedulers = [accelerator.prepare(LambdaLR(one, lambda step: 1 / (1 + step))) for one in inner]
    seen = []

    def step(number):
        for micro in range(accumulation):
            with accelerator.accumulate(model):
                overflows = number == sick[rank] and micro == 0  # in a micro-batch that is not synchronized, if any
                x = torch.full((2, 2), float("inf") if overflows else 1.0 + rank)
                accelerator.backward(model(x).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                for one in (*optimizers, *schedulers):
                    one.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
        rates = [scheduler.get_last_lr()[0] for scheduler in schedulers]
        weights = nn.utils.parameters_to_vector(net.parameters()).detach()
        seen.append(([one.step_was_skipped for one in optimizers], rates, weights, accelerator.scaler.get_scale()))

    loop = {
        "ddp": nullcontext,
        "LocalSGD": lambda: LocalSGD(accelerator, model, 2),
        "outer": lambda: accelerator.outer(model, local_sgd(2)),
    }[mode]()
    with loop as averaging:
        for number in range(STEPS):
            step(number)
            if mode == "LocalSGD":
                averaging.step()
    accelerator.free_memory()
    return seen, nn.utils.parameters_to_vector(net.parameters()).detach()


def rate_after(ticks):
    return 0.1 * (1 / (1 + ticks))


def trainings(cases):
    return [training(*case) for case in cases]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_ddp_group_skips_together_and_its_schedules_wait(num_ranks):
    sick = [2 if rank == num_ranks - 1 else None for rank in range(num_ranks)]
    cases = [("ddp", accumulation, parts, sick) for accumulation, parts in itertools.product((1, 2), (1, 2))]
    ranks = run_ranks(trainings, num_ranks, cases, connect=num_ranks > 1)
    for number, (_, _, parts, _) in enumerate(cases):
        for outcome in ranks:
            seen, _ = outcome[number]
            assert [skipped for skipped, *_ in seen] == [[step == 2] * parts for step in range(STEPS)]
            assert [rates for _, rates, *_ in seen] == [[rate_after(ticks)] * parts for ticks in (1, 2, 2, 3, 4)]
            # Halved by the step of a single optimizer; else when it is used again.
            assert [scale for *_, scale in seen] == [16.0, 16.0, 16.0 if parts > 1 else 8.0, 8.0, 8.0]
            for (*_, weights, _), (*_, other, _) in zip(seen, ranks[0][number][0], strict=True):
                assert torch.equal(weights, other)
            assert torch.equal(seen[1][2], seen[2][2])
            assert not torch.equal(seen[2][2], seen[3][2])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_replica_skips_by_itself_and_all_keep_one_rate_and_agree(num_ranks):
    sick = [None, 2, 0, 4][:num_ranks]
    cases = [
        (mode, accumulation, parts, sick) for mode in ("LocalSGD", "outer") for accumulation, parts in ((1, 2), (2, 1))
    ]
    ranks = run_ranks(trainings, num_ranks, cases)
    for number, (_, _, parts, _) in enumerate(cases):
        for rank, outcome in enumerate(ranks):
            seen, final = outcome[number]
            assert [skipped for skipped, *_ in seen] == [[step == sick[rank]] * parts for step in range(STEPS)]
            assert [rates for _, rates, *_ in seen] == [[rate_after(ticks)] * parts for ticks in range(1, STEPS + 1)]
            assert torch.equal(final, ranks[0][number][1])
            assert torch.isfinite(final).all()


@on_ranks(2, each=True)
def test_a_first_step_that_one_replica_skips_leaves_one_anchor():
    """Weights are loaded after `prepare`, and rank 0 skips its first step, while rank 1 begins where it is."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=16.0)])
    net = two_layers()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05))
    with accelerator.outer(model, diloco(1)):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(0.25)
        for number in range(3):
            overflows = accelerator.process_index == 0 and number == 0
            accelerator.backward(model(torch.full((2, 2), float("inf") if overflows else 1.0)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return is_the_same([parameter.tolist() for parameter in net.parameters()])


def test_the_scale_shows_an_overflow_after_the_step_of_the_only_optimizer_and_after_the_steps_of_all():
    precision = {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=16.0)]}
    for number_of_optimizers, scale in ((1, 8.0), (2, 16.0)):
        AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=True, **precision)
        layers = [nn.Linear(2, 1) for _ in range(number_of_optimizers)]
        layers = accelerator.prepare(*layers) if number_of_optimizers > 1 else [accelerator.prepare(*layers)]
        optimizers = [accelerator.prepare(torch.optim.SGD(layer.parameters(), lr=0.1)) for layer in layers]
        accelerator.backward(sum(layer(torch.full((1, 2), float("inf"))).sum() for layer in layers))
        for optimizer in optimizers:
            optimizer.step()
            assert optimizer.step_was_skipped
            assert accelerator.scaler.get_scale() == scale
        accelerator.backward(layers[0](torch.ones(1, 2)).sum())
        assert accelerator.scaler.get_scale() == 8.0
