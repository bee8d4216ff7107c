# SPDX-License-Identifier: Apache-2.0
"""When something is exchanged: from a step to the words `Launch` and `Apply`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from farflung.base.checks import check_number, check_protocol, check_type, check_whole, shown, wrong_type
from farflung.base.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """Send off a fragment as it is after this step.

    Args:
        level: among which ranks; 0 are all of them, others are those of `Levels.sizes`.
        steps: of a full round of it, which a rank's weight in it is relative to.
    """

    fragment: int
    level: int = 0
    steps: int = 1


@dataclass(frozen=True)
class Apply:
    """Bring what came back of a fragment into the model."""

    fragment: int


Word: TypeAlias = Launch | Apply


@dataclass(frozen=True)
class Moment:
    """What a schedule may look at.

    Args:
        step: the number of the optimizer's step just done, counted from 1.
        began: the step after which the latest round was launched, 0 before the first.
        seconds: since then.
        lr: the highest inner learning rate since then; None where the loop knows no optimizer.
    """

    step: int
    began: int = 0
    seconds: float = 0.0
    lr: float | None = None


class Schedule(Protocol):
    """Pure: the same answer for the same moment on every rank."""

    @property
    def fragments(self) -> int:
        """How many fragments it speaks of."""

    @property
    def delay(self) -> int:
        """The steps that go on between sending a fragment off and applying what came of it."""

    def __call__(self, now: Moment) -> Sequence[Word]:
        """Say what is due."""


@dataclass(frozen=True)
class _AtOnce:
    """A schedule that launches and applies the whole model after the same step."""

    @property
    def fragments(self) -> int:
        """One: the whole."""
        return 1

    @property
    def delay(self) -> int:
        """None."""
        return 0


@dataclass(frozen=True)
class Every(_AtOnce):
    """Exchange the whole model after each `every` steps.

    Raises:
        ConfigError: `every` is no whole number above zero.
    """

    every: int

    def __post_init__(self) -> None:
        check_whole("every", self.every, least=1)

    def __call__(self, now: Moment) -> Sequence[Word]:
        """Launch and apply at once when the step is a multiple of `every`."""
        return (Launch(0, steps=self.every), Apply(0)) if now.step % self.every == 0 else ()


@dataclass(frozen=True)
class Streaming:
    """Exchange one fragment after the other, each of them once in `every` steps, and apply it `delay` steps later.

    Fragment p is sent off after the steps that leave the remainder `(p + 1) * every // fragments` (modulo `every`), so
    the traffic is spread evenly. With one fragment and no delay it is `Every`.

    Args:
        every: steps between two launches of the same fragment.
        fragments: at most `every`.
        delay: less than `every`, or `every` itself: what came back is then applied just before the next launch. So is
            nothing before the first one, which lets eager updates begin with what this rank has done itself.

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
                f"fragments is {self.fragments}; it must be at most every={self.every}, as one is sent per step."
            )
        check_whole("delay", self.delay, least=0, most=self.every)

    def __call__(self, now: Moment) -> Sequence[Word]:
        """Apply what was sent `delay` steps ago, then launch; at once where there is no delay."""
        landing = now.step if self.delay == self.every else now.step - self.delay
        applied = tuple(Apply(p) for p in self._sent(landing))
        launched = tuple(Launch(p, steps=min(self.every, now.step)) for p in self._sent(now.step))
        return launched + applied if self.delay == 0 else applied + launched

    def _sent(self, step: int) -> list[int]:
        return [p for p in range(self.fragments) if step > 0 and (step - self._offset(p)) % self.every == 0]

    def _offset(self, fragment: int) -> int:
        return (fragment + 1) * self.every // self.fragments


@dataclass(frozen=True)
class Warmup:
    """Nothing is due in the first `steps`, in which gradients are averaged instead; then another schedule begins.

    Source: post-local SGD (arXiv:1808.07217).
    """

    steps: int
    then: Schedule

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, least=0)
        check_schedule("then", self.then)

    @property
    def fragments(self) -> int:
        """Those of the schedule that follows."""
        return self.then.fragments

    @property
    def delay(self) -> int:
        """That of the schedule that follows."""
        return self.then.delay

    def __call__(self, now: Moment) -> Sequence[Word]:
        """Ask the schedule that follows, which counts from the end of the warm-up."""
        if now.step <= self.steps:
            return ()
        return self.then(Moment(now.step - self.steps, max(0, now.began - self.steps), now.seconds, now.lr))


