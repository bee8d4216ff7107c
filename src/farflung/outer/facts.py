# SPDX-License-Identifier: Apache-2.0
"""What an outer loop says of itself, without communication: where it is, who it is, what it has cost."""

from __future__ import annotations

from farflung.outer.quorum import Quorum
from farflung.outer.recipe import Recipe
from farflung.outer.stats import Meter, Stats
from farflung.outer.timetable import Timetable


class Facts:
    """The part of `OuterLoop` that only reads."""

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
        """Whether this replica came to a run of others, and has made no step since."""
        return self._quorum.welcome is not None

    @property
    def is_first(self) -> bool:
        """Whether this is the first one of the replicas that are there: the one to write what they have in common."""
        return self._quorum.group.rank == 0

    @property
    def has_anchor(self) -> bool:
        """Whether the weights that all ranks last agreed on are at hand, beside those that this rank trains."""
        return self._recipe.has_anchor

    def stats(self) -> Stats:
        """Return what the rounds have cost so far: bytes, seconds, and how many there were."""
        return self._meter.stats()

    def advice(self, by_flags: bool = False) -> str:
        """Return what the statistics so far suggest to change, in `--outer-` flags or in keywords; empty if nothing."""
        return self._meter.advice(by_flags)
