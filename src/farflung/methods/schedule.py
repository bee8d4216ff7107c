# SPDX-License-Identifier: Apache-2.0
"""Schedules: from the clock to the actions `Launch` and `Apply`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Protocol, TypeAlias

from farflung.base.checks import check_number, check_protocol, check_type, check_whole, shown
from farflung.base.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """Send a fragment as it is after this step."""

    fragment: int
    level: int = 0  # the ranks that take part; 0 is all of them, others are the levels of `Levels.sizes`
    steps: int = 1  # in a full round; a rank's weight is the part of them that it has done


@dataclass(frozen=True)
class Apply:
    """Apply the result of a fragment's exchange to the model."""

    fragment: int


@dataclass(frozen=True)
class Change:
    """H is another one in the steps after this one.

    Args:
        step: the last one of a round, or of a round of the last fragment, counted from 1.
        every: H from then on, in steps.
        delay: the number of steps between sending a fragment and applying the result, from then on.

    Raises:
        ConfigError: a number is out of its range.
    """

    step: int
    every: int
    delay: int = 0

    def __post_init__(self) -> None:
        check_whole("step", self.step, least=1)
        check_whole("every", self.every, least=1)
        check_whole("delay", self.delay, least=0, most=self.every)


Action: TypeAlias = Launch | Apply | Change


@dataclass(frozen=True)
class Clock:
    """The inputs of a schedule's decision."""

    step: int  # the number of the optimizer step just attempted, counted from 1
    began: int = 0  # the step after which the latest round was launched; 0 before the first
    seconds: float = 0.0  # since then, without the wait for other ranks
    lr: float | None = None  # the highest inner learning rate since then; None if the loop knows no optimizer


class Schedule(Protocol):
    """Decides what is due. It is pure: the same clock gives the same actions on every rank.

    One that looks at `Clock.seconds` has an attribute `reads_clock`, which is True: ranks that train one replica
    together then agree on the seconds after each step.
    """

    @property
    def fragments(self) -> int:
        """The number of fragments that the model is split into."""

    @property
    def delay(self) -> int:
        """The number of steps between sending a fragment and applying the result."""

    def __call__(self, now: Clock) -> Sequence[Action]:
        """Return the actions that are due, in order."""


@dataclass(frozen=True)
class _AtOnce:
    """A schedule that launches and applies the whole model after the same step."""

    fragments: ClassVar[int] = 1
    delay: ClassVar[int] = 0


@dataclass(frozen=True)
class Every(_AtOnce):
    """Exchange the whole model after each `every` steps.

    Raises:
        ConfigError: `every` is not a positive integer.
    """

    every: int

    def __post_init__(self) -> None:
        check_whole("every", self.every, least=1)

    def __call__(self, now: Clock) -> Sequence[Action]:
        return (Launch(0, steps=self.every), Apply(0)) if now.step % self.every == 0 else ()


@dataclass(frozen=True)
class TrialSchedule(_AtOnce):
    """The schedule of a trial, after whose first `every` steps another one is chosen, if it has found other ranks.

    Args:
        steps: of the whole run; None: unknown.
    """

    steps: int | None = field(default=None, repr=False)  # which ranks may count differently
    every: ClassVar[int] = 20

    def __call__(self, now: Clock) -> Sequence[Action]:
        return Every(self.every)(now)


@dataclass(frozen=True)
class Streaming:
    """Exchange the fragments in turn, each once in `every` steps, and apply each `delay` steps later.

    Fragment p is sent after the steps that are `(p + 1) * every // fragments` modulo `every`, which spreads the traffic
    evenly. With one fragment and no delay it is `Every`.

    Args:
        every: steps between two launches of the same fragment.
        fragments: at most `every`.
        delay: at most `every`. A delay of `every` applies a result just before the next launch. Then there is also an
            `Apply` before the first launch, with nothing to apply, from which eager updates start with this rank's own
            pseudo-gradient.

    Raises:
        ConfigError: a number is out of its range.

    Source: Streaming DiLoCo (arXiv:2501.18512).
    """

    every: int
    fragments: int
    delay: int = 0

    def __post_init__(self) -> None:
        check_whole("every", self.every, least=1)
        check_whole("fragments", self.fragments, least=1)
        if self.fragments > self.every:
            raise ConfigError(
                f"is {self.fragments}; it must be at most every={self.every}, as one is sent per step.", "fragments"
            )
        check_whole("delay", self.delay, least=0, most=self.every)

    def __call__(self, now: Clock) -> Sequence[Action]:
        """Apply what was sent `delay` steps ago, then launch; without a delay, launch and then apply."""
        sent = now.step if self.delay == self.every else now.step - self.delay
        applied = tuple(Apply(p) for p in self._sent(sent))
        launched = tuple(Launch(p, steps=min(self.every, now.step)) for p in self._sent(now.step))
        return launched + applied if self.delay == 0 else applied + launched

    @property
    def offsets(self) -> list[int]:
        """The step of the first launch of each fragment; that of the last one is `every`."""
        return [(p + 1) * self.every // self.fragments for p in range(self.fragments)]

    def _sent(self, step: int) -> list[int]:
        return [p for p, offset in enumerate(self.offsets) if step > 0 and (step - offset) % self.every == 0]


@dataclass(frozen=True)
class Warmup:
    """Nothing is due in the first `steps`, in which gradients are averaged; then another schedule starts.

    Source: post-local SGD (arXiv:1808.07217).
    """

    steps: int
    then: Schedule

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, least=0)
        check_schedule("then", self.then)

    @property
    def fragments(self) -> int:
        return self.then.fragments

    @property
    def delay(self) -> int:
        return self.then.delay

    def __call__(self, now: Clock) -> Sequence[Action]:
        if now.step <= self.steps:
            return ()
        return self.then(Clock(now.step - self.steps, max(0, now.began - self.steps), now.seconds, now.lr))


