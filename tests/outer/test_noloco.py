# SPDX-License-Identifier: Apache-2.0
"""NoLoCo: anchors that are each replica's own, coupled by pairs, with and without the term that pulls them together."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from farflung.outer import OuterLoop, noloco
from farflung.testing.sim import run_replicas
from farflung.testing.simulate import simulate
from tests.outer.replicas import same, shift, values

MOVES, WIDTH = 3, 11  # rounds in which replicas move, before they stand still


def first():
    return torch.linspace(-2, 2, WIDTH)


def move(number, rank):
    """What a replica does in a round."""
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def anchors(group, recipe, rounds):
    """Return the anchor after each round, which the weights have just been set to."""
    model, seen = nn.ParameterList([first()]), []
    outer = OuterLoop(model, recipe, group, bucket_bytes=16)
    for number in range(rounds):
        if number < MOVES:
            shift(model, move(number, group.rank))
        outer.step()
        seen.append(model[0].detach().clone())
    return seen


def reference(size, rounds, lr, momentum, pull):
    """The same by the equations, in fp64, all replicas as rows of one array."""
    slow = np.tile(first().double().numpy(), (size, 1))
    u, seen = np.zeros_like(slow), []
    for number in range(rounds):
        fast = slow.copy()
        if number < MOVES:
            fast += [move(number, rank).double().numpy() for rank in range(size)]
        # Whom each one hears; the loop's first vote, in which members meet, has number 0.
        others = np.arange(size) - 2 ** ((number + 1) % int(np.ceil(np.log2(size))))
        mean_of_changes = ((fast - slow) + (fast - slow)[others]) / 2
        mean_of_anchors = (slow + slow[others]) / 2
        change = mean_of_changes + pull * (mean_of_anchors - slow)
        u = momentum * u + change
        slow = slow + lr * (change + momentum * u)
        seen.append(slow)
    return seen


def spread(outcomes):
    """How far anchors are from their mean, round by round."""
    rounds = np.array([[one.numpy() for one in seen] for seen in outcomes], dtype=np.float64)
    return np.linalg.norm(rounds - rounds.mean(axis=0), axis=(0, 2)).tolist()


@pytest.mark.parametrize("settings", [(0.7, 0.5, 1.0), (1.0, 0.0, 0.25), (0.4, 0.9, 0.0)], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_anchors_move_by_the_equations(size, settings):
    lr, momentum, pull = settings
    outcomes = run_replicas(anchors, size, noloco(1, lr=lr, momentum=momentum, pull=pull), 7)
    for number, rows in enumerate(reference(size, 7, *settings)):
        for rank, row in enumerate(rows):
            np.testing.assert_allclose(outcomes[rank][number].numpy(), row, rtol=0, atol=1e-5)


@pytest.mark.law("pull-brings-together")
@pytest.mark.parametrize("size", [3, 4, 8])
def test_anchors_come_together_where_nothing_moves_and_only_by_the_pull(size):
    cycle = (size - 1).bit_length()  # rounds until each one has heard of all
    rounds = MOVES + 8 * cycle
    for pull in (0.25, 1.0):
        seen = spread(run_replicas(anchors, size, noloco(1, momentum=0.0, pull=pull), rounds))[MOVES - 1 :]
        assert all(after <= before + 1e-6 for before, after in pairwise(seen))
        assert all(after < 0.95 * before + 1e-6 for before, after in pairwise(seen[::cycle]))
    apart = spread(run_replicas(anchors, size, noloco(1, momentum=0.0, pull=0.0), rounds))[MOVES - 1 :]
    assert apart == [apart[0]] * len(apart) != [0.0] * len(apart)


@pytest.mark.law("pull-brings-together")
@pytest.mark.parametrize("size", [3, 4, pytest.param(16, marks=pytest.mark.long)])
def test_so_they_do_with_the_default_momentum(size):
    rounds = MOVES + 10 * (size - 1).bit_length()
    with_pull, without = (spread(run_replicas(anchors, size, noloco(1, pull=pull), rounds)) for pull in (1.0, 0.0))
    assert with_pull[-1] < 0.01 * with_pull[MOVES - 1]
    assert without[-1] > without[MOVES - 1]


def test_among_many_replicas_a_large_rate_with_a_large_momentum_drives_them_apart():
    seen = spread(run_replicas(anchors, 16, noloco(1, lr=1.0, momentum=0.6), 120))
    assert seen[-1] > seen[MOVES - 1]


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randn(4, WIDTH, generator=generator)


def simulated(pull):
    def model():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def loss(net, inputs):
        return (net(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()

    return simulate(model, batches, noloco(4, pull=pull), replicas=8, steps=40, loss=loss)


def test_a_simulation_sends_as_many_bytes_with_the_pull_as_without():
    with_pull, without = simulated(1.0), simulated(0.0)
    assert with_pull.bytes_sent == without.bytes_sent > 0
    assert with_pull.curve[:4] == without.curve[:4]
    assert with_pull.curve[8:] != without.curve[8:]
    assert not same(values(with_pull.model), values(without.model))
