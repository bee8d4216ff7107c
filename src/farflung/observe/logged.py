# SPDX-License-Identifier: Apache-2.0
"""What a script has logged, as curves of bounded size: values that lie close together become one point, their mean."""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Any, NamedTuple

from farflung.observe import records
from farflung.observe.attempts import Attempts, Life

MOST_POINTS = 4000
_SILENT_S = 60.0  # after which another rank's values are drawn; scripts that log less often have two rows to come first
_RATES = ("lr", "learning_rate")


class CurvePoint(NamedTuple):
    """Some values that follow each other."""

    time: float  # of the last one
    step: int | None
    value: float  # their mean
    size: int = 1  # how many
    num_odd: int = 0  # that are not finite
    odd_step: int | None = None  # of the first of these


def _joined(a: CurvePoint, b: CurvePoint) -> CurvePoint:
    size = a.size + b.size
    odd_step = a.odd_step if a.num_odd else b.odd_step
    return CurvePoint(
        b.time, b.step, (a.value * a.size + b.value * b.size) / size, size, a.num_odd + b.num_odd, odd_step
    )


class Curve:
    """A metric of one rank: the first that logs it in each life of the ranks, and the next one if that falls silent."""

    def __init__(self, name: str) -> None:
        self.name, self.first, self.last = name, math.nan, math.nan  # values
        self._points: list[CurvePoint] = []
        self._stride = 1  # values in a point
        self._life: Life = (0, 0)
        self._writer: Any = None
        self._ahead = set[Any]()  # writers that have logged a later step since the last row of this one
        self._time: float = 0.0  # of the last value
        self._step: int | None = None
        self._begin_point()

    def _begin_point(self) -> None:
        self._sum, self._size, self._num_odd = 0.0, 0, 0
        self._odd_step: int | None = None

    def add(self, time: float, step: int | None, value: float, writer: Any, life: Life) -> None:
        if life != self._life or writer != self._writer:
            if life > self._life:
                self._begin_again(step)
            elif life < self._life or not self._follows(time, step, writer):
                return
            self._life, self._writer = life, writer
        self._ahead.clear()
        if not self._size and not self._points:
            self.first = value
        self.last, self._time, self._step = value, time, step
        self._sum += value
        self._size += 1
        if value - value != 0:  # NaN or an infinity
            self._odd_step = self._odd_step if self._num_odd else step
            self._num_odd += 1
        if self._size >= self._stride:
            self._points.append(self._partial)
            self._begin_point()
            if len(self._points) >= MOST_POINTS:
                self._points = list(map(_joined, self._points[::2], self._points[1::2]))
                self._stride *= 2

    def _follows(self, time: float, step: int | None, writer: Any) -> bool:
        """Return whether this writer logs on while the one that is drawn has logged nothing for a minute."""
        if step is not None and self._step is not None and step <= self._step:
            return False
        was_ahead = writer in self._ahead
        self._ahead.add(writer)
        return was_ahead and time > self._time + _SILENT_S

    def _begin_again(self, step: int | None) -> None:
        """Forget the steps that are made again, after the checkpoint from which the ranks continue."""
        if step is not None:
            self._points = [point for point in self.points if point.step is None or point.step < step]
            self._begin_point()

    @property
    def points(self) -> list[CurvePoint]:
        return [*self._points, self._partial] if self._size else self._points

    @property
    def _partial(self) -> CurvePoint:
        mean = self._sum / self._size
        return CurvePoint(self._time, self._step, mean, self._size, self._num_odd, self._odd_step)

    @property
    def not_finite(self) -> str:
        """Which values are no numbers, in words; empty if all are."""
        odd = [point for point in self.points if point.num_odd]
        if not odd:
            return ""
        number, count = sum(point.num_odd for point in odd), sum(point.size for point in self.points)
        since = "" if odd[0].odd_step is None else f", first at step {odd[0].odd_step:,}"
        return f"{self.name} is not finite in {number:,} of {count:,} values{since}"


class Curves:
    """The metrics that are drawn: losses and learning rates, by name."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts, self._curves = attempts, dict[str, Curve]()
        self._names: Set[str] = frozenset()  # of the values of the last row
        self._drawn: list[tuple[str, Curve]] = []  # of these
        self._who: tuple[Any, ...] = ()  # wrote the last row
        self._life: Life = (0, 0)  # of that

    def take(self, row: Any) -> float:
        """Read a line of `metrics.jsonl`; return its time. This is called a million times."""
        time, step, values = records.moment(row["time"]), row.get("step"), row["values"]
        who = row.get("member"), row.get("rank", 0), row.get("attempt"), row.get("restart")
        if who != self._who or who[2] is None:
            for number in who:
                records.optional_count(number)
            self._who, self._life = who, self._attempts.life(who[2], who[3], time)
        records.optional_count(step)
        if values.keys() != self._names:  # AttributeError: it is no object
            self._names = frozenset(values)
            drawn = [name for name in values if "loss" in name.lower() or name.split("/")[-1] in _RATES]
            self._drawn = [(name, self._curve(name)) for name in drawn]
        for name, curve in self._drawn:
            value = values[name]
            if type(value) is not float:
                value = records.logged(value)
            if type(value) is float:
                curve.add(time, step, value, who[:2], self._life)
        return time

    def _curve(self, name: str) -> Curve:
        if name not in self._curves:
            self._curves[name] = Curve(records.text(name))
        return self._curves[name]

    @property
    def loss(self) -> Curve | None:
        """The loss: of the metrics with that word in their names, the one with the shortest."""
        losses = [curve for curve in self._curves.values() if "loss" in curve.name.lower() and curve.points]
        return min(losses, key=lambda curve: (len(curve.name), curve.name), default=None)

    @property
    def drawn(self) -> list[Curve]:
        """The loss, and the learning rates."""
        rates = [curve for curve in self._curves.values() if curve.name.split("/")[-1] in _RATES and curve.points]
        return [*filter(None, [self.loss]), *sorted(rates, key=lambda curve: curve.name)]
