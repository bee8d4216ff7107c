# SPDX-License-Identifier: Apache-2.0
"""Events after rounds: a rule excludes a member, too few members are left for a robust rule, or members move alike."""

from __future__ import annotations

from dataclasses import dataclass, field

from farflung.base.events import Kind
from farflung.outer.quorum import Quorum
from farflung.outer.stats import Round
from farflung.outer.timetable import Timetable

_ALIKE, _ROUNDS = 0.99, 3  # on data of their own, replicas of a small GPT have 0.88 to 0.97 at first
_LEAST_BYTES = 4000  # that are sent: a few hundred parameters move alike on any data


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
