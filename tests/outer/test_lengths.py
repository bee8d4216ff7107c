# SPDX-License-Identifier: Apache-2.0
"""The mean whose length is the replicas' own: whatever their number, the cut, the codec, and who takes part."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from farflung.outer import OuterLoop, RadialMean, diloco, edit, streaming_diloco
from farflung.testing.sim import run_replicas
from tests.outer.replicas import Run, dyadic, same, values
from tests.recipes import RECIPES

PLAIN, RADIAL = (diloco(1, lr=1.0, momentum=0.0, radial=radial) for radial in (False, True))
SHAPES = (40, 7, 1)  # with buckets of 16 values the first one is cut into three


class Tensors(nn.Module):
    """Parameters of zeros, the last one an embedding's, whose rows a head uses too."""

    def __init__(self):
        super().__init__()
        self.rows = nn.ParameterList([torch.zeros(n) for n in SHAPES])
        self.head, self.table = nn.Linear(2, 3, bias=False), nn.Embedding(3, 2)
        with torch.no_grad():
            self.table.weight.zero_()
        self.head.weight = self.table.weight

    @torch.no_grad()
    def move(self, flat):
        """Add `flat`, `[numel]`, to all values."""
        values = list(self.parameters())
        for value, part in zip(values, torch.split(flat, [each.numel() for each in values]), strict=True):
            value.add_(part.view_as(value))

    def flat(self):
        """Return all values, `[numel]`."""
        return torch.cat([value.detach().flatten() for value in self.parameters()])


NUMEL = sum(SHAPES) + 6
PARTS = np.cumsum((0, *SHAPES, 6))


def moved(group, recipe, ways, counts=None, **options):
    """Rounds in which replica r moves by ways[r][round], after so many attempts of which `counts[r]` are done."""
    model = Tensors()
    outer = OuterLoop(model, recipe, group, **options)
    norms = []
    outer.listeners.append(lambda this: norms.append((this.norm, this.cosine)))
    for way in ways[group.rank]:
        model.move(way)
        outer.count(done=counts is None or bool(counts[group.rank]))
        outer.sync_if_due()
    return model.flat(), norms


def by_hand(ways, weights):
    """The same move of the anchor in fp64: the published equation, tensor by tensor."""
    moves = [way.double().numpy() for way in ways]
    total = np.zeros(NUMEL)
    for each in range(len(moves[0])):
        for tensor, (start, end) in enumerate(pairwise(PARTS)):
            own = [move[each, start:end] for move in moves]
            mean = sum(weight * one for weight, one in zip(weights, own, strict=True)) / sum(weights)
            length = sum(weight * np.linalg.norm(one) for weight, one in zip(weights, own, strict=True)) / sum(weights)
            is_plain = tensor == len(SHAPES) or not np.linalg.norm(mean)
            total[start:end] += mean if is_plain else mean / np.linalg.norm(mean) * length
    return torch.from_numpy(total).float()


def random_ways(size, rounds=3):
    return [torch.randn(rounds, NUMEL, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]


@pytest.mark.law("radial-keeps-lengths")
@pytest.mark.parametrize("bucket_bytes", [64, 100, None])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, 1.0, 1.0, 1.0)])
def test_the_mean_has_the_mean_length_of_each_tensor_however_it_is_cut(weights, bucket_bytes):
    ways = random_ways(len(weights))
    options = {"counts": weights, "bucket_bytes": bucket_bytes}
    outcomes = run_replicas(lambda group: moved(group, RADIAL, ways, **options), len(weights))
    assert all(torch.equal(outcomes[0][0], flat) for flat, _ in outcomes)
    assert torch.allclose(outcomes[0][0], by_hand(ways, weights), atol=1e-5)


