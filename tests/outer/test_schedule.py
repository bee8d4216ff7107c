# SPDX-License-Identifier: Apache-2.0
"""When each schedule speaks: every fragment once in `every` steps, never two flights of one at a time."""

import math
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from farflung.methods.schedule import Apply, Clock, Launch
from farflung.outer import ByTime, Every, Levels, Quadratic, Streaming, Warmup


@st.composite
def streams(draw):
    every = draw(st.integers(1, 40))
    return Streaming(every, draw(st.integers(1, every)), draw(st.integers(0, every)))


def words(schedule, steps):
    """What is said after each of the first steps, in order, with the step."""
    return [(step, word) for step in range(1, steps + 1) for word in schedule(Clock(step))]


@pytest.mark.law("once-in-every-steps")
@settings(max_examples=200)
@given(streams())
def test_a_fragment_is_sent_once_in_every_steps_and_lands_delay_steps_later(schedule):
    launched, applied = defaultdict(list), defaultdict(list)
    for step, word in words(schedule, 4 * schedule.every):
        (launched if isinstance(word, Launch) else applied)[word.fragment].append(step)
    for fragment in range(schedule.fragments):
        sent, landed = launched[fragment], applied[fragment]
        assert len(sent) == 4
        assert {later - earlier for earlier, later in pairwise(sent)} == {schedule.every}
        if schedule.delay == schedule.every:
            assert landed == sent  # before each launch, also before the first one
        else:
            assert landed == [step + schedule.delay for step in sent if step + schedule.delay <= 4 * schedule.every]


@pytest.mark.law("once-in-every-steps")
@settings(max_examples=200)
@given(streams())
def test_no_fragment_is_sent_while_it_flies_and_none_lands_that_does_not(schedule):
    flying, flown = set(), set()
    for _, word in words(schedule, 5 * schedule.every):
        if isinstance(word, Launch):
            assert word.fragment not in flying
            flying.add(word.fragment)
        else:
            assert word.fragment in flying or (schedule.delay == schedule.every and word.fragment not in flown)
            flying.discard(word.fragment)
        flown.add(word.fragment)


@settings(max_examples=100)
@given(streams())
def test_launches_are_spread_evenly(schedule):
    sent = [step for step, word in words(schedule, 3 * schedule.every) if isinstance(word, Launch)]
    gaps = {later - earlier for earlier, later in pairwise(sent)}
    even = schedule.every / schedule.fragments
    assert gaps <= {math.floor(even), math.ceil(even)}


@pytest.mark.law("streaming-is-every")
@settings(max_examples=50)
@given(st.integers(1, 30))
def test_one_fragment_without_delay_is_every(every):
    assert words(Streaming(every, 1), 100) == words(Every(every), 100)


@settings(max_examples=50)
@given(st.integers(0, 20), streams())
def test_after_a_warm_up_the_other_schedule_begins_at_its_beginning(warmup, schedule):
    assert words(Warmup(warmup, schedule), warmup + 50) == [(step + warmup, w) for step, w in words(schedule, 50)]
    assert (Warmup(warmup, schedule).fragments, Warmup(warmup, schedule).delay) == (schedule.fragments, schedule.delay)


@settings(max_examples=50)
@given(st.integers(1, 20), st.floats(1e-3, 1.0), st.floats(1e-4, 1.0))
def test_a_quadratic_round_has_the_steps_that_its_rate_asks_for(every, alpha, lr):
    rule = Quadratic(every, alpha)
    length = max(every, min(10_000, math.floor((alpha / lr) ** 2)))
    began = 7
    assert not rule(Clock(began + length - 1, began, lr=lr))
    assert rule(Clock(began + length, began, lr=lr)) == (Launch(0, steps=length), Apply(0))


def test_a_quadratic_round_ends_where_the_rate_is_nothing():
    rule = Quadratic(4, 0.5, max_every=50)
    assert not rule(Clock(49, 0, lr=0.0))
    assert rule(Clock(50, 0, lr=0.0))
    assert Warmup(10, rule)(Clock(60, 10, lr=1e-300))
    assert not Warmup(10, rule)(Clock(60, 11, lr=1e-300))


def test_of_all_levels_that_are_due_the_widest_speaks():
    schedule = Levels({8: None, 2: 2, 4: 4})
    assert schedule.groups == (2, 4)
    said = {step: (word.level, word.steps) for step, word in words(schedule, 8) if isinstance(word, Launch)}
    assert said == {2: (1, 2), 4: (2, 4), 6: (1, 2), 8: (0, 8)}


def test_by_time_looks_at_the_clock_alone():
    schedule = ByTime(2.5)
    assert not schedule(Clock(1000, 0, 2.4))
    assert schedule(Clock(1, 0, 2.5)) == (Launch(0), Apply(0))
    assert schedule(Clock(1, 0, math.inf))
    assert [bool(Warmup(3, schedule)(Clock(4, 0, seconds))) for seconds in (2.4, 2.5)] == [False, True]
