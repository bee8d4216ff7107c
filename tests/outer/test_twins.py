# SPDX-License-Identifier: Apache-2.0
"""Replicas that see the same batches are found out in their first rounds, by the last bit."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from farflung.base.errors import ConfigError
from farflung.outer import OuterLoop, diloco
from farflung.outer.round import _cosine
from farflung.testing.sim import run_replicas
from tests.outer.replicas import on_replicas, shift
from tests.recipes import made

NAMES = ("diloco", "local_sgd", "streaming_diloco", "eager_diloco")
RECIPES = {name: made(name) for name in NAMES} | {"int8": made("diloco", codec="int8")}


def trained(group, recipe, seeds, rounds=6, lr=0.1):
    """Train on batches drawn from a seed for each replica; return the rounds that there were."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    draws = torch.Generator().manual_seed(seeds[group.rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with OuterLoop(model, recipe, group) as outer:
        for _ in range(4 * rounds):
            model(torch.randn(4, 4, generator=draws)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.step()
    return outer.stats().rounds


@pytest.mark.law("twins-are-found")
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_replicas_that_see_the_same_batches_stop_the_run_and_others_do_not(recipe):
    with pytest.raises(ConfigError, match=r"Replicas 0 and 2 see the same batches.*same_data=True"):
        run_replicas(trained, 3, recipe, [1, 2, 1])
    assert run_replicas(trained, 3, replace(recipe, same_data=True), [1, 2, 1])[0] > 3
    assert run_replicas(trained, 3, recipe, [1, 2, 3])[0] > 3
    assert run_replicas(trained, 2, recipe, [1, 1], 6, 0.0)[0] > 3  # nobody moves
    assert run_replicas(trained, 1, recipe, [1])


@pytest.mark.law("twins-are-found")
@on_replicas(3)
def test_changes_of_one_length_are_not_equal(group):
    """All steps of all replicas have one length, though not one direction."""
    torch.manual_seed(0)
    model = nn.Linear(16, 4, bias=False)
    draws = torch.Generator().manual_seed(group.rank)
    with OuterLoop(model, diloco(every=1), group) as outer:
        for step in range(8):
            shift([model.weight], -torch.randn(4, 16, generator=draws).sign() / 2**step)
            outer.step()
    assert outer.stats().rounds == 8


def moved(group, directions, recipe, numel):
    """Move weights in each step by a direction that is drawn from a seed of the replica, and by a little of its own."""
    weights = nn.Linear(numel, 1, bias=False)
    draws, own = (torch.Generator().manual_seed(seed) for seed in (directions[group.rank], 100 + group.rank))
    with OuterLoop(weights, recipe, group) as outer:
        cosines = []
        outer.listeners.append(lambda this: cosines.append(this.cosine))
        for _ in range(16):
            shift([weights.weight], torch.randn(1, numel, generator=draws))
            shift([weights.weight], 0.01 * torch.randn(1, numel, generator=own))
            outer.step()
    return cosines


@pytest.mark.parametrize(
    ("directions", "recipe", "numel", "times"),
    [
        ([1, 1], diloco(every=4), 2000, 1),
        ([1, 2], diloco(every=4), 2000, 0),
        ([1, 1], replace(diloco(every=4), same_data=True), 2000, 0),
        ([1, 1], diloco(every=4), 20, 0),
    ],
    ids=["alike", "different", "as is meant", "few parameters"],
)
def test_replicas_that_move_almost_alike_are_warned_of_once(capsys, directions, recipe, numel, times):
    cosines, _ = run_replicas(moved, 2, directions, recipe, numel)
    assert max(cosines) <= 1.0
    said = capsys.readouterr().err
    assert said.count("so they may see the same batches: share the data out with --as-accelerate") == times
    assert said.count("seed each replica by its place") == times


@on_replicas(2)
def moves_that_are_rounded_up(group):
    """Move weights by lengths that a coarse codec rounds up, most of them in one direction on all replicas."""
    weights, draws = nn.Linear(16_000, 1, bias=False), torch.Generator().manual_seed(group.rank)
    lengths = torch.where(torch.arange(16_000) % 64 == 0, 0.04, 0.03)
    with OuterLoop(weights, diloco(every=1, codec="e3m0"), group) as outer:
        for _ in range(4):
            signs = torch.where(torch.rand(1, 16_000, generator=draws) < 0.95, 1.0, -1.0)
            shift([weights.weight], lengths * signs)
            outer.step()


def test_replicas_whose_moves_a_coarse_codec_makes_longer_are_not_taken_for_alike(capsys):
    moves_that_are_rounded_up()
    assert "same batches" not in capsys.readouterr().err


@pytest.mark.parametrize("norm", [2.0, 1e-20, 3e7])
def test_a_cosine_is_at_most_1_whatever_its_rounding(norm):
    for factor in torch.rand(200).tolist():
        decision = SimpleNamespace(factors=(factor, factor), total=2 * factor)
        assert -1 <= _cosine(norm * (1 + 1e-7), decision, (norm, norm)) <= 1
