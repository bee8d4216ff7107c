# SPDX-License-Identifier: Apache-2.0
"""What is made of the replicas' values: means that agree with each other, outliers that count for nothing, gossip."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from farflung.base.errors import ConfigError
from farflung.outer import (
    ClippedToMedian,
    ErrorFeedback,
    Every,
    GatherMean,
    Gossip,
    Identity,
    Int4,
    Int8,
    Levels,
    Mean,
    OuterLoop,
    Recipe,
    ReduceScatterMean,
    TopK,
    TrimmedMean,
    WithoutOutliers,
    diloco,
    edit,
    gossip,
    local_sgd,
    sparse_loco,
)
from farflung.outer.weighting import Decision
from farflung.testing.sim import run_replicas
from tests.outer.replicas import Run, dyadic, kept_of, linear, same, train, values

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
            recipe = replace(plain, codec=codec, aggregator=aggregator)
            assert same(*expected, *run_replicas(trained, size, recipe, 2))


def residuals(group, recipe):
    run = Run(group, recipe, linear, lr=2.0**-3, momentum=0.0)
    run.steps(0, 1)
    return kept_of(run.outer)[0]["residuals"]


@pytest.mark.law("lossless-is-plain")
def test_a_top_k_of_density_one_leaves_nothing_over():
    for left in run_replicas(residuals, 2, sparse_loco(1, codec=EXACT)):
        assert left
        assert all(not residual.any() for residual in left)
    assert any(
        residual.any() for left in run_replicas(residuals, 2, sparse_loco(1, codec=TopK(1, 16))) for residual in left
    )


def on_two_levels(group, recipe):
    model, seen = linear(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-3)
    outer = OuterLoop(model, recipe, group)
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


def block_then_all(group, sizes):
    model = linear()
    outer = OuterLoop(model, Recipe(Levels(sizes)), group)
    with torch.no_grad():
        model.weight.add_(dyadic(2, 3, seed=group.rank))
    outer.step()
    outer.step()
    return values(model)


@pytest.mark.law("levels-are-one-mean")
def test_the_mean_of_the_means_of_equal_blocks_is_the_flat_mean():
    assert same(*run_replicas(block_then_all, 4, {1: 2, 2: None}), *run_replicas(block_then_all, 4, {2: None}))


def gossiping(group, recipe, rounds):
    model = nn.ParameterList([dyadic(7, seed=9)])
    outer = OuterLoop(model, recipe, group, bucket_bytes=12)
    with torch.no_grad():
        model[0].copy_(dyadic(7, seed=group.rank))
    seen = [model[0].detach().clone()]
    for _ in range(rounds):
        outer.step()
        seen.append(model[0].detach().clone())
    return seen


@pytest.mark.law("gossip-keeps-the-sum")
@pytest.mark.parametrize("size", [2, 4, 8])
def test_gossip_keeps_the_sum_and_agrees_after_log_m_rounds(size):
    rounds = size.bit_length() - 1
    seen = run_replicas(gossiping, size, gossip(1), rounds)
    total = sum(row[0] for row in seen)
    for step in range(rounds + 1):
        assert torch.equal(sum(row[step] for row in seen), total)
    for row in seen:
        assert torch.equal(row[-1], total / size)
    assert size == 2 or not torch.equal(seen[0][-2], seen[1][-2])


@pytest.mark.law("gossip-keeps-the-sum")
@pytest.mark.parametrize("size", [3, 5])
def test_the_sum_is_kept_among_any_number_and_by_codecs_that_round(size):
    for codec in (None, Int8(4)):
        seen = run_replicas(gossiping, size, gossip(1, codec=codec), 6)
        total = sum(row[0] for row in seen)
        for step in range(7):
            assert torch.allclose(sum(row[step] for row in seen), total, rtol=0, atol=1e-6)
        spread = [max((row[step] - total / size).abs().max() for row in seen) for step in (0, 6)]
        assert spread[1] < 0.3 * spread[0]


# Outliers.
def moved(group, recipe, ways, items=None, **options):
    """One round in which replica r moves all its weights by ways[r]."""
    model = nn.ParameterList([torch.zeros(5), torch.zeros(())])
    outer = OuterLoop(model, recipe, group, **options)
    with torch.no_grad():
        for parameter in model:
            parameter.fill_(ways[group.rank])
    outer.step(items=0 if items is None else items[group.rank])
    return [*model[0].tolist(), model[1].item()]


def test_a_trimmed_mean_has_no_ear_for_one_who_is_far_off():
    recipe = Recipe(Every(1), aggregator=TrimmedMean(1))
    assert run_replicas(moved, 4, recipe, (1.0, 3.0, -1e6, 1e9)) == [[2.0] * 6] * 4
    assert run_replicas(moved, 3, recipe, (1.0, 3.0, 1e9)) == [[3.0] * 6] * 3
    with pytest.raises(ConfigError, match="needs 3 replicas"):
        run_replicas(moved, 2, recipe, (1.0, 3.0))


def some_at_work(group):
    model = nn.ParameterList([torch.zeros(2)])
    with OuterLoop(model, Recipe(Every(2), aggregator=TrimmedMean(1)), group) as outer:
        for _ in range((2, 4, 4)[group.rank]):
            with torch.no_grad():
                model[0].add_(2.0**group.rank)
            outer.step()
    return model[0].tolist()


def test_a_trimmed_mean_of_the_last_that_have_data_still_ends():
    # After 2 steps: the median of 2, 4, 8. After 4: the mean of 4 + 4 and 4 + 8.
    assert run_replicas(some_at_work, 3) == [[10.0, 10.0]] * 3


def test_a_long_way_is_clipped_to_the_median_of_all():
    recipe = replace(diloco(1, lr=1.0, momentum=0.0), policy=ClippedToMedian(), aggregator=GatherMean())
    # Moves of 1, 2 and 30 have the median 2: the last one counts 2.
    got = run_replicas(moved, 3, recipe, (1.0, 2.0, 30.0))
    assert torch.allclose(torch.tensor(got), torch.tensor((1.0 + 2.0 + 2.0) / 3))
    assert run_replicas(moved, 3, recipe, (1.0, 1.0, 1.0)) == [[1.0] * 6] * 3


def test_replicas_count_by_their_items():
    recipe = replace(local_sgd(1), weigh_by="items")
    assert run_replicas(moved, 2, recipe, (1.0, 5.0), (30, 10)) == [[2.0] * 6] * 2
    with pytest.raises(ConfigError, match="how many"):
        run_replicas(moved, 2, recipe, (1.0, 5.0), (30, 0))


def weighed(group, recipe, items):
    """Rounds of three attempts, in which replica r moves by r + 1; a step without items is not done."""
    model, rounds = nn.ParameterList([torch.zeros(5)]), []
    outer = OuterLoop(model, recipe, group)
    outer.listeners.append(rounds.append)
    for number in items[group.rank]:
        with torch.no_grad():
            model[0].add_((group.rank + 1.0) / 4)
        outer.count(done=number > 0, items=number)
        outer.sync_if_due()
    return [this.weights for this in rounds], model[0][0].item()


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
    for seen, way in run_replicas(weighed, 3, recipe, items):
        assert np.allclose(np.array(seen).T, shares)
        assert way == pytest.approx(moved, rel=2e-3 if codec else 1e-6)


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
    got = torch.tensor(run_replicas(moved, size, recipe, (3.0,) * size, None)[0])
    cut = torch.tensor(
        run_replicas(lambda group: moved(group, recipe, (3.0,) * size, bucket_bytes=bucket_bytes), size)[0]
    )
    assert torch.allclose(got.norm(), torch.tensor(0.5))
    assert torch.equal(got, cut)


def surprised(group, recipe, ways):
    model = nn.ParameterList([torch.zeros(4)])
    outer = OuterLoop(model, recipe, group)
    seen = []
    for way in ways:
        with torch.no_grad():
            model[0].add_(way)
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
    rule, memory = WithoutOutliers(patience=4), {}
    for way in (1.0, 1.1, 0.9, 1.0, 1.05):
        assert judged(rule, memory, way, way).unfit == ()
    before = {rank: past[:3] for rank, past in memory.items()}
    for outlier in (100.0, math.nan, math.inf):
        verdict = judged(rule, memory, outlier, math.nan)
        assert verdict.unfit == (0, 1)
        assert verdict.total == 0
    assert {rank: past[:3] for rank, past in memory.items()} == before
    verdict = judged(rule, memory, 100.0, 1.0)  # after three outliers the next one is still seen
    assert verdict.factors == (0.0, 1.0)


def kept_back(group):
    """Error feedback of a replica that is refused once: nothing of that round may stay in its residual."""
    recipe = edit(1, lr=1.0, momentum=0.0, codec=ErrorFeedback(TopK(1, 4)))
    recipe = replace(recipe, aggregator=GatherMean(), same_data=True)
    model = nn.ParameterList([torch.zeros(8)])
    outer = OuterLoop(model, recipe, group)
    for step in range(4):
        with torch.no_grad():
            model[0].add_(torch.arange(8.0) + (math.nan if step == 1 and group.rank == 1 else 0))
        outer.step()
    return values(model), kept_of(outer)[0]["residuals"]


def test_a_replica_that_was_refused_sends_nothing_of_that_later():
    outcomes = run_replicas(kept_back, 3)
    assert same(*(weights for weights, _ in outcomes))
    assert all(bool(residual.isfinite().all()) for _, left in outcomes for residual in left)
    assert outcomes[0][0]["0"].isfinite().all()


def test_a_spoiled_replica_does_not_spoil_the_average_at_the_end():
    for recipe in (gossip(5), replace(gossip(5), aggregator=Gossip())):
        with pytest.warns(RuntimeWarning, match="weights of rank 1 are"):
            outcomes = run_replicas(spoiled_at_the_end, 3, recipe)
        assert outcomes == [[2.5, 2.5]] * 3


def spoiled_at_the_end(group, recipe):
    model = nn.ParameterList([torch.zeros(2)])
    with OuterLoop(model, recipe, group) as outer:
        with torch.no_grad():
            model[0].fill_((1.0, math.nan, 4.0)[group.rank])
        outer.step()
    return model[0].tolist()