@pytest.mark.law("radial-keeps-lengths")
@pytest.mark.parametrize("codec", [None, "bf16", "int8", "topk"])
def test_equal_moves_and_a_replica_alone_give_the_plain_mean(codec):
    way = [dyadic(3, NUMEL, seed=5)]
    plain, radial = (diloco(1, lr=1.0, momentum=0.0, radial=radial, codec=codec) for radial in (False, True))
    for size in (1, 2, 4):
        (expected, _), (got, _) = (run_replicas(moved, size, recipe, way * size)[0] for recipe in (plain, radial))
        assert torch.equal(got, expected)
    (expected, _), (got, _) = (
        run_replicas(moved, 3, recipe, random_ways(3), (0, 1, 0))[1] for recipe in (plain, radial)
    )
    assert torch.equal(got, expected)


@pytest.mark.law("radial-keeps-lengths")
def test_moves_with_nothing_in_common_lose_no_length_however_many_there_are():
    lengths = {recipe.changes_norm: [] for recipe in (PLAIN, RADIAL)}
    for size in (1, 2, 4, 8):
        ways = [torch.zeros(1, NUMEL).index_fill(1, torch.tensor(rank), 3.0) for rank in range(size)]
        for recipe in (PLAIN, RADIAL):
            (flat, norms), *_ = run_replicas(moved, size, recipe, ways)
            lengths[recipe.changes_norm].append(flat.norm().item())
            assert norms[0] == pytest.approx((flat.norm().item(), 0.0), abs=1e-6)
    assert lengths[True] == pytest.approx([3.0] * 4)
    assert lengths[False] == pytest.approx([3.0 / math.sqrt(size) for size in (1, 2, 4, 8)])


@pytest.mark.law("radial-keeps-lengths")
def test_neither_the_order_of_replicas_nor_the_scale_of_their_moves_matters():
    ways = random_ways(3)
    expected = run_replicas(moved, 3, RADIAL, ways)[0][0]
    assert torch.allclose(run_replicas(moved, 3, RADIAL, ways[::-1])[0][0], expected, atol=1e-6)
    for scale in (2.0**-40, 2.0**40):
        scaled = run_replicas(moved, 3, RADIAL, [way * scale for way in ways])[0][0]
        assert torch.equal(scaled, expected * scale)
    # What cancels out has no direction, and stays where it is.
    assert not run_replicas(moved, 2, RADIAL, [ways[0], -ways[0]])[0][0].any()


OTHERS = {
    "streaming": streaming_diloco(4, 2, delay=2, radial=True),
    "sparse_loco": replace(RECIPES["sparse_loco"], aggregator=RadialMean()),
    "edit": replace(edit(2, max_norm=0.01), aggregator=RadialMean()),
    "diloco": diloco(2, radial=True),
}


def trained(group, recipe):
    run = Run(group, recipe)
    run.steps(*range(9 - group.rank))
    return run.end(), run.outer.stats()


@pytest.mark.law("same-bits")
@pytest.mark.parametrize("name", OTHERS)
def test_replicas_stay_equal_under_codecs_delays_policies_and_uneven_data(name):
    states, stats = zip(*run_replicas(trained, 3, OTHERS[name]), strict=True)
    assert same(*states)
    assert stats[0].rounds > 3
    assert not stats[0].dropped_rounds


def test_what_is_lengthened_is_clipped_after_that():
    ways = random_ways(2, rounds=1)
    recipe = replace(edit(1, lr=1.0, momentum=0.0, max_norm=0.5), aggregator=RadialMean())
    assert run_replicas(moved, 2, recipe, ways)[0][0].norm().item() == pytest.approx(0.5)


@pytest.mark.law("resume-is-exact")
def test_a_run_resumed_with_a_fragment_in_flight_ends_with_the_same_bits():
    def with_stops(group, *stops):
        run = Run(group, OTHERS["streaming"])
        for step in range(12):
            run = run.resumed() if step in stops else run
            run.steps(step)
        return values(run.model), run.outer.stats().cosine

    for (whole, cosine), (again, other) in zip(
        run_replicas(with_stops, 2), run_replicas(with_stops, 2, 7), strict=True
    ):
        assert same(whole, again)
        assert cosine == other
