# SPDX-License-Identifier: Apache-2.0
"""What every recipe must keep: bytes, gradients, frozen weights, a standstill, and a run taken up again anywhere."""

import math
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from farflung.base.errors import ConfigError
from farflung.comm.group import SoloGroup
from farflung.methods.aggregate import GatherMean, Gossip, RadialMean, ReduceScatterMean
from farflung.methods.fragments import by_bytes, whole
from farflung.methods.recipes import diloco, local_sgd, streaming_diloco
from farflung.outer import Identity, Int8, Mean, OuterLoop, Recipe, Streaming, WithoutOutliers
from farflung.testing.sim import run_replicas
from farflung.votes.ballot import BALLOT_BYTES
from tests.outer.replicas import Counting, Run, net, no_statistics, on_replicas, same, values
from tests.recipes import RECIPES

every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


@pytest.mark.law("standstill")
@every_recipe
@pytest.mark.parametrize("size", [2, 4])
@on_replicas()
def test_where_nobody_moves_nothing_ever_moves(group, recipe, size):
    run = Run(group, recipe, no_statistics, lr=0.0)
    assert same(values(run.model), *run.seen(*range(9)), run.end())


@pytest.mark.law("standstill")
@every_recipe
@on_replicas(2)
def test_after_weights_were_loaded_and_the_anchor_reset_nothing_is_left_of_what_was_before(group, recipe):
    if recipe.optimizer is not None:  # without momentum, which goes on by itself
        recipe = replace(recipe, optimizer=partial(torch.optim.SGD, lr=0.7))
    run = Run(group, recipe, no_statistics, momentum=0.0)
    run.steps(*range(8))  # rounds have kept something back, and some are under way
    for number, parameter in enumerate(run.model.parameters()):
        parameter.data.fill_(number + 1.0)
    run.outer.reset_anchor()
    assert not any(sum(one["pending_weight"]) for one in run.outer.state_dict()["rounds"]["fragments"])
    run.optimizer.param_groups[0]["lr"] = 0.0
    assert same(values(run.model), *run.seen(*range(8, 16)), run.end())


@pytest.mark.law("gradients-untouched")
@every_recipe
@on_replicas(2)
def test_gradients_are_not_touched(group, recipe):
    run = Run(group, recipe)
    run.steps(*range(max(recipe.warmup, 1)))

    @contextmanager
    def untouched():
        before = [(p.grad, p.grad.clone()) for p in run.model.parameters()]
        yield
        after = [p.grad for p in run.model.parameters()]
        assert all(a is b and torch.equal(a, copy) for a, (b, copy) in zip(after, before, strict=True))

    for number in range(6):
        run.steps(number)
        with untouched():
            run.outer.count()
            run.outer.sync_if_due()
            with run.outer.synced():
                pass
    with untouched():
        run.end()


def half_frozen():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 3).requires_grad_(False), *no_statistics())


def sent(group, recipe, make):
    counting = Counting(group)
    run = Run(counting, recipe, make)
    run.steps(*range(8))
    run.end()
    return [call for call in counting.calls if call[0] != "leave"], run.outer.stats().bytes_sent


@pytest.mark.law("frozen-is-free")
@every_recipe
def test_frozen_parameters_cost_no_byte(recipe):
    recipe = replace(recipe, fragments=by_bytes if recipe.schedule.fragments > 1 else recipe.fragments)
    plain, frozen = (run_replicas(sent, 2, recipe, make) for make in (no_statistics, half_frozen))
    assert plain == frozen


# What is handed to the group is what the codec says.
def weighed(group, recipe):
    counting = Counting(group)
    run = Run(counting, recipe, no_statistics)
    cut = recipe.fragments(run.model, recipe.schedule.fragments)
    sizes = [sum(place.get().numel() for place in part.parameters) for part in cut]
    began = len(counting.calls)
    run.steps(*range(max(6, recipe.warmup)))
    return sizes, counting.calls[began:], run.outer.stats().rounds


