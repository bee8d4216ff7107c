# SPDX-License-Identifier: Apache-2.0
"""What `auto` decides, as pure functions: the recipe for a measured line, and when its rounds get longer or shorter."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, replace

from farflung.auto.trial import Measurements
from farflung.base.words import counted, in_rate, in_seconds
from farflung.config.outer import FEW_ROUNDS, OuterSettings
from farflung.config.recipes import RECIPES
from farflung.cost.evidence import GAIN_KEPT
from farflung.cost.methods import Row, Rows, gradients
from farflung.cost.model import Workload

WAITING = 0.05  # the share of the time that a recipe may wait
ROUNDS = 20  # that a run has at least
ASSUMED_STEPS = 2_000  # of a run whose length nobody knows, if a pass over its data has no more
UNEVEN = 1.3  # from this ratio of the seconds of a step on, rounds of replicas that come and go start by time
FOREVER = 10**9  # steps of a warm-up that is data-parallel training

_AVERAGING_S = 1.5  # an exchange of gradients that takes longer is not tried
_LOW, _HIGH = 0.02, 0.1  # between these shares of waiting nothing changes; half of H waits twice as much
_WINDOW, _REST = 10, 20  # rounds
_SHORTEST = 8  # steps of a round: fewer were not measured with each recipe
_LATEST = 4  # a fragment lands at most a quarter of its interval late, as in the evidence
# Where the inner learning rate stays, these end lower, and where it falls they don't (docs/evidence.md).
_AVERAGE, _MAX_MOMENTUM = 5, 0.8
_BLOCKING = "diloco e3m0"  # of the rows that wait in each round, the one that keeps most


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
    """Return the run in the numbers of the cost model; a step is the median replica's, without communication."""
    others = measured.replicas - 1
    run = Workload(
        parameters=measured.parameters,
        layers=measured.layers,
        step_s=statistics.median(measured.step_s),
        replicas=measured.replicas,
        bandwidth_bps=measured.link.bandwidth_bps,
        latency_s=measured.link.turn_s / others if measured.is_direct else 0.0,
        request_s=None if measured.is_direct else measured.link.turn_s / measured.replicas,
        island_size=measured.island_size,
        buffer_bytes=measured.buffer_bytes,
    )
    return replace(run, step_s=_alone_s(run)) if measured.is_averaged else run


