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
from farflung.outer import (
    GatherMean,
    Gossip,
    Identity,
    Int8,
    Mean,
    OuterLoop,
    RadialMean,
    Recipe,
    ReduceScatterMean,
    Streaming,
    WithoutOutliers,
    by_bytes,
    diloco,
    streaming_diloco,
    whole,
)
from farflung.outer.ballot import BALLOT_BYTES
from farflung.testing.sim import run_replicas
from tests.outer.replicas import Counting, Run, net, no_statistics, same, through_a_file, values
from tests.recipes import RECIPES

every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def at_rest(group, recipe):
    run = Run(group, recipe, no_statistics, lr=0.0)
    before = values(run.model)
    seen = [run.steps(number) for number in range(9)]
    return [before, *seen, run.end()]


@pytest.mark.law("standstill")
@every_recipe
@pytest.mark.parametrize("size", [2, 4])
def test_where_nobody_moves_nothing_ever_moves(recipe, size):
    for states in run_replicas(at_rest, size, recipe):
        assert same(*states)


def at_rest_after_loading(group, recipe):
    if recipe.optimizer is not None:  # without momentum, which goes on by itself
        recipe = replace(recipe, optimizer=partial(torch.optim.SGD, lr=0.7))
    run = Run(group, recipe, no_statistics, momentum=0.0)
    run.steps(*range(8))  # rounds have kept something back, and some are under way
    with torch.no_grad():
        for number, parameter in enumerate(run.model.parameters()):
            parameter.fill_(number + 1.0)
    run.outer.reset_anchor()
    before = values(run.model)
    run.optimizer.param_groups[0]["lr"] = 0.0
    seen = [run.steps(number) for number in range(8, 16)]
    return [before, *seen, run.end()]


@pytest.mark.law("standstill")
@every_recipe
def test_after_weights_were_loaded_and_the_anchor_reset_nothing_is_left_of_what_was_before(recipe):
    for states in run_replicas(at_rest_after_loading, 2, recipe):
        assert same(*states)


def gradients(group, recipe):
    run = Run(group, recipe)
    run.steps(*range(max(recipe.warmup, 1)))
    kept = []

    @contextmanager
    def untouched():
        before = [(p.grad, p.grad.clone()) for p in run.model.parameters()]
        yield
        after = [p.grad for p in run.model.parameters()]
        kept.extend(a is b and torch.equal(a, copy) for a, (b, copy) in zip(after, before, strict=True))

    for number in range(6):
        run.steps(number)
        with untouched():
            run.outer.count()
            run.outer.sync_if_due()
            with run.outer.synced():
                pass
    with untouched():
        run.end()
    return kept


@pytest.mark.law("gradients-untouched")
@every_recipe
def test_gradients_are_not_touched(recipe):
    assert all(all(kept) for kept in run_replicas(gradients, 2, recipe))


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
    for plain, frozen in zip(
        *(run_replicas(sent, 2, recipe, make) for make in (no_statistics, half_frozen)), strict=True
    ):
        assert plain == frozen


# What is handed to the group is what the codec says.
def weighed(group, recipe):
    counting = Counting(group)
    run = Run(counting, recipe, no_statistics)
    cut = recipe.fragments(run.model, recipe.schedule.fragments)
    sizes = [sum(place.get().numel() for place in part.parameters) for part in cut]
    began = len(counting.calls)
    run.steps(*range(max(6, recipe.warmup)))
    rounds = run.outer.stats().rounds
    return sizes, counting.calls[began:], rounds


KINDS = {Mean: "sum", RadialMean: "sum", GatherMean: "gather", ReduceScatterMean: "all to all", Gossip: "swap"}


@pytest.mark.law("stated-bytes")
@every_recipe
def test_the_wire_carries_the_bytes_that_the_codec_states(recipe):
    kind = KINDS[type(recipe.aggregator)]
    for sizes, calls, rounds in run_replicas(weighed, 4, recipe):
        handed = [size for what, _, size in calls if what == kind]
        in_warmup = handed[: recipe.warmup]
        assert all(size == 4 * sum(sizes) for size in in_warmup)
        expected = {recipe.codec.wire_bytes(n) for n in sizes}
        assert rounds > 0
        assert set(handed[recipe.warmup :]) <= expected
        assert len(handed) - recipe.warmup >= rounds
        assert {what for what, _, size in calls if size > 4 * BALLOT_BYTES} <= {kind, "all_gather_small"}


