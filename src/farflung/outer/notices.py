# SPDX-License-Identifier: Apache-2.0
"""Events of members after rounds: one that a rule excludes, and too few of them for a robust rule."""

from __future__ import annotations

from dataclasses import dataclass, field

from farflung.base.events import Kind
from farflung.outer.quorum import Quorum
from farflung.outer.stats import Round
from farflung.outer.timetable import Timetable


@dataclass(eq=False)
class Notices:
    """A listener of rounds, which reports what has changed since the last one, from the first member."""

    quorum: Quorum
    timetable: Timetable
    _left_out: dict[int, set[int]] = field(default_factory=dict)  # fragments that a member does not count in, by its id
    _are_few: bool = False  # fewer replicas than a robust rule needs took part in the latest round

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
