# SPDX-License-Identifier: Apache-2.0
"""Rounds over gloo: the bits of the simulation, and what flies on a thread of its own while training talks too."""

import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farflung.base.errors import RankFailure
from farflung.comm.torch_group import TorchGroup
from farflung.methods.recipes import (
    eager_diloco,
    edit,
    gossip,
    hierarchical,
    post_local_sgd,
    quadratic,
    streaming_diloco,
)
from farflung.outer import GatherMean, Identity, OuterLoop, by_bytes
from farflung.testing.patience import patience
from farflung.testing.ranks import run_ranks
from farflung.testing.sim import run_replicas
from tests.outer.replicas import Run, same, values
from tests.recipes import RECIPES


def stepped(run, numbers):
    """Training whose gradients are drawn, so that they are the same however many threads compute."""
    for number in numbers:
        draws = torch.Generator().manual_seed(10 * number + run.rank)
        for parameter in run.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draws)
        run.optimizer.step()


def every_recipe(group=None):
    """By name: what ranks with uneven data have learnt, and what it cost."""
    group = group or TorchGroup()
    outcomes = {}
    for name, recipe in RECIPES.items():
        run = Run(group, recipe, bucket_bytes=100)
        stepped(run, range((3, 7, 0, 8)[group.rank]))
        weights, stats = run.end(), run.outer.stats()
        outcomes[name] = weights, (stats.rounds, stats.bytes_sent, stats.bytes_received, stats.bytes_voting)
    return outcomes


@pytest.mark.law("processes-are-threads")
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_processes_get_the_bits_of_threads_in_every_recipe(size):
    on_ranks, on_threads = run_ranks(every_recipe, size), run_replicas(every_recipe, size)
    for name, recipe in RECIPES.items():
        assert same(*(outcome[name][0] for outcome in on_ranks)), name
        for (weights, costs), (simulated, expected) in zip(
            (each[name] for each in on_ranks), (each[name] for each in on_threads), strict=True
        ):
            assert costs == expected, name
            # gloo sums three or four numbers in an order of its own, and what is gathered is summed by rank.
            if size == 2 or (isinstance(recipe.aggregator, GatherMean) and recipe.agrees):
                assert same(weights, simulated), name
            assert all(torch.allclose(x, simulated[key], atol=1e-5) for key, x in weights.items()), name


def all_of_it():
    """All that one start of processes can show."""
    return {
        "beside": beside_a_talking_script(),
        "resumed": resumed_in_mid_flight(),
        "uneven": uneven_data(),
        "synced": looked_at_in_mid_flight(),
    }


class Slow(nn.ParameterList):
    """Weights that each step of rank r moves by 2**r, some milliseconds long."""

    def __init__(self, *sizes):
        super().__init__([nn.Parameter(torch.zeros(n)) for n in sizes])

    @torch.no_grad()
    def move(self, seconds=0.0):
        time.sleep(seconds)
        for parameter in self:
            parameter.add_(2.0 ** dist.get_rank())


OVERLAPPED = {
    "streaming": streaming_diloco(4, 2, delay=2, cut=by_bytes),
    "one at a time": streaming_diloco(2, 1, delay=1, cut=by_bytes, codec=Identity()),
    "eager": eager_diloco(3),
}


def beside_a_talking_script():
    """The script reduces something of its own at each step, on the group that the loop has a duplicate of."""
    rank, size = dist.get_rank(), dist.get_world_size()
    outcomes = {}
    for name, recipe in OVERLAPPED.items():
        model = Slow(300_000, 200_000, 10)
        outer = OuterLoop(model, recipe, bucket_bytes=1 << 18)
        heard = []
        for step in range(12):
            model.move(0.01)
            outer.step()
            word = torch.full((1000,), float(100 * step + rank))
            dist.all_reduce(word)
            heard.append(word.unique().tolist() == [100.0 * step * size + sum(range(size))])
        outer.close()
        stats = outer.stats()
        outcomes[name] = (values(model), all(heard), stats.seconds_hidden, stats.seconds_exposed, stats.rounds)
    return outcomes


