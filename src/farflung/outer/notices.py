# SPDX-License-Identifier: Apache-2.0
"""What a loop finds wrong with its replicas: equal batches, one that is excluded, too few of them, a loop left open."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations

from farflung.base.errors import ConfigError
from farflung.base.events import Kind, record
from farflung.base.words import numbered
from farflung.outer.quorum import Quorum
from farflung.outer.stats import Round
from farflung.outer.timetable import Timetable

_ROUNDS = 3  # in which two replicas bring the same, or all move alike
_ALIKE = 0.99  # on data of their own, replicas of a small GPT have 0.88 to 0.97 at first
_LEAST_BYTES = 4000  # that are sent: a few hundred parameters move alike on any data


@dataclass(eq=False)
class Twins:
    """Detects replicas that see the same batches: their weights are equal to the last bit, round after round.

    It compares the fingerprints in their ballots, in the first rounds in which they move.
    """

    are_allowed: bool  # so nothing is compared
    _latest: dict[tuple[int, int], int] = field(default_factory=dict)  # fingerprints, by fragment and replica
    _alike: dict[tuple[int, int], int] = field(default_factory=dict)  # rounds in which two were alike; -1: not any more

    def are_looked_for(self, ids: Sequence[int]) -> bool:
        """Whether some of these replicas were not different yet."""
        return not self.are_allowed and any(self._alike.get(pair, 0) >= 0 for pair in combinations(ids, 2))

    def look(self, fragment: int, ids: Sequence[int], marks: Sequence[int]) -> None:
        """Compare the replicas' fingerprints in a round: of their weights, 0 for a replica without steps.

        Raises:
            ConfigError: some were equal in as many rounds as it takes.
        """
        if not self.are_looked_for(ids) or len(marks) != len(ids):  # a round out of a checkpoint has no marks
            return
        brought = {one: mark for one, mark in zip(ids, marks, strict=True) if mark}
        latest = {one: self._latest.get((fragment, one), mark) for one, mark in brought.items()}
        moved = [one for one, mark in brought.items() if mark != latest[one]]  # never in the first round
        self._latest |= {(fragment, one): mark for one, mark in brought.items()}
        for pair in combinations(moved, 2):
            seen = self._alike.get(pair, 0)
            if seen >= 0:
                self._alike[pair] = seen + 1 if brought[pair[0]] == brought[pair[1]] else -1
        found = {one for pair in combinations(ids, 2) if self._alike.get(pair, 0) >= _ROUNDS for one in pair}
        if found:
            twins = [rank for rank, one in enumerate(ids) if one in found]
            raise ConfigError(
                f"{numbered('replica', twins).capitalize()} see the same batches: their weights were equal to the last "
                f"bit in each of {_ROUNDS} rounds. Give each its own part of the data, by a "
                "DistributedSampler, a prepared loader (--as-accelerate), or a seed that depends on its place "
                "(farflung.elastic.place()). If this is meant, say same_data=True (--outer-same-data)."
            )


@dataclass(eq=False)
class Notices:
    """A listener of rounds, which reports what has changed since the last one, from the first member."""

    quorum: Quorum
    timetable: Timetable
    _left_out: dict[int, set[int]] = field(default_factory=dict)  # fragments that a member does not count in, by its id
    _are_few: bool = False  # fewer replicas than a robust rule needs took part in the latest round
    _num_alike: int | None = 0  # rounds so far, in all of which the replicas moved alike; None: it is known

    def round_ended(self, record: Round) -> None:
        is_first, note = self.quorum.group.rank == 0, self.quorum.membership.note
        for member in record.members:  # in the first of its fragments, or again, in all of them
            before = bool(fragments := self._left_out.setdefault(member, set()))
            (fragments.add if member in record.left_out else fragments.discard)(record.fragment)
            if bool(fragments) != before and is_first:
                why = {"why": record.left_out[member]} if fragments else {}
                note(Kind.EXCLUDED, member, **why)
        at_work = len(record.left_out) + sum(weight > 0 for weight in record.weights)
        size, least = at_work or len(record.members), self.timetable.recipe.least
        were_few, self._are_few = self._are_few, size < least
        if were_few != self._are_few and is_first:
            note(Kind.OUTVOTES, record.members[0], replicas=size, least=least)
        self._look_for_alike(record)

    def _look_for_alike(self, record: Round) -> None:
        """Say once that replicas may have the same data: dropout alone keeps their weights from being equal.

        A lossy codec rounds what replicas send in the same direction, if the values are as large as each other, as in a
        warm-up under Adam. The mean is then longer than the replicas' moves, and no cosine follows from it.
        """
        recipe = self.timetable.recipe
        if self._num_alike is None or recipe.same_data or record.bytes_sent < _LEAST_BYTES or not recipe.codec.linear:
            return
        self._num_alike = self._num_alike + 1 if record.cosine >= _ALIKE else None
        if self._num_alike == _ROUNDS:
            self._num_alike = None
            if self.quorum.group.rank == 0:
                message = (
                    f"the replicas moved almost alike in each of the first {_ROUNDS} rounds (cosine "
                    f"{record.cosine:.3g}), so they may see the same batches: share the data out with --as-accelerate "
                    "or a DistributedSampler, or seed each replica by its place (farflung.elastic.place())"
                )
                self.quorum.membership.note(Kind.WARNING, record.members[0], message=message)


@dataclass
class OpenEnd:
    """The state in which a loop would end now: warns of different weights if the script has not ended it, notes equal.

    Attributes:
        note: returns what leaves a digest of the weights; None if that is not to be done, or the loop is gone.
        steps: since the replicas were last alike.
        is_silent: another object reports them.
    """

    note: Callable[[], Callable[[], None] | None]
    steps: int = 0
    is_silent: bool = False

    def report(self) -> None:
        """Print a line, or note equal weights, unless an error ends the process: then no one expects these."""
        if sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None:
            return
        if not self.steps and (note := self.note()) is not None:
            with suppress(RuntimeError):  # a request may need a thread, and none begins as late as this
                note()
        if self.steps and not self.is_silent:
            which = "step was" if self.steps == 1 else f"{self.steps} steps were"
            message = (
                f"an OuterLoop was not closed. Its last {which} not averaged with any other rank, so ranks "
                "have different weights. Use `with OuterLoop(...):`, or call close() at the end."
            )
            record(Kind.WARNING, message=message)
