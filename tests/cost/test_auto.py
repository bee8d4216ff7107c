# SPDX-License-Identifier: Apache-2.0
"""The recipes that `auto` chooses for a line, and how it corrects their intervals on lines that change."""

import itertools
import statistics
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given, strategies as st

from farflung.auto.choice import FOREVER, Interval, IntervalController, Link, Measurements, averages, choose, workload
from farflung.auto.tuner import LineTuner
from farflung.config.outer import OuterSettings
from farflung.cost.methods import Rows, efficiency, gradients, name_of
from farflung.cost.model import cost_of
from farflung.methods.schedule import Streaming

MBIT = 1e6
FREE = Link(1e12, 1e-6)
RUN = Measurements(Link(100 * MBIT, 1e-3), (0.05, 0.05), 2, 385_000, 4, 0, 1, 10_000, None, True, False, False)


@pytest.mark.parametrize(
    ("rate", "steps", "changes", "expected"),
    [
        (10_000, 10_000, {"may_average": True, "link": FREE}, "post_local_sgd"),
        (100, 10_000, {}, "diloco"),
        (20, 1_000, {}, "diloco"),  # it waits 9 %, and streaming, which waits for nothing, learns less from a step
        (5, 10_000, {}, "sparse_loco"),
        (1, 10_000, {}, "sparse_loco"),
        (20, 10_000, {"parameters": 14_000_000, "step_s": (0.5, 0.5)}, "sparse_loco"),
        (20, 300, {"parameters": 14_000_000, "step_s": (0.5, 0.5)}, "streaming_diloco"),
        (5, 600, {"step_s": (0.06, 0.06)}, "streaming_diloco"),
        (100, 60, {}, "diloco"),
        (20, 20, {"may_average": True}, "diloco"),  # gradients would wait 92 % of the time
        (10_000, 20, {"may_average": True, "link": FREE}, "post_local_sgd"),
        (5, 140, {"parameters": 14_000_000, "step_s": (0.5, 0.5)}, "sparse_loco"),
        (5, 10_000, {"step_s": (0.05, 0.1)}, "sparse_loco"),
        (5, 10_000, {"step_s": (0.05, 0.1), "is_fixed": False}, "diloco"),
        (5, 2_000, {"is_direct": False, "link": Link(5 * MBIT, 0.2)}, "streaming_diloco"),
    ],
)
def test_a_recipe_for_each_line(rate, steps, changes, expected):
    measured = replace(RUN, **{"link": Link(rate * MBIT, 1e-3), "steps": steps} | changes)
    chosen = choose(measured)
    assert chosen.settings.recipe == expected, chosen.reason
    every = chosen.settings.every
    assert every is None or expected == "post_local_sgd" or every <= max(steps // 20, min(steps // 10, 8))
    assert f"{measured.parameters:,} parameters" in chosen.reason
    assert "a turn" not in chosen.reason
    assert "in our tests it" not in chosen.reason  # but in tests of a size
    assert ("no --outer" if expected == "post_local_sgd" else f"--outer {expected}") in chosen.reason


@given(st.floats(1, 1e4), st.floats(1e-3, 10), st.integers(10_000, 10**8), st.integers(2, 16), st.integers(200, 10**5))
def test_what_is_chosen_has_the_most_goodput_and_twenty_rounds(rate, step_s, parameters, replicas, steps):
    measured = replace(RUN, link=Link(rate * MBIT, 1e-3), step_s=(step_s,) * replicas, replicas=replicas)
    measured = replace(measured, parameters=parameters, steps=steps)
    settings, rows = choose(measured).settings, Rows(workload(measured), steps, longest=steps // 20).chosen
    assert (settings.every or 1) <= max(1, steps // 20)
    best = next(row for row in rows if row.outer is not None)
    assert settings.recipe == best.outer.recipe
    assert f"{best.goodput:.2f} of DDP on a free line" in choose(measured).reason


def test_the_slowest_of_fixed_replicas_sets_the_time():
    uneven = replace(RUN, step_s=(0.05, 0.1, 0.1))
    assert choose(uneven).settings == choose(replace(RUN, step_s=(0.1, 0.1, 0.1))).settings
    assert workload(replace(uneven, is_fixed=False)).step_s == 0.1
    assert workload(replace(uneven, step_s=(0.05, 0.05, 0.1), is_fixed=False)).step_s == 0.05


def test_gradients_are_not_averaged_among_replicas_that_may_differ_already():
    fast = replace(RUN, link=FREE)
    assert choose(fast).settings.recipe != "post_local_sgd"
    assert choose(replace(fast, may_average=True)).settings.warmup == FOREVER


@pytest.mark.parametrize(("steps", "momentum"), [(5, 0.0), (30, 0.0), (79, 0.0), (80, None), (480, None)])
def test_a_run_too_short_for_a_momentum_to_grow_takes_plain_averages(steps, momentum):
    settings = choose(replace(RUN, steps=steps, may_average=True)).settings
    assert (settings.recipe, settings.momentum, settings.lr) == ("diloco", momentum, None if momentum is None else 1.0)
    assert steps >= 80 or settings.every == max(1, steps // 10)


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, {"average": 5, "max_momentum": 0.8}),
        ({"is_fixed": False, "step_s": (0.05, 0.1)}, {"average": 5, "max_momentum": 0.8}),
        ({"steps": 60}, {"average": 5}),  # plain averages
        ({"steps": 2_000, "is_direct": False, "link": Link(5 * MBIT, 0.2)}, {"average": 5}),  # streaming
        ({"may_average": True, "link": FREE}, {}),  # gradients
    ],
)
def test_where_the_inner_rate_stays_weights_are_averaged_over_rounds_and_momentum_grows_less(changes, more):
    falling, constant = (choose(replace(RUN, is_rate_constant=stays, **changes)) for stays in (False, True))
    assert constant.settings == OuterSettings(falling.settings.recipe, **falling.settings.given(), **more)
    assert ("the inner learning rate stays" in constant.reason) == bool(more)
    assert more.keys().isdisjoint(falling.settings.given())


@pytest.mark.parametrize("is_constant", [False, True])
def test_an_adapter_gets_a_smaller_momentum(is_constant):
    whole, adapter = (choose(replace(RUN, is_adapter=one, is_rate_constant=is_constant)) for one in (False, True))
    given = {**whole.settings.given(), "max_momentum": 0.5}
    assert adapter.settings == OuterSettings("diloco", **given)
    assert "most weights are frozen" in adapter.reason
    assert "--outer-max-momentum 0.5" in adapter.reason
    short = replace(RUN, is_adapter=True, steps=60)  # plain averages
    assert choose(short).settings == choose(replace(short, is_adapter=False)).settings


def test_a_length_that_nobody_states_is_said_to_be_assumed():
    for pass_steps, stated in ((None, "2,000 steps"), (100, "2,000 steps"), (9_000, "9,000 steps of one pass")):
        chosen = choose(replace(RUN, link=Link(MBIT / 4, 1e-3), steps=None, pass_steps=pass_steps))
        assert f"{stated}, as nobody says how many (--outer-steps)" in chosen.reason.replace(" over the data", "")
        assert chosen.settings.every <= max(2_000, pass_steps or 0) // 20
    assert choose(RUN).settings == OuterSettings("diloco", every=choose(RUN).settings.every, codec="e3m0")  # no length


@given(st.floats(1e-3, 5), st.floats(1, 1e4))
def test_the_seconds_of_a_step_are_found_under_an_exchange_of_gradients(step_s, rate):
    run = workload(replace(RUN, step_s=(step_s,), link=Link(rate * MBIT, 1e-4)))
    seconds = gradients(run, None)[0].cost.seconds_per_step
    found = workload(replace(RUN, step_s=(seconds,), link=Link(rate * MBIT, 1e-4), is_averaged=True))
    if step_s > seconds / 20:
        assert gradients(found, None)[0].cost.seconds_per_step == pytest.approx(seconds, rel=0.01)
    else:
        assert found.step_s == pytest.approx(seconds / 20, rel=0.01)


def test_gradients_are_averaged_in_a_trial_only_where_that_could_be_best():
    for rate, step_s, expected in ((10, (), True), (5, (), False), (10, (0.05,), False), (10_000, (0.05,), True)):
        measured = replace(RUN, link=Link(rate * MBIT, 0.0), step_s=step_s)
        assert averages(measured) is expected, (rate, step_s)


# ---- corrections

CODED = OuterSettings("diloco", every=32, codec="e3m0")
STREAMING = OuterSettings("streaming_diloco", every=32)
PARAMETERS = 100_000


def controller(steps=100_000, settings=CODED):
    return IntervalController(steps, settings)


def after(shares, now, steps=100_000, at=1_000, members=4, settings=CODED):
    """The first change that rounds with these shares of waiting bring, and after how many."""
    corrector = controller(steps, settings)
    for number, share in enumerate(shares, 1):
        if (new := corrector.note(at, now, share, members)) is not None:
            return number, new
    return None


@pytest.mark.parametrize(
    ("shares", "now", "expected"),
    [
        ([0.6] * 10, Interval(16), (6, Interval(32))),  # whatever the other four bring
        ([0.1] * 10, Interval(16), None),  # longer rounds would learn less
        ([0.0] * 10, Interval(16), (10, Interval(8))),
        ([0.0] * 10, Interval(32), (10, Interval(16))),
        ([0.0] * 10, Interval(8), None),  # shorter ones kept no more in the tests
        ([0.6, 0.1] * 30, Interval(16), None),  # half of the rounds, as with a replica that is slow for a while
    ],
)
def test_a_change_needs_most_of_ten_rounds_and_a_clear_gain(shares, now, expected):
    assert after(shares, now) == expected


@pytest.mark.parametrize(
    ("shares", "now", "expected"),
    [
        ([0.2] * 10, Interval(32, 3, 4), (6, Interval(32, 3, 7))),  # hidden by a longer delay
        ([0.7] * 10, Interval(32, 3, 8), (6, Interval(64, 3, 16))),
        ([0.0] * 10, Interval(32, 3, 8), (10, Interval(16, 3, 4))),
        ([0.0] * 10, Interval(8, 3, 2), None),  # nor would a shorter delay keep more
    ],
)
def test_fragments_land_later_before_they_are_sent_less_often(shares, now, expected):
    assert after(shares, now, settings=STREAMING) == expected


@pytest.mark.parametrize(("share", "every"), [(0.6, 64), (0.0, 16)])
def test_eager_rounds_are_as_late_as_they_are_long_also_after_a_correction(share, every):
    eager = OuterSettings("eager_diloco", every=32)
    assert after([share] * 10, Interval(32, 1, 32), settings=eager)[1] == Interval(every, 1, every)


def test_nothing_changes_alone_or_within_the_last_tenth_and_a_run_keeps_twenty_rounds():
    assert after([0.8] * 20, Interval(32), members=1) is None
    assert after([0.8] * 20, Interval(32), steps=1_000, at=901) is None
    assert after([0.8] * 20, Interval(40), steps=1_000, at=100) == (6, Interval(50))
    assert after([0.8] * 20, Interval(50), steps=1_000, at=100) is None
    # In a run of unknown length they may get longer at any time, after the 2,000 steps that are assumed.
    assert after([0.8] * 20, Interval(32), steps=None, at=50_000) == (6, Interval(64))
    assert after([0.8] * 20, Interval(100), steps=None, at=100) is None
    assert after([0.8] * 20, Interval(100), steps=None, at=5_000)[0] == 6


def test_longer_rounds_that_do_not_help_are_undone():
    """They wait for a slower replica, as long as it takes, and not for the line."""
    corrector, now, seen = controller(), Interval(16), []
    for _ in range(300):
        now = corrector.note(1_000, now, 0.6, 4) or now
        seen.append(now.every)
    assert max(seen) == 32
    assert seen.count(16) > 0.8 * len(seen)


def test_shorter_rounds_that_wait_are_undone_and_tried_ever_less_often():
    """Of rounds that nothing is seen to wait for, nobody knows how much shorter ones would wait."""
    corrector, now, tried = controller(settings=STREAMING), Interval(32, 3, 8), []
    for number in range(1_000):
        new = corrector.note(1_000, now, 0.0 if now.every == 32 else 0.5, 4)
        if new is not None and new.every < 32:
            tried.append(number)
        now = new or now
    assert 3 < len(tried) < 8
    assert tried[-1] - tried[-2] > 2 * (tried[1] - tried[0])


@pytest.mark.parametrize("name", ["diloco", "streaming_diloco"])
def test_goodput_is_near_the_best_again_within_30_rounds_of_a_change_of_the_line(name):
    run = replace(workload(RUN), layers=6)
    rows = {row.outer.recipe: row for row in Rows(run, 5_000).chosen[::-1] if row.outer is not None}
    method, settings, step = rows[name].method, rows[name].outer, 0
    corrector = IntervalController(100_000, settings)
    now = Interval(method.every, method.fragments, method.delay)
    for rate in (100, 10, 100, 10, 2):
        run, found = replace(run, bandwidth_bps=rate * MBIT), []
        for _ in range(60):
            share = cost_of(run, replace(method, every=now.every, delay=now.delay)).utilization
            kept = efficiency(name_of(settings.recipe, settings.codec, now.delay), now.every, 2).mean
            found.append(kept * share)
            step += now.every // now.fragments
            new = corrector.note(step, now, 1 - share, 2)
            assert new is None or now.every / 2 <= new.every <= 2 * now.every
            now = new or now
        best = next(row for row in Rows(run, 5_000).chosen if row.outer is not None and row.outer.recipe == name)
        assert statistics.median(found[30:]) > 0.9 * best.goodput, (rate, best, found)


def test_rounds_of_a_flush_and_those_before_a_change_is_in_force_change_nothing():
    loop = Mock(is_first=True, schedule=Streaming(16, 3, 2))
    tuner = LineTuner()
    tuner.chosen(OuterSettings("streaming_diloco", every=16, fragments=3, delay=2), None, 100_000, is_first=False)
    tuner.follow(loop)
    steps = itertools.count()

    def rounds(number, is_flush=False):
        at = next(steps)
        for _ in range(number):
            this = SimpleNamespace(
                step=at if is_flush else next(steps), seconds_exposed=1e9, seconds_hidden=0.0, members=(0, 1)
            )
            tuner._round_ended(this)
        return loop.change_schedule.call_count

    assert rounds(40, is_flush=True) == 0
    assert rounds(10) == 1
    assert rounds(5) == 1
    assert rounds(10) == 2


@pytest.mark.parametrize(("under_way", "shortens"), [(3.0, False), (0.5, True)])
def test_rounds_that_use_all_of_their_delay_get_no_shorter_one(under_way, shortens):
    settings = OuterSettings("streaming_diloco", every=12, fragments=2, delay=3)
    corrector = IntervalController(300, settings)
    now, stall = Interval(12, 2, 3), 0.02
    waiting = stall / (6 + stall)
    hidden = under_way / (6 + stall)
    found = [corrector.note(100, now, waiting, 2, hidden) for _ in range(10)]
    assert any(found) == shortens
    assert all(one is None or (one.every < 12 and one.delay < 3) for one in found)