def resumed_in_mid_flight():
    """Once to the end, and once through a file in the middle of a flight."""
    finals, air = [], 0
    for stop in (None, 5):
        run = Run(TorchGroup(), OVERLAPPED["streaming"], bucket_bytes=64)
        for step in range(12):
            if step == stop:
                air = len(run.outer.state_dict()["rounds"]["open"])
                run = run.resumed()
            run.steps(step)
        finals.append(run.end())
    return finals, air


def uneven_data():
    recipes = {
        **OVERLAPPED,
        "edit": edit(seconds=0.02),
        "hierarchical": hierarchical({2: 2, 4: None}),
        "gossip": gossip(2),
        "quadratic": quadratic(2, alpha=0.1),
        "post": post_local_sgd(3, 2),
    }
    outcomes = {}
    for name, recipe in recipes.items():
        run = Run(TorchGroup(), recipe)
        for step in range((9, 0, 4, 2)[dist.get_rank()]):
            time.sleep(0.005)
            run.steps(step)
        outcomes[name] = run.end()
    return outcomes


def looked_at_in_mid_flight():
    """An evaluation averages beside what is under way, and leaves it alone."""
    finals = []
    for looks in (False, True):
        run = Run(TorchGroup(), eager_diloco(3), bucket_bytes=64)
        for step in range(8):
            run.steps(step)
            with run.outer.synced() if looks else nullcontext():
                pass
        finals.append(run.end())
    return finals


@pytest.mark.long
def test_what_overlaps_gets_mixed_up_with_nothing():
    outcomes = run_ranks(all_of_it, 4)
    for name in OVERLAPPED:
        weights, heard, hidden, exposed, rounds = zip(*(each["beside"][name] for each in outcomes), strict=True)
        assert same(*weights)
        assert all(heard), name
        assert min(hidden) > 0
        assert max(exposed) < 12 * 0.5
        assert min(rounds) >= 4
    for name, weights in outcomes[0]["uneven"].items():
        assert same(weights, *(each["uneven"][name] for each in outcomes)), name
        assert all(value.isfinite().all() for value in weights.values())
    for each in outcomes:
        finals, air = each["resumed"]
        assert air == 1
        assert same(*finals)
        assert same(*each["synced"])


def left_in_mid_flight():
    """Rank 1 raises while a fragment is in the air; the others go on training, and hear of it at their next round."""
    recipes = {**OVERLAPPED, "hierarchical": hierarchical({1: 2, 8: None})}
    groups = [TorchGroup(dist.new_group()) for _ in recipes]  # one that a rank has left in mid-round is of no more use
    said = {}
    for (name, recipe), group in zip(recipes.items(), groups, strict=True):
        model = Slow(1000, 10)
        began = time.monotonic()
        try:
            with OuterLoop(model, recipe, group) as outer:
                for step in range(30):
                    if step == 6 and dist.get_rank() == 1:
                        raise ValueError("bad sample")
                    model.move(0.001)
                    outer.step()
        except ValueError:
            said[name] = "left"
        except RankFailure as error:
            said[name] = (str(error), time.monotonic() - began)
            assert outer.state_dict()["position"] >= 6
    return said


def test_an_exception_with_a_flight_in_the_air_is_heard_of_within_seconds():
    """In `hierarchical` the ranks of the other block hear of it when they come to a round of all."""
    outcomes = run_ranks(left_in_mid_flight, 4)
    for name in (*OVERLAPPED, "hierarchical"):
        assert outcomes[1][name] == "left"
        for each in (outcomes[0], outcomes[2], outcomes[3]):
            message, seconds = each[name]
            assert "rank 1 left (ValueError: bad sample)" in message, name
            assert seconds < patience(8)