KINDS = {Mean: "sum", RadialMean: "sum", GatherMean: "gather", ReduceScatterMean: "all to all", Gossip: "swap"}


@pytest.mark.law("stated-bytes")
@every_recipe
def test_the_wire_carries_the_bytes_that_the_codec_states(recipe):
    kind = KINDS[type(recipe.aggregator)]
    for sizes, calls, rounds in run_replicas(weighed, 4, recipe):
        handed = [size for what, _, size in calls if what == kind]
        assert all(size == 4 * sum(sizes) for size in handed[: recipe.warmup])
        expected = {recipe.codec.wire_bytes(n) for n in sizes}
        if kind == "all to all":
            expected = {4 * recipe.codec.wire_bytes(-(-n // 4)) for n in sizes}
        assert rounds > 0
        assert set(handed[recipe.warmup :]) <= expected
        assert len(handed) - recipe.warmup >= rounds
        named = {what for what, _, size in calls if size > 4 * BALLOT_BYTES}
        assert named <= {kind, "all_gather_small", "gather" if kind == "all to all" else kind}


@pytest.mark.law("stated-bytes")
@pytest.mark.parametrize("size", [2, 3])
def test_two_hops_carry_a_padded_part_for_each_rank(size):
    recipe = replace(diloco(2), codec=Int8(block=8), aggregator=ReduceScatterMean())
    for (n,), calls, rounds in run_replicas(weighed, size, recipe):
        part = recipe.codec.wire_bytes(-(-n // size))
        assert [b for what, _, b in calls if what == "all to all"] == [size * part] * rounds
        assert [b for what, _, b in calls if what == "gather"] == [part] * rounds


def sent_by(group, recipe, width):
    with OuterLoop(nn.Linear(width, 300), recipe, group) as outer:
        outer.step()
        return outer.stats().bytes_sent


@pytest.mark.law("stated-bytes")
@pytest.mark.parametrize("size", [2, 3, 4, 8, 32])
def test_no_rank_sends_more_than_two_payloads_however_many_there_are(size):
    for more in ({}, {"radial": True}):
        recipe = diloco(1, codec="e3m0", **more)
        payload = recipe.codec.wire_bytes(300 * 601)
        assert max(run_replicas(sent_by, size, recipe, 600)) <= 2.1 * payload * (1 if size > 2 else 0.5)


@pytest.mark.law("stated-bytes")
@pytest.mark.parametrize(
    ("recipe", "width"),
    [
        (diloco(1, codec="e3m0"), 100),  # so few bytes that another hop costs more
        (diloco(1, codec="e3m0", exchange="gather"), 600),
        (diloco(1, codec="topk"), 600),
        (local_sgd(1, codec="int8"), 600),  # which rounds the weights themselves
    ],
)
def test_one_hop_stays_where_it_is_asked_for_or_better(recipe, width):
    payload = recipe.codec.wire_bytes(300 * (width + 1))
    assert min(run_replicas(sent_by, 4, recipe, width)) >= 3 * payload


def trained(group, recipe, counts, stops=()):
    """Train, and at each stop go on from a state; return what was under way at the stops, too."""
    run, opened = Run(group, recipe, bucket_bytes=64), []
    for step in range(counts[group.rank]):
        if step in stops:
            opened.append(run.outer.state_dict()["rounds"]["open"])
            run = run.resumed()
        run.steps(step)
    return run.end(), run.outer.stats(), opened


def counters(stats):
    names = ("steps", "attempts", "rounds", "dropped_rounds", "bytes_sent", "bytes_received", "bytes_voting")
    return {name: getattr(stats, name) for name in names} | {"drift": stats.drift_norm, "cosine": stats.cosine}


@pytest.mark.law("resume-is-exact")
@every_recipe
def test_a_run_taken_up_anywhere_ends_with_the_same_bits(recipe):
    """In mid-round at some of the stops, in mid-flight at others."""
    whole, again = (run_replicas(trained, 2, recipe, (11, 11), stops) for stops in ((), (1, 4, 5, 6)))
    for (weights, stats, _), (resumed, counted, _) in zip(whole, again, strict=True):
        assert same(weights, resumed)
        assert counters(counted) == counters(stats)


@pytest.mark.law("resume-is-exact")
def test_a_clipped_flight_that_was_saved_is_clipped_when_it_lands():
    policy = WithoutOutliers(max_norm=1e-3)
    recipe = replace(streaming_diloco(4, 1, delay=2, alpha=0.0, codec=Identity()), policy=policy)
    whole, again = (run_replicas(trained, 2, recipe, (11, 11), stops) for stops in ((), (4, 5)))
    for (weights, *_), (resumed, _, opened) in zip(whole, again, strict=True):
        assert all(this["stats"]["seconds_total"] == 0 for (this,) in map(dict.values, opened))
        assert same(weights, resumed)


# All end with the same bits, whatever each had to do.


@pytest.mark.law("equal-at-the-end")
@every_recipe
@pytest.mark.parametrize("counts", [(0, 3, 10, 10), (5, 5, 5, 5), (2, 7, 4, 1), (0, 0, 0, 0)])
def test_ranks_that_run_out_of_data_stay_until_all_have(recipe, counts):
    weights, stats, _ = zip(*run_replicas(trained, 4, recipe, counts), strict=True)
    assert same(*weights)
    assert [one.steps for one in stats] == list(counts)
    assert all(value.isfinite().all() for value in weights[0].values())


def used_again(group, recipe):
    """A flush in the middle, then on: as at the end of an epoch."""
    run = Run(group, recipe)
    run.steps(*range((5, 3)[group.rank]))
    run.outer.flush()
    between = values(run.model)
    run.steps(*range(10, 17))
    return between, run.end(), run.outer.position


@pytest.mark.law("equal-at-the-end")
@every_recipe
def test_after_a_flush_all_agree_and_the_loop_goes_on_from_the_furthest_step(recipe):
    (one, first, position), (other, second, also) = run_replicas(used_again, 2, recipe)
    assert same(one, other)
    assert same(first, second)
    assert not same(one, first)
    assert position == also == 5 + 7


def spoiled_at_the_end(group, recipe):
    run = Run(group, recipe)
    run.steps(*range(7))
    if group.rank == 1:
        with torch.no_grad():
            run.model[0].weight[0, 0] = math.nan
    run.outer.count()
    return run.end()


@pytest.mark.law("equal-at-the-end")
@every_recipe
@pytest.mark.filterwarnings("ignore:.*a round was dropped")
def test_where_the_last_round_is_dropped_all_still_end_alike_and_finite(recipe):
    states = run_replicas(spoiled_at_the_end, 4, recipe)
    assert same(*states)
    assert all(value.isfinite().all() for value in states[0].values())


@pytest.mark.parametrize("name", ["eager_diloco", "gossip", "noloco", "streaming_diloco"])
def test_replicas_differ_between_rounds_and_some_for_ever(name):
    first, second, *_ = run_replicas(lambda group: Run(group, RECIPES[name]).seen(*range(9)), 4)
    alike = [same(a, b) for a, b in zip(first, second, strict=True)]
    assert not any(alike)


def test_a_recipe_is_a_row_that_anyone_can_write():
    recipe = Recipe(Streaming(4, 2), codec=Int8(), aggregator=GatherMean(), fragments=by_bytes)
    with OuterLoop(net(), recipe, SoloGroup()) as outer:
        outer.step()
    assert outer.stats().steps == 1
    with pytest.raises(ConfigError, match="2 fragments: split the model"):
        OuterLoop(net(), replace(recipe, fragments=whole), SoloGroup())
