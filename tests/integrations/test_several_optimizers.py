# SPDX-License-Identifier: Apache-2.0
"""Several inner optimizers of one model, under each host of a loop: a round runs once the iteration is over."""

from itertools import permutations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from farflung import Accelerator, GradScalerKwargs
from farflung.base.errors import ConfigError
from farflung.methods.arguments import OuterConfig
from farflung.methods.inner import IterationTracker
from farflung.outer import OuterLoop
from farflung.state import AcceleratorState
from farflung.testing.ranks import run_ranks
from tests.accelerator.conftest import on_ranks
from tests.integrations.takeover import installed, is_the_same

EVERY = 2
CONFIG = OuterConfig("local_sgd", every=EVERY, report="off")
ORDERS = [[[0]], *([list(order)] for order in permutations(range(3))), [[0, 1, 2], [2, 0, 1]]]  # by iteration, in turn


def net():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)])


def optimizers_of(model, number):
    parts = [list(part.parameters()) for part in model]
    if number == 1:
        return [torch.optim.SGD([{"params": part} for part in parts], lr=0.1, momentum=0.9)]
    return [torch.optim.SGD(part, lr=0.1, momentum=0.9) for part in parts]


def under(host, order, config=CONFIG, overflows=None):
    """Six iterations; whether all ranks have the same weights after each, and the weights at the end."""
    model, end = net(), lambda: None
    optimizers = steppers = optimizers_of(model, len(order[0]))
    wrapped, scaler, backward = model, None, torch.Tensor.backward
    if host == "accelerator":
        precision = {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=1.0)]}
        accelerator = Accelerator(cpu=True, outer=config, **({} if overflows is None else precision))
        wrapped, *steppers = accelerator.prepare(model, *optimizers)
        backward, end = accelerator.backward, accelerator.wait_for_everyone
    elif host == "takeover":
        wrapped = DistributedDataParallel(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=overflows is not None)
    else:
        end = OuterLoop(model, config).attach(*optimizers).detach
    torch.manual_seed(dist.get_rank())
    equal = []
    for number in range(6):
        loss = wrapped(torch.randn(4, 3)).square().mean()
        if (number, dist.get_rank()) == (overflows, 1):
            loss = loss * float("inf")
        backward(loss if scaler is None else scaler.scale(loss))
        for which in order[number % len(order)]:
            steppers[which].step() if scaler is None else scaler.step(steppers[which])
        for stepper in steppers:
            stepper.zero_grad()
        if scaler is not None:
            scaler.update()
        mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
        equal.append(is_the_same(mine))
    end()
    if host == "accelerator":
        AcceleratorState._reset_state()
    return equal, mine


def all_orders(host):
    takeover = installed(CONFIG) if host == "takeover" else None
    outcomes = []
    for order in ORDERS:
        outcomes.append(under(host, order))
        if takeover is not None:
            takeover.forget()
    return outcomes


@pytest.mark.parametrize("host", ["accelerator", "takeover", "attach"])
def test_optimizers_in_any_order_are_one_with_as_many_groups_and_ranks_are_equal_after_each_round(host):
    for outcomes in run_ranks(all_orders, 2, host):
        (equal, wanted), *others = outcomes
        assert equal == [number % EVERY == 0 for number in range(1, 7)]
        assert all(other == (equal, wanted) for other in others)


@pytest.mark.parametrize("host", ["accelerator", "takeover"])
@on_ranks(2, each=[number % EVERY == 0 for number in range(1, 7)])
def test_steps_that_a_scaler_skips_end_an_iteration_too(host):
    if host == "takeover":
        installed(CONFIG)
    return under(host, [[1, 0, 2]], overflows=2)[0]


@pytest.mark.parametrize("host", ["accelerator", "takeover", "attach"])
@on_ranks(2)
def test_the_state_of_one_of_several_optimizers_is_not_averaged_alone(host):
    config = OuterConfig("local_sgd", every=2, inner="average", report="off")
    if host == "takeover":
        installed(config)
    with pytest.raises(ConfigError, match=r"AverageState.* synchronizes the state of one optimizer, and \d train"):
        under(host, [[0, 1, 2]], config)


def attempts_of(iteration, optimizers, names):
    return ["".join(str(int(done)) for done in iteration.step_attempted(optimizers[name])) for name in names]


def test_an_optimizer_that_does_not_step_is_awaited_in_two_iterations_and_again_once_it_steps():
    optimizers = dict(zip("ab", optimizers_of(net(), 3)[:2], strict=True))
    iteration = IterationTracker(optimizers.values())
    #                                                         a: waits; counted late; b no more awaited; b again
    assert attempts_of(iteration, optimizers, "aaaabaab") == ["", "1", "11", "1", "", "1", "", "1"]
    assert attempts_of(iteration, optimizers, "aab") == ["", "1", "1"]  # skipped once, so still awaited
    assert attempts_of(iteration, optimizers, "b") == [""]
    assert iteration.is_open
    assert iteration.close() == [True]
    assert iteration.close() == []


@given(orders=st.lists(st.permutations(range(3)), min_size=1, max_size=6), skips=st.sets(st.integers(0, 17)))
def test_as_many_iterations_are_counted_as_the_script_made(orders, skips):
    optimizers = optimizers_of(net(), 3)
    iteration = IterationTracker(optimizers)
    attempts = [which for order in orders for which in order]
    dones = [number not in skips for number in range(len(attempts))]
    ended = []
    for which, done in zip(attempts, dones, strict=True):
        ended += iteration.step_attempted(optimizers[which], done)
    assert ended == [any(dones[3 * k : 3 * k + 3]) for k in range(len(orders))]


def test_the_first_round_takes_all_that_the_first_iteration_trained():
    model, accelerator = net(), Accelerator(cpu=True, outer=OuterConfig("local_sgd", every=1, report="off"))
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in model]
    prepared, *optimizers = accelerator.prepare(model, *optimizers)
    (loop,) = accelerator.outer_loops
    accelerator.backward(prepared(torch.ones(1, 3)).sum())
    for optimizer in optimizers:
        optimizer.step()
    assert sum(map(len, loop.state_dict()["layout"][0])) == len([*model.parameters()])
    accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)