def averages(measured: Measurements) -> bool:
    """Return whether averaging gradients in each step could be the best; `step_s` is empty before the first."""
    if not measured.step_s:
        return _with_gradients_s(workload(replace(measured, step_s=(1.0,))), 1e-9) < _AVERAGING_S
    return gradients(workload(measured), None)[0].cost.utilization > 1 - 2 * WAITING


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
    """Return the recipe that keeps most of DDP's gain among the recipes that wait at most `WAITING` of the time."""
    run, steps = workload(measured), measured.steps or max(ASSUMED_STEPS, measured.pass_steps or 0)
    longest = max(steps // ROUNDS, min(steps // FEW_ROUNDS, _SHORTEST))
    rows = Rows(run, FEW_ROUNDS * longest, 1 - WAITING)  # a round is at most a tenth of what it is given
    found = [row for row in rows.chosen if not row.script and (row.outer is not None or measured.may_average)]
    found = [row for row in found if row.outer is None or row.gain_kept > 0] or found
    if longest < _SHORTEST:  # too few steps for a momentum
        found = [row for row in found[:1] if row.outer is None and averages(measured)]
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
        settings, why = _settings(found[0]), _why(found[0])
    return _choice(measured, settings, facts, why)


def _choice(measured: Measurements, settings: OuterSettings, facts: str, why: str) -> Choice:
    """Return the choice of these settings, with what else suits the inner learning rate."""
    if measured.is_rate_constant:
        more = {"average": _AVERAGE} | ({"max_momentum": _MAX_MOMENTUM} if settings.momentum is None else {})
        known = [option.name for option in RECIPES[settings.recipe]]
        more = {name: value for name, value in more.items() if name in known}
        settings = OuterSettings(settings.recipe, **settings.given(), **more)
        why += f"; the inner learning rate stays, so weights are averaged over {_AVERAGE} rounds" * bool(more)
    return Choice(settings, facts, f"{why}. The same by hand: {flags(settings)}")


def _settings(row: Row) -> OuterSettings:
    assert row.outer is not None
    return OuterSettings(
        row.outer.recipe, **{name: value for name, value in row.outer.given().items() if name != "steps"}
    )


def _why(row: Row) -> str:
    kept = f"in our tests of 100k parameters it kept {'less than ' * row.is_bound}{row.gain_kept:.0%} of DDP's gain"
    return f"{row.method.name} should wait {1 - row.cost.utilization:.1%} of the time; {kept}"


def flags(settings: OuterSettings) -> str:
    """Return the flags of `farflung launch` that select the same by hand."""
    options = "".join(f" --outer-{name.replace('_', '-')} {value}" for name, value in settings.given().items())
    return f"--outer {settings.recipe}{options}"


@dataclass(frozen=True)
class Interval:
    """How often each of the `fragments` is exchanged, and how many steps later it lands."""

    every: int
    fragments: int = 1
    delay: int = 0


class IntervalController:
    """Decides, round by round, whether rounds should get longer or shorter: at most by a factor of two at a time.

    It takes the median of the latest ten rounds since the last change, so one that waited for a slow replica counts
    little. Longer rounds that do not help show that it is not the line that they wait for: they are undone. Shorter
    ones that waited too much are not tried again for a while.

    Args:
        steps: of the whole run. It has at least `ROUNDS` rounds, and nothing changes within its last tenth. None:
            unknown, so it is taken to be half over at each step.
    """

    def __init__(self, steps: int | None) -> None:
        self._known_steps, self._steps = steps, steps or ASSUMED_STEPS
        self._shares: deque[float] = deque(maxlen=_WINDOW)
        self._before: tuple[Interval, float] | None = None  # the last lengthening, and what each step waited then
        self._number = self._rests_until = self._not_shorter_until = 0
        self._has_shortened, self._wait = False, 10 * _WINDOW

    def note(self, step: int, now: Interval, waiting: float, members: int) -> Interval | None:
        """Count a round after `step`, in which a share of the time was waiting; return the interval to change to."""
        self._number += 1
        self._steps = self._known_steps or max(ASSUMED_STEPS, 2 * step)
        if members < 2:  # no evidence: alone there is no line
            self._shares.clear()
            return None
        self._shares.append(waiting)
        is_high = sum(share > _HIGH for share in self._shares) > _WINDOW // 2  # whatever the rest of ten rounds brings
        if (len(self._shares) < _WINDOW and not is_high) or self._number < self._rests_until:
            return None
        if step > 0.9 * self._steps:
            return None
        new = self._changed(now, statistics.median_low(self._shares))
        if new is None or new == now:
            return None
        self._shares.clear()
        return new

    def _changed(self, now: Interval, waiting: float) -> Interval | None:
        stall = waiting / max(1 - waiting, 1e-3)  # in steps, for each step
        if waiting > _HIGH:
            if self._before is not None and stall > 0.8 * self._before[1]:
                (before, _), self._before, self._rests_until = self._before, None, self._number + _REST
                return before
            new = self._longer(now, stall)
            self._before = (now, stall) if new != now else None
            if self._has_shortened:
                self._not_shorter_until, self._wait = self._number + self._wait, 2 * self._wait
            self._has_shortened = False
            return new
        self._before = None
        if waiting < _LOW and self._number >= self._not_shorter_until:
            self._has_shortened = True
            return _shorter(now)
        return None

    def _longer(self, now: Interval, stall: float) -> Interval:
        if now.delay:
            most = min(2 * now.delay, now.every // _LATEST)
            needed = math.ceil(now.delay + stall * now.every / now.fragments)
            if now.delay < needed <= most:
                return replace(now, delay=needed)
        wanted = math.ceil(now.every * stall / WAITING)
        every = max(now.every, min(wanted, 2 * now.every, max(1, self._steps // ROUNDS)))
        return replace(now, every=every, delay=max(now.delay, min(2 * now.delay, every // _LATEST)))


def _shorter(now: Interval) -> Interval:
    measured = GAIN_KEPT[_BLOCKING]
    least = min(now.every, max(now.fragments, max(measured, key=lambda every: measured[every])))
    every = max(least, math.ceil(now.every / 2))
    if every == now.every:
        return now  # a shorter delay alone keeps hardly more, and no longer hides replicas that are uneven for a moment
    return replace(now, every=every, delay=min(now.delay, max(1, every // _LATEST)))