@pytest.mark.law("stated-bytes")
@pytest.mark.parametrize("size", [2, 3])
def test_two_hops_carry_a_padded_part_for_each_rank(size):
    recipe = replace(diloco(2), codec=Int8(block=8), aggregator=ReduceScatterMean())
    for (n,), calls, rounds in run_replicas(weighed, size, recipe):
        part = recipe.codec.wire_bytes(-(-n // size))
        assert [b for what, _, b in calls if what == "all to all"] == [size * part] * rounds
        assert [b for what, _, b in calls if what == "gather"] == [part] * rounds


def whole_run(group, recipe, steps, statistics):
    run = Run(group, recipe, net if statistics else no_statistics, bucket_bytes=64)
    run.steps(*range(steps))
    return run.end(), run.outer.stats()


def stopped(group, recipe, stop):
    run = Run(group, recipe, bucket_bytes=64)
    run.steps(*range(stop))
    return through_a_file({"outer": run.outer.state_dict(), "inner": run.optimizer.state_dict()})


def resumed(group, recipe, states, stop, steps):
    run = Run(group, recipe, bucket_bytes=64)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(1.0)  # nothing may be left of what this process began with
    run.outer.load_state_dict(states[group.rank]["outer"])
    run.optimizer.load_state_dict(states[group.rank]["inner"])
    run.steps(*range(stop, steps))
    return run.end(), run.outer.stats()


def counters(stats):
    names = ("steps", "attempts", "rounds", "dropped_rounds", "bytes_sent", "bytes_received", "bytes_voting")
    return {name: getattr(stats, name) for name in names} | {"drift": stats.drift_norm, "cosine": stats.cosine}


@pytest.mark.law("resume-is-exact")
@every_recipe
def test_a_run_taken_up_anywhere_ends_with_the_same_bits(recipe):
    """In mid-round at some of the stops, in mid-flight at others."""
    expected = run_replicas(whole_run, 2, recipe, 11, True)
    for stop in (1, 4, 5, 6):
        states = run_replicas(stopped, 2, recipe, stop)
        for (weights, stats), (again, counted) in zip(
            expected, run_replicas(resumed, 2, recipe, states, stop, 11), strict=True
        ):
            assert same(weights, again)
            assert counters(counted) == counters(stats)


@pytest.mark.law("resume-is-exact")
def test_a_clipped_flight_that_was_saved_is_clipped_when_it_lands():
    policy = WithoutOutliers(max_norm=1e-3)
    recipe = replace(streaming_diloco(4, 1, delay=2, alpha=0.0, codec=Identity()), policy=policy)
    expected = run_replicas(whole_run, 2, recipe, 11, True)
    for stop in (4, 5):
        states = run_replicas(stopped, 2, recipe, stop)
        assert all(state["outer"]["rounds"]["open"] for state in states)
        for (weights, _), (again, _) in zip(expected, run_replicas(resumed, 2, recipe, states, stop, 11), strict=True):
            assert same(weights, again)


# All end with the same bits, whatever each had to do.
def uneven(group, recipe, counts):
    run = Run(group, recipe, bucket_bytes=64)
    run.steps(*range(counts[group.rank]))
    return run.end(), run.outer.stats()


@pytest.mark.law("equal-at-the-end")
@every_recipe
@pytest.mark.parametrize("counts", [(0, 3, 10, 10), (5, 5, 5, 5), (2, 7, 4, 1), (0, 0, 0, 0)])
def test_ranks_that_run_out_of_data_stay_until_all_have(recipe, counts):
    outcomes = run_replicas(uneven, 4, recipe, counts)
    assert same(*(weights for weights, _ in outcomes))
    assert [stats.steps for _, stats in outcomes] == list(counts)
    assert all(value.isfinite().all() for value in outcomes[0][0].values())


def used_again(group, recipe):
    """A flush in the middle, then on: as at the end of an epoch."""
    run = Run(group, recipe)
    run.steps(*range((5, 3)[group.rank]))
    run.outer.flush()
    between = values(run.model)
    run.steps(*range(10, 17))
    return between, run.end()


@pytest.mark.law("equal-at-the-end")
@every_recipe
def test_after_a_flush_all_agree_and_the_loop_goes_on(recipe):
    (one, first), (other, second) = run_replicas(used_again, 2, recipe)
    assert same(one, other)
    assert same(first, second)
    assert not same(one, first)


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


def between_rounds(group, recipe):
    run = Run(group, recipe)
    seen = [run.steps(number) for number in range(9)]
    return seen


@pytest.mark.parametrize("name", ["eager_diloco", "gossip", "noloco", "streaming_diloco"])
def test_replicas_differ_between_rounds_and_some_for_ever(name):
    first, second, *_ = run_replicas(between_rounds, 4, RECIPES[name])
    alike = [same(a, b) for a, b in zip(first, second, strict=True)]
    assert not any(alike)


def test_a_recipe_is_a_row_that_anyone_can_write():
    recipe = Recipe(Streaming(4, 2), codec=Int8(), aggregator=GatherMean(), fragments=by_bytes)
    with OuterLoop(net(), recipe, SoloGroup()) as outer:
        outer.step()
    assert outer.stats().steps == 1
    with pytest.raises(ConfigError, match="2 fragments: split the model"):
        OuterLoop(net(), replace(recipe, fragments=whole), SoloGroup())
