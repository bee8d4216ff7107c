# SPDX-License-Identifier: Apache-2.0
"""What `auto` decides, as pure functions: the recipe for a measured line, and when its rounds get longer or shorter."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from farflung.base.sizes import FEW_ROUNDS
from farflung.base.words import counted, in_rate, in_seconds
from farflung.config.outer import OuterSettings
from farflung.config.recipes import RECIPES
from farflung.cost.methods import LATEST, Row, Rows, efficiency, flags_of, gradients, measurements, name_of
from farflung.cost.model import Workload

ROUNDS = 20  # that a run has at least
ASSUMED_STEPS = 2_000  # of a run whose length nobody knows, if a pass over its data has no more
UNEVEN = 1.3  # from this ratio of the seconds of a step on, rounds of replicas that come and go start by time
FOREVER = 10**9  # steps of a warm-up that is data-parallel training

_AVERAGING_S = 1.5  # an exchange of gradients that takes longer is not tried
_GAIN = 1.02  # times the goodput that a change must bring
_WINDOW, _REST = 10, 40  # rounds
_SHORTEST = 8  # steps of a round: fewer were not measured with each recipe
# Where the inner learning rate stays, these end lower, and where it falls they don't (docs/evidence.md).
_AVERAGE, _MAX_MOMENTUM = 5, 0.8
_MAX_MOMENTUM_OF_ADAPTERS = 0.5  # ends at most 0.010 above plain averages, where 0.9 has ended 0.166 above
_OTHER = "diloco e3m0"  # stands for what the evidence does not have


@dataclass(frozen=True)
class Link:
    """What a collective of all members takes."""

    bandwidth_bps: float  # of each member's line, while all of them use theirs
    turn_s: float  # of one without bytes: at an address a few requests


@dataclass(frozen=True)
class Measurements:
    """The measurements by which `auto` chooses a recipe, the same on all ranks."""

    link: Link
    step_s: tuple[float, ...]  # of each replica, or of the fastest and the slowest
    replicas: int
    parameters: int
    layers: int
    buffer_bytes: int
    island_size: int
    steps: int | None  # of the whole run; None: unknown
    pass_steps: int | None  # of a pass over the data, likewise
    is_direct: bool  # the members are connected with each other
    is_averaged: bool  # gradients were, in the steps that were timed, whose seconds include the exchange
    may_average: bool  # replicas are alike in all, also in the state of their optimizers
    is_fixed: bool = True  # no replica comes or goes; otherwise a faster one does more of the work
    is_rate_constant: bool = False  # each replica's inner learning rates were the same in all steps of the trial
    lists_at_once: bool = False  # of the address: see `Group`
    is_adapter: bool = False  # what trains is less than half of the model


@dataclass(frozen=True)
class Choice:
    """A recipe, and the reasons in words."""

    settings: OuterSettings
    facts: str  # what it follows from
    why: str  # what speaks for it, and its flags

    @property
    def reason(self) -> str:
        """One sentence with all of that."""
        return f"{self.facts}; {self.why}"

    @property
    def is_data_parallel(self) -> bool:
        """Whether gradients are averaged in each step, to the end."""
        return bool(self.settings.warmup == FOREVER)


def workload(measured: Measurements) -> Workload:
    """Return the run in the numbers of the cost model; a step is without communication.

    It is that of the slowest replica, which all wait for, or of replicas that come and go that of the median one.
    """
    others = measured.replicas - 1
    run = Workload(
        parameters=measured.parameters,
        layers=measured.layers,
        step_s=max(measured.step_s) if measured.is_fixed else statistics.median(measured.step_s),
        replicas=measured.replicas,
        bandwidth_bps=measured.link.bandwidth_bps,
        latency_s=measured.link.turn_s / others if measured.is_direct else 0.0,
        request_s=None if measured.is_direct else 0.0,
        lists_at_once=measured.lists_at_once,
        island_size=measured.island_size,
        buffer_bytes=measured.buffer_bytes,
    )
    if not measured.is_direct:
        run = replace(run, request_s=measured.link.turn_s / run.vote_requests)
    return replace(run, step_s=_alone_s(run)) if measured.is_averaged else run


def averages(measured: Measurements) -> bool:
    """Return whether averaging gradients in each step could be the best; `step_s` is empty before the first."""
    if not measured.step_s:
        return _with_gradients_s(workload(replace(measured, step_s=(1.0,))), 1e-9) < _AVERAGING_S
    rows = _rows(replace(measured, may_average=True))
    return bool(rows) and rows[0].outer is None


def _steps(measured: Measurements) -> int:
    return measured.steps or max(ASSUMED_STEPS, measured.pass_steps or 0)


def _longest(measured: Measurements) -> int:
    """Return the most steps that a round may have."""
    steps = _steps(measured)
    return max(steps // ROUNDS, min(steps // FEW_ROUNDS, _SHORTEST))


def _rows(measured: Measurements) -> list[Row]:
    """Return what may be chosen, best first; nothing if plain averages are best."""
    run, longest = workload(measured), _longest(measured)
    rows = Rows(run, _steps(measured), longest=longest).chosen
    found = [row for row in rows if not row.script and (row.outer is not None or measured.may_average)]
    if longest < _SHORTEST:  # too few steps for a momentum
        plain = efficiency("local_sgd", longest, run.replicas, _steps(measured)).mean
        return [row for row in found if row.outer is None and row.goodput > plain]
    return found


def _with_gradients_s(run: Workload, step_s: float) -> float:
    return gradients(replace(run, step_s=step_s), None)[0].cost.seconds_per_step


def _alone_s(run: Workload) -> float:
    """Return the seconds of a step alone, from those of one with an exchange of gradients: that grows with the former.

    Where the exchange takes nearly all of the time, the difference is not known: at least a twentieth is a step.
    """
    low, high = run.step_s / 20, run.step_s
    while high / low > 1.001:
        middle = (low + high) / 2
        low, high = (middle, high) if _with_gradients_s(run, middle) < run.step_s else (low, middle)
    return high


def choose(measured: Measurements) -> Choice:
    """Return the recipe with the most goodput on this line."""
    run, steps, longest = workload(measured), _steps(measured), _longest(measured)
    found = _rows(measured)
    one_pass = " of one pass over the data" * (steps > ASSUMED_STEPS)
    assumed = f"{steps:,} steps{one_pass}, as nobody says how many (--outer-steps)"
    length = f"{steps:,} steps" if measured.steps else assumed
    turn = in_seconds(measured.link.turn_s)
    line = f"{in_rate(run.bandwidth_bps)}, {turn} {'for a message to all' if measured.is_direct else 'an exchange'}"
    facts = f"{counted(run.replicas, 'replica')} of {run.parameters:,} parameters, {in_seconds(run.step_s)} a step, "
    ratio = max(measured.step_s) / min(measured.step_s)
    facts += f"{ratio:.1f} times that for the slowest, " * (ratio > UNEVEN) + f"{line}, {length}"
    if ratio > UNEVEN and not measured.is_fixed:  # fixed replicas have as many steps each: some wait in any case
        every = next(
            (row.method.every for row in found if row.method.name.startswith("diloco")), max(1, steps // ROUNDS)
        )
        seconds = float(f"{every * run.step_s:.2g}")
        settings = OuterSettings("diloco", every=every, seconds=seconds, codec="e3m0")
        return _choice(measured, settings, facts, "rounds start by time")
    if found and found[0].outer is None:
        settings = OuterSettings("post_local_sgd", warmup=FOREVER)
        why = f"plain data parallelism is best here: it waits {1 - found[0].cost.utilization:.1%} of the time"
        return Choice(settings, facts, f"{why}. The same by hand: no --outer")
    if not found:
        every = max(1, longest)
        settings = OuterSettings("diloco", every=every, lr=1.0, momentum=0.0, codec="e3m0")
        why = f"few steps, so {counted(steps // every, 'plain average')}"
    else:
        best = found[0]
        assert best.outer is not None
        options = {name: value for name, value in best.outer.given().items() if name != "steps"}
        settings = OuterSettings(best.outer.recipe, **options)
        goodput = f"{best.efficiency.said(best.cost.utilization)}, by our tests of {best.efficiency.tests}"
        why = f"{best.method.name} should wait {1 - best.cost.utilization:.1%} of the time: {goodput}"
    return _choice(measured, settings, facts, why)


def _choice(measured: Measurements, settings: OuterSettings, facts: str, why: str) -> Choice:
    """Return the choice of these settings, with what else suits the inner learning rate, and an adapter."""
    known = [option.name for option in RECIPES[settings.recipe]]
    more: dict[str, Any] = {}
    if measured.is_rate_constant and "average" in known:
        more["average"] = _AVERAGE
        why += f"; the inner learning rate stays, so weights are averaged over {_AVERAGE} rounds"
    if settings.momentum is None and "max_momentum" in known:
        if measured.is_adapter:
            more["max_momentum"] = _MAX_MOMENTUM_OF_ADAPTERS
            why += "; most weights are frozen, so the outer momentum stays small"
        elif measured.is_rate_constant:
            more["max_momentum"] = _MAX_MOMENTUM
    if more:
        settings = OuterSettings(settings.recipe, **settings.given(), **more)
    return Choice(settings, facts, f"{why}. The same by hand: {flags_of(settings)}")


@dataclass(frozen=True)
class Interval:
    """How often each of the `fragments` is exchanged, and how many steps later it lands."""

    every: int
    fragments: int = 1
    delay: int = 0


class IntervalController:
    """Decides, round by round, whether rounds should get longer or shorter: for the most goodput.

    It takes the median of the latest ten rounds since the last change, so one that waited for a slow replica counts
    little, and expects rounds of other lengths to wait as long as these. A change is by a factor of two at most, and
    must promise a clear gain. One that brought none is undone, as where it is not the line that rounds wait for, and
    not tried again for a while.

    Args:
        steps: of the whole run. It has at least `ROUNDS` rounds, and nothing changes within its last tenth. None:
            unknown, so it is taken to be half over at each step.
    """

    def __init__(self, steps: int | None, settings: OuterSettings) -> None:
        self._known_steps, self._steps = steps, steps or ASSUMED_STEPS
        self._settings = settings
        self._shares, self._hidden = deque[float](maxlen=_WINDOW), deque[float](maxlen=_WINDOW)
        self._before: tuple[Interval, float] | None = None  # what the last change left, and its goodput
        self._number, self._members = 0, 2
        # By whether rounds get longer: until when they may not, and for how many rounds after the next failure.
        self._rests_until, self._rests = {True: 0, False: 0}, {True: _REST, False: _REST}

    def note(self, step: int, now: Interval, waiting: float, members: int, hidden: float = 0.0) -> Interval | None:
        """Count a round after `step`; return the interval to change to.

        Args:
            waiting, hidden: seconds in which it was waited for, and in which it was under way without that, for each
                second since the round before.
        """
        self._number += 1
        self._steps = self._known_steps or max(ASSUMED_STEPS, 2 * step)
        if members < 2:  # no evidence: alone there is no line
            self._shares.clear()
            self._hidden.clear()
            return None
        self._shares.append(waiting)
        self._hidden.append(hidden)
        self._members = members
        if step > 0.9 * self._steps or len(self._shares) <= _WINDOW // 2:
            return None
        is_whole = len(self._shares) == _WINDOW
        waited = statistics.median_low([*self._shares, *[0.0] * (_WINDOW - len(self._shares))])  # at least
        steps = now.every / now.fragments / max(1 - waited, 1e-3)  # in a second for each
        new = self._changed(now, steps * waited, steps * statistics.median(self._hidden), is_whole)
        if new is not None:
            self._shares.clear()
            self._hidden.clear()
        return new

    def _changed(self, now: Interval, stall: float, hidden: float, is_whole: bool) -> Interval | None:
        """Return the interval to change to.

        A fragment is under way for `hidden` steps, and then waits for `stall` steps, or for more unless `is_whole`.
        """
        goodput = self._goodput(now, stall)
        if self._before is not None:
            before, then = self._before
            if goodput < then:
                is_longer = _is_longer(now, before)
                self._rests_until[is_longer] = self._number + self._rests[is_longer]
                self._rests[is_longer] *= 2
                self._before = None
                return before
            if is_whole:
                self._before = None

        def expected(one: Interval) -> float:
            later = one.delay - now.delay
            return self._goodput(one, stall - later if later >= 0 else stall + max(0.0, hidden - one.delay))

        found = {one: expected(one) for one in self._others(now, stall)}
        found = {
            one: goodput_then
            for one, goodput_then in found.items()
            if goodput_then > _GAIN * goodput
            and self._number >= self._rests_until[_is_longer(one, now)]
            and (is_whole or _is_longer(one, now))
        }
        if not found:
            return None
        self._before = (now, goodput)
        return max(found, key=lambda one: found[one])

    def _others(self, now: Interval, stall: float) -> Iterator[Interval]:
        """Yield intervals from half to twice as long; a fragment that is waited for may land later, if any does."""
        least = max(now.fragments, min(now.every, *measurements(self._name(now), self._members)[1]))
        most = max(now.every, self._steps // ROUNDS)
        for every in range(max(least, math.ceil(now.every / 2)), min(most, 2 * now.every) + 1):
            latest, later = max(now.delay and 1, every // LATEST), min(now.delay + math.ceil(stall), 2 * now.delay)
            is_eager = self._settings.recipe == "eager_diloco"  # whose delay is its interval
            for delay in [every] if is_eager else sorted({min(now.delay, latest), min(later, latest)}):
                yield replace(now, every=every, delay=delay)

    def _goodput(self, interval: Interval, stall: float) -> float:
        """Return the goodput of an interval whose fragments wait for `stall` steps each."""
        utilization = interval.every / (interval.every + interval.fragments * max(stall, 0.0))
        kept = efficiency(self._name(interval), interval.every, self._members, self._steps)
        return kept.mean * utilization

    def _name(self, interval: Interval) -> str:
        return name_of(self._settings.recipe, self._settings.codec, interval.delay) or _OTHER


def _is_longer(one: Interval, other: Interval) -> bool:
    return (one.every, one.delay) > (other.every, other.delay)