@dataclass(frozen=True)
class Quadratic(_AtOnce):
    """H = max(every, floor((alpha / lr)^2)) steps, with the learning rate at the start of the round.

    If the rate rises, as in a warm-up, its maximum in the round counts; otherwise a first round that begins near 0
    would last for the whole training.

    Args:
        every: steps in the shortest round.
        alpha: a round is longer than `every` once lr < alpha / sqrt(every).
        max_every: steps in the longest round; if the learning rate ends at 0, a round would never end.

    Raises:
        ConfigError: a number is out of its range; or, when it is called, the loop does not know the optimizer.

    Source: the quadratic synchronization rule (arXiv:2310.14423).
    """

    every: int
    alpha: float
    max_every: int = 10_000

    def __post_init__(self) -> None:
        check_whole("every", self.every, least=1)
        check_whole("max_every", self.max_every, least=self.every)
        check_number("alpha", self.alpha, above=0)

    def __call__(self, now: Clock) -> Sequence[Action]:
        if now.lr is None:
            raise ConfigError(
                "The quadratic rule follows the inner learning rate, so the outer loop must know the optimizer: "
                "OuterLoop(..., inner=optimizer), or outer.attach(optimizer)."
            )
        ratio = self.alpha / now.lr if now.lr > 0 else math.inf
        steps = max(self.every, math.floor(min(self.max_every, ratio * ratio)))
        return (Launch(0, steps=now.step - now.began), Apply(0)) if now.step - now.began >= steps else ()


@dataclass(frozen=True)
class ByTime(_AtOnce):
    """Start a round `seconds` after the last one ended, however many steps a rank has done until then.

    Each rank reads its own clock, and ranks that train one replica together take the furthest one. Fast replicas do
    more steps than slow ones, and weigh more.

    Raises:
        ConfigError: `seconds` is not a positive number.

    Source: EDiT's asynchronous form (arXiv:2412.07210).
    """

    seconds: float
    reads_clock: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("seconds", self.seconds, above=0)

    def __call__(self, now: Clock) -> Sequence[Action]:
        return (Launch(0), Apply(0)) if now.seconds >= self.seconds else ()


@dataclass(frozen=True)
class Levels(_AtOnce):
    """Average often among few ranks and seldom among many; if several levels are due, the widest is taken.

    Args:
        sizes: how many neighbouring ranks take part after how many steps. `{4: 8, 64: None}` averages groups of 8 every
            4 steps, such as the ranks of a machine, and all ranks every 64 steps. One level must be None, all ranks.

    Raises:
        ConfigError: no level is all ranks, a number is out of its range, or a wider level is due more often.

    Source: torch's hierarchical model averager; DASO (arXiv:2104.05588).
    """

    sizes: Mapping[int, int | None]

    def __post_init__(self) -> None:
        check_type("sizes", self.sizes, Mapping, "a dictionary of steps and neighbours, such as {4: 8, 64: None}")
        for every, size in self.sizes.items():
            check_whole(f"levels {shown(self.sizes)}: a number of steps", every, least=1)
            if size is not None:
                check_whole(f"levels {shown(self.sizes)}: a number of ranks", size, least=2)
        order = [self.sizes[every] or math.inf for every in sorted(self.sizes)]
        if not order or order[-1] != math.inf or sorted(set(order)) != order:
            raise ConfigError(
                f"is {dict(self.sizes)}; larger groups must average less often, and all ranks (None) least "
                "often, such as {4: 8, 64: None}.",
                "levels",
            )

    @property
    def groups(self) -> tuple[int, ...]:
        """The number of ranks in a group of level 1, 2 ..."""
        return tuple(size for _, size in sorted(self.sizes.items()) if size is not None)

    def __call__(self, now: Clock) -> Sequence[Action]:
        due = [every for every in sorted(self.sizes) if now.step % every == 0]
        if not due:
            return ()
        widest = self.sizes[due[-1]]
        return Launch(0, 0 if widest is None else self.groups.index(widest) + 1, due[-1]), Apply(0)


