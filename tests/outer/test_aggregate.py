# SPDX-License-Identifier: Apache-2.0
"""What is made of the replicas' values: means that agree with each other, outliers that count for nothing, gossip."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from farflung.base.errors import ConfigError
from farflung.codec.base import Identity
from farflung.codec.blockwise import Int4, Int8
from farflung.methods.aggregate import GatherMean, ReduceScatterMean, TrimmedMean
from farflung.methods.policies import ClippedToMedian, WithoutOutliers
from farflung.methods.recipes import diloco, edit, gossip
from farflung.methods.schedule import Every, Levels
from farflung.methods.weighting import ByWork, Decision
from farflung.outer import ErrorFeedback, Mean, OuterLoop, Recipe, TopK
from farflung.testing.sim import run_replicas
from farflung.votes.ballot import Tally
from tests.outer.replicas import Run, dyadic, kept_of, linear, on_replicas, same, shift, train, values

EXACT = TopK(k=16, chunk=16, bits=32)


def aggregated(group, aggregator, codec, n, factors):
    """One bucket through an aggregator alone."""
    x = dyadic(n, seed=group.rank)
    payload = replace(aggregator.prepare(x, codec, group, None), weight=factors[group.rank])
    total, divisor = aggregator.start(payload, codec, group, 1).wait(Decision(factors, float(sum(factors))))
    return total / divisor


@pytest.mark.law("lossless-is-plain")
@settings(max_examples=40)
@given(st.integers(0, 70), st.sampled_from([(1.0, 1.0), (1.0, 1.0, 0.0, 2.0), (4.0, 0.0, 2.0, 2.0), (0.0, 1.0)]))
def test_every_way_to_the_mean_gives_the_same_bits_of_exact_data(n, factors):
    size = len(factors)
    expected = sum(factor * dyadic(n, seed=rank) for rank, factor in enumerate(factors)) / sum(factors)
    for aggregator, codec in (
        (Mean(), Identity()),
        (GatherMean(), Identity()),
        (GatherMean(), EXACT),
        (ReduceScatterMean(), EXACT),
    ):
        for got in run_replicas(aggregated, size, aggregator, codec, n, factors):
            assert torch.equal(got, expected)


@pytest.mark.law("same-bits")
@settings(max_examples=40)
@given(st.integers(0, 300), st.integers(2, 5), st.sampled_from([Int8(16), Int4(8), TopK(3, 16)]))
def test_replicas_get_the_same_bits_whatever_the_codec_rounds(n, size, codec):
    factors = tuple(float(rank + 1) for rank in range(size))
    for aggregator in (GatherMean(), ReduceScatterMean()):
        first, *others = run_replicas(aggregated, size, aggregator, codec, n, factors)
        assert all(torch.equal(first, other) for other in others)


def trained(group, recipe, steps):
    run = Run(group, recipe, linear, lr=2.0**-3, momentum=0.0)
    run.steps(*range(steps))
    return run.end()


@pytest.mark.law("lossless-is-plain")
@pytest.mark.parametrize("size", [2, 4])
def test_a_whole_run_with_an_exact_codec_is_one_without(size):
    plain = diloco(1, lr=0.5, momentum=0.5)
    expected = run_replicas(trained, size, plain, 2)
    for aggregator in (GatherMean(), ReduceScatterMean()):
        for codec in (EXACT, ErrorFeedback(EXACT)):
            assert same(*expected, *run_replicas(trained, size, replace(plain, codec=codec, aggregator=aggregator), 2))


def on_two_levels(group, recipe):
    model, seen = linear(), []
    optimizer, outer = torch.optim.SGD(model.parameters(), lr=2.0**-3), OuterLoop(model, recipe, group)
    for number in range(4):
        train(model, optimizer, number, group.rank)
        alone = values(model)
        outer.step()
        seen.append((alone, values(model)))
    return seen


def mean(states):
    return {name: sum(state[name] for state in states) / len(states) for name in states[0]}


@pytest.mark.law("levels-are-one-mean")
def test_levels_average_their_blocks_and_at_a_common_step_all_replicas():
    seen = run_replicas(on_two_levels, 4, Recipe(Levels({1: 2, 3: None})))
    for step in (0, 1):
        for block in ((0, 1), (2, 3)):
            expected = mean([seen[rank][step][0] for rank in block])
            assert same(expected, *(seen[rank][step][1] for rank in block))
        assert not same(seen[0][step][1], seen[2][step][1])
    assert same(mean([run[2][0] for run in seen]), *(run[2][1] for run in seen))


def gossiping(group, recipe, rounds):
    model = nn.ParameterList([dyadic(7, seed=9)])
    outer = OuterLoop(model, recipe, group, bucket_bytes=12)
    model[0].data.copy_(dyadic(7, seed=group.rank))
    seen = [model[0].detach().clone()]
    for _ in range(rounds):
        outer.step()
        seen.append(model[0].detach().clone())
    return seen


@pytest.mark.law("gossip-keeps-the-sum")
@pytest.mark.parametrize("size", [2, 4, 8])
def test_gossip_keeps_the_sum_and_agrees_after_log_m_rounds(size):
    seen = run_replicas(gossiping, size, gossip(1), size.bit_length() - 1)
    total = sum(row[0] for row in seen)
    assert all(torch.equal(sum(rows), total) for rows in zip(*seen, strict=True))
    assert all(torch.equal(row[-1], total / size) for row in seen)
    assert size == 2 or not torch.equal(seen[0][-2], seen[1][-2])


@pytest.mark.law("gossip-keeps-the-sum")
@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("codec", [None, Int8(4)])
def test_the_sum_is_kept_among_any_number_and_by_codecs_that_round(size, codec):
    seen = run_replicas(gossiping, size, gossip(1, codec=codec), 6)
    total = sum(row[0] for row in seen)
    assert all(torch.allclose(sum(rows), total, rtol=0, atol=1e-6) for rows in zip(*seen, strict=True))
    before, after = (max((row[step] - total / size).abs().max() for row in seen) for step in (0, 6))
    assert after < 0.3 * before


# Outliers.
def moved(group, recipe, ways, **options):
    """One round in which replica r moves all its weights by ways[r]."""
    model = nn.ParameterList([torch.zeros(5), torch.zeros(())])
    outer = OuterLoop(model, recipe, group, **options)
    shift(model, ways[group.rank])
    outer.step()
    return [*model[0].tolist(), model[1].item()]


def test_a_trimmed_mean_has_no_ear_for_one_who_is_far_off():
    recipe = Recipe(Every(1), aggregator=TrimmedMean(1))
    assert run_replicas(moved, 4, recipe, (1.0, 3.0, -1e6, 1e9)) == [[2.0] * 6] * 4
    assert run_replicas(moved, 3, recipe, (1.0, 3.0, 1e9)) == [[3.0] * 6] * 3
    with pytest.raises(ConfigError, match="needs 3 replicas"):
        run_replicas(moved, 2, recipe, (1.0, 3.0))


@on_replicas(3)
def test_a_trimmed_mean_of_the_last_that_have_data_still_ends(group):
    model = nn.ParameterList([torch.zeros(2)])
    with OuterLoop(model, Recipe(Every(2), aggregator=TrimmedMean(1)), group) as outer:
        for _ in range((2, 4, 4)[group.rank]):
            shift(model, 2.0**group.rank)
            outer.step()
    assert model[0].tolist() == [10.0, 10.0]  # after 2 steps: the median of 2, 4, 8; after 4: the mean of 4 + 4, 4 + 8


def test_a_long_way_is_clipped_to_the_median_of_all():
    recipe = replace(diloco(1, lr=1.0, momentum=0.0), policy=ClippedToMedian(), aggregator=GatherMean())
    for ways, counted in ((1.0, 2.0, 30.0), (1.0, 2.0, 2.0)), ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0)):
        assert run_replicas(moved, 3, recipe, ways) == [pytest.approx([sum(counted) / 3] * 6)] * 3
    assert ClippedToMedian()((1.0, 1.0, 0.0), (2.0, 4.0, 0.0), {}).factors == (1.0, 0.75, 0.0)  # of those at work


def weighed(group, recipe, items):
    """Rounds of three attempts, in which replica r moves by r + 1; a step without items is not done."""
    model, rounds = nn.ParameterList([torch.zeros(5)]), []
    outer = OuterLoop(model, recipe, group)
    outer.listeners.append(rounds.append)
    for number in items[group.rank]:
        shift(model, (group.rank + 1.0) / 4)
        outer.count(done=number > 0, items=number)
        outer.sync_if_due()
    stats = outer.stats()
    return [this.weights for this in rounds], model[0][0].item(), (stats.steps, stats.attempts)


@pytest.mark.law("weights-are-work")
@pytest.mark.parametrize("codec", [None, "fp16", "int8"])
@pytest.mark.parametrize("weigh_by", ["steps", "items", "items_squared"])
def test_replicas_count_by_their_steps_their_items_or_items_squared_over_steps(weigh_by, codec):
    items = [(4096, 4096, 4096, 4096, 0, 0), (512, 0, 512, 512, 512, 512), (0, 0, 8192, 8192, 8192, 8192)]
    recipe = replace(diloco(3, lr=1.0, momentum=0.0, codec=codec), weigh_by=weigh_by)
    rows = np.array(items, dtype=np.float64).reshape(3, 2, 3)
    tokens, steps = rows.sum(2), (rows > 0).sum(2)
    work = {"steps": steps, "items": tokens, "items_squared": tokens**2 / steps}[weigh_by]
    shares = work / work.sum(0)
    moved = (shares * (np.arange(3)[:, None] + 1.0) * 3 / 4).sum()
    for (seen, way, counts), done in zip(run_replicas(weighed, 3, recipe, items), steps.sum(1), strict=True):
        assert np.allclose(np.array(seen).T, shares)
        assert way == pytest.approx(moved, rel=2e-3 if codec else 1e-6)
        assert counts == (done, 6)  # a step without items moves the schedule


@pytest.mark.law("weights-are-work")
def test_on_each_level_replicas_count_by_what_they_have_done_since_its_last_round():
    recipe, items = Recipe(Levels({1: 2, 3: None})), [(1, 1, 1), (0, 0, 1), (0, 0, 1), (0, 0, 1)]
    seen = [rounds for rounds, *_ in run_replicas(weighed, 4, recipe, items)]
    of_all = (pytest.approx((1 / 2, 1 / 6, 1 / 6, 1 / 6)),)
    assert [*map(tuple, seen)] == [((1, 0), (1, 0), *of_all)] * 2 + [of_all] * 2


@pytest.mark.law("outliers-are-left-out")
def test_softmax_at_an_infinite_temperature_is_the_mean():
    calm = edit(1, lr=0.5, momentum=0.5, temperature=math.inf, max_norm=math.inf)
    assert same(*run_replicas(trained, 4, diloco(1, lr=0.5, momentum=0.5), 2), *run_replicas(trained, 4, calm, 2))


@pytest.mark.law("outliers-are-left-out")
def test_without_a_replica_that_is_no_number_the_others_agree_and_it_is_healed():
    recipe = edit(1, lr=1.0, momentum=0.0, max_norm=math.inf)
    for way in (math.nan, math.inf):
        three = run_replicas(moved, 3, recipe, (1.0, 2.0, way))
        assert three[2] == three[0] == run_replicas(moved, 2, recipe, (1.0, 2.0))[0]


@pytest.mark.law("outliers-are-left-out")
def test_a_short_way_counts_more():
    norms = [math.sqrt(6) * way for way in (1.0, 2.0)]
    shares = torch.softmax(-torch.tensor(norms, dtype=torch.float64), 0)
    got = run_replicas(moved, 2, edit(1, lr=1.0, momentum=0.0), (1.0, 2.0))
    assert torch.allclose(torch.tensor(got), (shares[0] + 2 * shares[1]).float())


@pytest.mark.parametrize("bucket_bytes", [4, 8, None])
@pytest.mark.parametrize("size", [2, 3])
def test_a_mean_that_is_too_long_is_shortened_however_it_was_cut(size, bucket_bytes):
    recipe = edit(1, lr=1.0, momentum=0.0, max_norm=0.5)
    whole, cut = (
        torch.tensor(run_replicas(partial(moved, recipe=recipe, ways=(3.0,) * size, **options), size)[0])
        for options in ({}, {"bucket_bytes": bucket_bytes})
    )
    assert torch.allclose(whole.norm(), torch.tensor(0.5))
    assert torch.equal(whole, cut)


def surprised(group, recipe, ways):
    model, seen = nn.ParameterList([torch.zeros(4)]), []
    outer = OuterLoop(model, recipe, group)
    for way in ways:
        shift(model, way)
        outer.step()
        seen.append(model[0][0].item())
    return seen, outer.stats().dropped_rounds


@pytest.mark.law("outliers-are-left-out")
def test_where_all_are_unusual_nothing_happens_until_that_is_what_is_usual():
    policy = WithoutOutliers(patience=3, max_norm=math.inf)
    recipe = replace(edit(1, lr=1.0, momentum=0.0), policy=policy, same_data=True)
    with pytest.warns(RuntimeWarning, match="unusual"):
        outcomes = run_replicas(surprised, 2, recipe, (1, 1, 1, 1, 50, 50, 50, 50))
    # Dropped rounds keep local steps. After three of them what was unusual is what is expected.
    assert outcomes == [([1, 2, 3, 4, 54, 104, 154, 204], 3)] * 2


def judged(rule, memory, *norms):
    return rule((1.0,) * len(norms), norms, memory)


@pytest.mark.law("outliers-are-left-out")
def test_what_was_refused_leaves_no_trace_in_the_statistics():
    rule, memory = WithoutOutliers(patience=4, decay=0.5), {}
    for way in (1.0, 1.1, 0.9, 1.0, 1.05):
        assert judged(rule, memory, way, way).unfit == ()
    before = {rank: past[:3] for rank, past in memory.items()}
    assert before[0] == pytest.approx([5, 1.01875, 1.040625])  # each mean of half the mean before and half the new one
    for outlier in (100.0, math.nan, math.inf):
        verdict = judged(rule, memory, outlier, math.nan)
        assert (verdict.unfit, verdict.total) == ((0, 1), 0)
    assert {rank: past[:3] for rank, past in memory.items()} == before
    assert judged(rule, memory, 100.0, 1.0).factors == (0.0, 1.0)  # after three outliers the next one is still seen
    for way in (1.0, 100.0) * 20:
        assert judged(rule, memory, way, 1.0).factors == (float(way == 1.0), 1.0)  # they are not in a row
    assert min(judged(rule, memory, 1.002, 1.0).factors) > 0  # however equal the others were


def kept_back(group):
    """Error feedback of a replica that is refused once: nothing of that round may stay in its residual."""
    recipe = edit(1, lr=1.0, momentum=0.0, codec=ErrorFeedback(TopK(1, 4)))
    model = nn.ParameterList([torch.zeros(8)])
    outer = OuterLoop(model, replace(recipe, aggregator=GatherMean(), same_data=True), group)
    for step in range(4):
        shift(model, torch.arange(8.0) + (math.nan if step == 1 and group.rank == 1 else 0))
        outer.step()
    assert all(bool(value.isfinite().all()) for value in (model[0], *kept_of(outer)[0]["residuals"]))
    return values(model)


def test_a_replica_that_was_refused_sends_nothing_of_that_later():
    assert same(*run_replicas(kept_back, 3))


def spoiled_at_the_end(group):
    model = nn.ParameterList([torch.zeros(2)])
    with OuterLoop(model, gossip(5), group) as outer:
        shift(model, (1.0, math.nan, 4.0)[group.rank])
        outer.step()
    return model[0].tolist()


def test_a_spoiled_replica_does_not_spoil_the_average_at_the_end():
    with pytest.warns(RuntimeWarning, match="weights of rank 1 are"):
        assert run_replicas(spoiled_at_the_end, 3) == [[2.5, 2.5]] * 3


def voted(*weights, norms=None, largest=None, sound=None):
    zeros = (0.0,) * len(weights)
    tally = Tally(weights, norms or zeros, largest or zeros, sound or (True,) * len(weights), False, 0, (-1,))
    return tally, ByWork()(tally.weights, tally.norms, {})


def test_ranks_count_by_what_they_have_done_of_a_round():
    assert voted(1, 0.5, 0)[1] == Decision((1, 0.5, 0), 1.5)
    assert voted(0.25, 0.25, 0)[1] == Decision((1, 1, 0), 2)
    assert voted(1)[1] == Decision((1,), 1)
    assert voted(1, 0.5, 0.25, sound=(True, False, True))[0].sound_weights == (1, 0, 0.25)


def test_ranks_that_spoil_a_sum_are_named():
    assert voted(1, 1, 1, norms=(1.0, math.nan, math.inf))[1].unfit == (1, 2)
    assert voted(1, 1, norms=(1e30, 1e30))[1].unfit == ()

    def too_large(*weights, largest):
        tally, verdict = voted(*weights, largest=largest)
        return tally.too_large(verdict.factors, 65504)

    assert too_large(1, 1, largest=(3e4, 3e4)) == ()
    assert too_large(1, 1, largest=(1.0, 65504.0)) == (1,)
    assert too_large(30, 1, largest=(3e3, 3e3)) == ()  # in proportion, so that the largest is about 1
    tally, _ = voted(30, 1, largest=(3e3, 3e3))
    assert tally.too_large(tally.weights, 65504) == (0,)  # as they go on the wire before the vote
