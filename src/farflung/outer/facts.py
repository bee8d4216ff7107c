# SPDX-License-Identifier: Apache-2.0
"""Properties of an outer loop that need no communication: its position, its role, its costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

from farflung.outer.quorum import Quorum
from farflung.outer.recipe import Recipe
from farflung.outer.stats import Meter, Round, Stats
from farflung.outer.timetable import Timetable


class Facts:
    """The part of `OuterLoop` that only reads.

    Attributes:
        listeners_of_run: returns those listeners that whoever started this process wants each of its loops to have.
    """

    listeners_of_run: ClassVar[Callable[[], Iterable[Callable[[Round], None]]]] = tuple
    _recipe: Recipe
    _timetable: Timetable
    _quorum: Quorum
    _meter: Meter

    @property
    def is_warming(self) -> bool:
        """Whether the next step belongs to the warm-up, in which gradients are averaged and weights are not."""
        return self._timetable.position < self._recipe.warmup

    @property
    def position(self) -> int:
        """Number of attempted steps since the loop began; a replica that came later counts those of the others."""
        return self._timetable.position

    @property
    def steps_since_sync(self) -> int:
        """Number of attempted steps since the latest round was launched."""
        return self._timetable.position - self._timetable.began

    @property
    def is_newcomer(self) -> bool:
        """Whether this replica joined a run of others, and has made no step since."""
        return self._quorum.welcome is not None

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the current replicas: the one to write what all of them share."""
        return self._quorum.group.rank == 0

    @property
    def has_anchor(self) -> bool:
        """Whether this rank holds the weights that all ranks last agreed on, in addition to those that it trains."""
        return self._recipe.has_anchor

    def stats(self) -> Stats:
        """Return the costs of the rounds so far: their number, bytes and seconds."""
        return self._meter.stats()

    def advice(self, by_flags: bool = False) -> str:
        """Return the changes that the statistics so far suggest, as `--outer-` flags or keywords; empty if none."""
        return self._meter.advice(by_flags)
