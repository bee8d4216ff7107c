# SPDX-License-Identifier: Apache-2.0
"""What becomes of the inner optimizer's state in a round: kept, reset, or averaged on periods of its own."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from farflung.base.errors import ConfigError
from farflung.comm.group import SoloGroup
from farflung.outer import AverageState, OuterLoop, ResetState, diloco, local_sgd, sparse_loco
from farflung.testing.sim import run_replicas
from tests.outer.replicas import linear, no_statistics, same, train, values
from tests.recipes import RECIPES


def with_adam(group, inner, steps, make=no_statistics):
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    outer, seen = OuterLoop(model, replace(diloco(2), inner=inner), group).attach(optimizer), []
    for number in range(steps):
        train(model, optimizer, number, group.rank)
        states = {name: optimizer.state.get(parameter, {}) for name, parameter in model.named_parameters()}
        seen.append({name: {key: value.clone() for key, value in state.items()} for name, state in states.items()})
    outer.close()
    return seen, outer.stats()


def alike(seen, name):
    """Whether two replicas have the same moments, after each step."""
    first, second = (states for states, _ in seen)
    return [all(torch.equal(a[key][name], b[key][name]) for key in a) for a, b in zip(first, second, strict=True)]


def test_adams_moments_are_averaged_when_replicas_agree():
    seen, plain = (run_replicas(with_adam, 2, inner, 4) for inner in (AverageState(), RECIPES["diloco"].inner))
    for name in ("exp_avg", "exp_avg_sq"):
        assert alike(seen, name) == [False, True, False, True]
    assert seen[0][0][3]["0.weight"]["step"] == 4
    assert not alike(plain, "exp_avg")[1]
    n = sum(p.numel() for p in no_statistics().parameters())
    assert seen[0][1].bytes_sent - plain[0][1].bytes_sent == 2 * 2 * 4 * n  # two rounds, two moments


def test_each_moment_has_a_period_of_its_own():
    seen = run_replicas(with_adam, 2, AverageState({"exp_avg": 1, "exp_avg_sq": 3}), 8)
    assert alike(seen, "exp_avg")[1::2] == [True] * 4
    assert alike(seen, "exp_avg_sq")[1::2] == [False, False, True, False]


def test_a_reset_forgets_the_moments():
    seen = run_replicas(with_adam, 2, ResetState(), 4)
    assert [any(states.values()) for states in seen[0][0]] == [True, False, True, False]


def momentum_after(group, recipe, gradients, lr=0.1, momentum=None):
    """Return the momentum after a round: that of one step with this rank's gradient, unless it is given."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * (1 + group.rank), momentum=0.5)
    outer = OuterLoop(model, replace(recipe, inner=AverageState()), group, inner=optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradients[group.rank])
    optimizer.step()
    if momentum and momentum[group.rank]:
        optimizer.state[model.weight]["momentum_buffer"].fill_(momentum[group.rank])
    outer.step()
    return optimizer.state[model.weight]["momentum_buffer"].unique().tolist()


def test_moments_keep_their_size_where_a_replica_is_clipped():
    recipe = sparse_loco(1, codec="none")  # rank 1 moves twice as far as rank 0, so its values count for less
    assert run_replicas(momentum_after, 2, recipe, (1.5, 1.5)) == [[pytest.approx(1.5)]] * 2


def test_moments_that_are_not_finite_are_left_out():
    for momentum, after in ((None, math.inf, None), 1.0), ((math.inf,) * 3, math.inf):
        assert run_replicas(momentum_after, 3, local_sgd(1), (1.0,) * 3, 0.0, momentum) == [[after]] * 3


class Scalar(nn.Module):
    """A parameter without dimensions, and one in fp64: the counter of Adam has the shape of the former."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x):
        return x[:, :2] * self.scale * self.wide


def test_the_average_of_moments_keeps_counters_and_precision():
    seen, plain = (run_replicas(with_adam, 2, one, 2, Scalar) for one in (AverageState(), RECIPES["diloco"].inner))
    assert alike(seen, "exp_avg")[1]
    assert seen[0][1].bytes_sent - plain[0][1].bytes_sent == 2 * 3 * 8
    state = seen[0][0][1]["wide"]
    assert state["exp_avg"].dtype == torch.float64
    assert (state["exp_avg"].float().double() != state["exp_avg"]).any()


def test_an_inner_state_that_is_not_there_is_an_error():
    outer = OuterLoop(linear(), replace(diloco(1), inner=AverageState()), SoloGroup())
    with pytest.raises(ConfigError, match="needs the inner optimizer"):
        outer.step()
    with pytest.raises(ConfigError, match=r"\['exp_avg', .*none of \['momentum'\]"):
        run_replicas(with_adam, 2, AverageState({"momentum": 2}), 2)


def test_a_rank_without_moments_holds_nobody_up():
    def one_never_stepped(group):
        model = linear()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        recipe = replace(diloco(2), inner=AverageState({"exp_avg": 1}))
        with OuterLoop(model, recipe, group).attach(optimizer) as outer:
            for number in range((4, 0)[group.rank]):
                train(model, optimizer, number, group.rank)
        return values(model), outer.stats().rounds

    (one, count), (other, _) = run_replicas(one_never_stepped, 2)
    assert same(one, other)
    assert count == 2