@dataclass(frozen=True)
class ChangingSchedule:
    """A schedule whose H changes at given steps: `Every` or `Streaming`, also after a warm-up.

    A change comes at the end of a round (of the last fragment's), so it splits none. All that is under way then is
    applied after the same step, and the first fragment's next round begins there.

    Args:
        first: the schedule until the first change.
        changes: in the order of their steps.

    Raises:
        ConfigError: a change within a round or out of order, or the schedule has no H that could be another one.
    """

    first: Schedule
    changes: tuple[Change, ...]

    def __post_init__(self) -> None:
        for (start, inside), change in zip(self._parts, self.changes, strict=False):
            if change.step <= start or (change.step - start) % inside.every:
                near = start + max(1, round((change.step - start) / inside.every)) * inside.every
                raise ConfigError(
                    f"{change} is within a round: from step {start} on they have {inside.every} steps. Change H at the "
                    f"end of one, such as step={near}."
                )

    @property
    def fragments(self) -> int:
        return self.first.fragments

    @property
    def delay(self) -> int:
        return self.first.delay

    @cached_property
    def _parts(self) -> list[tuple[int, Streaming]]:
        """The steps after which each part begins, and its schedule."""
        warmup = self.first.steps if isinstance(self.first, Warmup) else 0
        return [
            (warmup, streaming(self.first)),
            *((change.step, streaming(self.first, change.every, change.delay)) for change in self.changes),
        ]

    def part(self, step: int) -> tuple[int, Streaming, int]:
        """Return where the part begins that a step is in, its schedule, and its number."""
        number = max((n for n, (start, _) in enumerate(self._parts) if start < step), default=0)
        return (*self._parts[number], number)

    def ends_round(self, step: int) -> bool:
        """Return whether H may change after this step: all fragments were sent equally often."""
        start, inside, _ = self.part(step)
        return step > start and (step - start) % inside.every == 0

    def __call__(self, now: Clock) -> Sequence[Action]:
        start, inside, number = self.part(now.step)
        if now.step <= start:  # in a warm-up
            return ()
        actions: list[Action] = list(inside(Clock(now.step - start)))
        if number and now.step - start <= inside.every:
            actions = [self._first_of_part(one, now.step - start, number) for one in actions]
        if number < len(self.changes) and now.step == self.changes[number].step:
            under_way = [p for p, offset in enumerate(inside.offsets) if offset + inside.delay > inside.every]
            actions += [*map(Apply, under_way), self.changes[number]]
        return actions

    def _first_of_part(self, action: Action, steps: int, number: int) -> Action:
        """Count the steps that a fragment's first round after a change has from the time before it, too."""
        if not isinstance(action, Launch):
            return action
        before = self._parts[number - 1][1]
        return replace(action, steps=steps + before.every - before.offsets[action.fragment])


def after_warmup(schedule: Schedule) -> Schedule:
    """Return the schedule that follows the warm-up, or `schedule` if there is none."""
    return schedule.then if isinstance(schedule, Warmup) else schedule


def streaming(schedule: Schedule, every: int | None = None, delay: int | None = None) -> Streaming:
    """Return what follows the warm-up, as `Streaming` with another H and delay; None: as they are.

    Raises:
        ConfigError: its rounds do not follow from one H, or have no thread of their own for a delay.
    """
    inside = after_warmup(schedule)
    if not isinstance(inside, (Every, Streaming)):
        raise ConfigError(
            f"{inside} decides by itself how long a round is, so its H can't change. Use Every or Streaming."
        )
    every, delay = inside.every if every is None else every, inside.delay if delay is None else delay
    if delay and not inside.delay:
        raise ConfigError(
            f"is {delay}, but the loop began without one, so its rounds do not overlap with training. Begin with "
            "a delay, such as streaming_diloco(delay=1).",
            "delay",
        )
    return Streaming(every, inside.fragments, delay)


def check_schedule(name: str, schedule: object) -> None:
    """Raise WrongType unless `schedule` is a schedule."""
    check_protocol(name, schedule, ("__call__", "fragments", "delay"), "a schedule, such as Every(8)")