@dataclass(frozen=True)
class Quadratic(_AtOnce):
    """H = max(every, floor((alpha / lr)^2)) steps, with the learning rate at the start of the round.

    Where the rate rises, as in a warm-up, the highest of the round counts: else a first round that began near 0 would
    last for the whole training.

    Args:
        every: the shortest round.
        alpha: which learning rate is small; a round is longer than `every` once lr < alpha / sqrt(every).
        longest: of all rounds; where the learning rate ends at 0 a round would never end.

    Raises:
        ConfigError: a number is out of its range, or the loop does not know the optimizer (when it is asked).

    Source: the quadratic synchronization rule (arXiv:2310.14423).
    """

    every: int
    alpha: float
    longest: int = 10_000

    def __post_init__(self) -> None:
        check_whole("every", self.every, least=1)
        check_whole("longest", self.longest, least=self.every)
        check_number("alpha", self.alpha, above=0)

    def __call__(self, now: Moment) -> Sequence[Word]:
        """Launch and apply at once when the round that is on has had its steps."""
        if now.lr is None:
            raise ConfigError(
                "The quadratic rule follows the inner learning rate, so the outer loop must know the optimizer: "
                "OuterLoop(..., inner=optimizer), or outer.attach(optimizer)."
            )
        ratio = self.alpha / now.lr if now.lr > 0 else math.inf
        steps = max(self.every, math.floor(min(self.longest, ratio * ratio)))
        return (Launch(0, steps=now.step - now.began), Apply(0)) if now.step - now.began >= steps else ()


@dataclass(frozen=True)
class ByTime(_AtOnce):
    """A round when `seconds` have gone by since the last one, however many steps a rank has done until then.

    Each rank looks at its own clock; fast ones do more steps than slow ones and weigh more.

    Raises:
        ConfigError: `seconds` is no number above 0.

    Source: EDiT's asynchronous form (arXiv:2412.07210).
    """

    seconds: float

    def __post_init__(self) -> None:
        check_number("seconds", self.seconds, above=0)

    def __call__(self, now: Moment) -> Sequence[Word]:
        """Launch and apply at once when the time is up."""
        return (Launch(0), Apply(0)) if now.seconds >= self.seconds else ()


@dataclass(frozen=True)
class Levels(_AtOnce):
    """Average often among few ranks and seldom among many: of all levels that are due the widest is taken.

    Args:
        sizes: from a number of steps to how many neighbouring ranks meet after it, such as `{4: 8, 64: None}`: every 4
            steps those of a machine with 8, every 64 steps all. One of them must be None.

    Raises:
        ConfigError: nothing is said of all ranks, a size or number is out of range, or a wider level comes more often.

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
                f"levels is {dict(self.sizes)}; larger groups must average less often, and all ranks (None) least "
                "often, such as {4: 8, 64: None}."
            )

    @property
    def groups(self) -> tuple[int, ...]:
        """How many ranks meet on level 1, 2 ..."""
        return tuple(size for _, size in sorted(self.sizes.items()) if size is not None)

    def __call__(self, now: Moment) -> Sequence[Word]:
        """Launch and apply on the widest level that is due."""
        due = [every for every in sorted(self.sizes) if now.step % every == 0]
        if not due:
            return ()
        widest = self.sizes[due[-1]]
        return Launch(0, 0 if widest is None else self.groups.index(widest) + 1, due[-1]), Apply(0)


def check_schedule(name: str, schedule: object) -> None:
    """Raise WrongType unless `schedule` is one."""
    if not callable(schedule):
        raise wrong_type(name, schedule, "a schedule, such as Every(8)")
    check_protocol(name, schedule, ("fragments", "delay"), "a schedule, such as Every(8)")
