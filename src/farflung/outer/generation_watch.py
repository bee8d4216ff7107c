# SPDX-License-Identifier: Apache-2.0
"""What ends a wait in a generation of replicas: one that is gone or late, values that never come, a lost store."""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

import torch.distributed as dist

from farflung.base.errors import RankFailure, Unreachable
from farflung.base.words import in_seconds
from farflung.comm.generation_group import Entered
from farflung.comm.group import Group
from farflung.comm.member_store import LauncherNotes, MemberStore, Record, Signs

_LOOK_S = 1.0  # how long a wait goes on before it asks who is late
_SLOWER = 10  # how much slower than the latest ones values may come before they count as lost
_MEASURED_BYTES = 1_000_000  # at least: smaller ones say little of a line


class Waits(Protocol):
    """What a membership knows that matters to a wait; see `Elastic`."""

    member: int
    island: Group
    members: MemberStore
    at_once: MemberStore
    notes: LauncherNotes
    signs: Signs
    slowest_bps: float

    @property
    def grace_s(self) -> float: ...

    def limit_s(self, member: int) -> float: ...

    def retire(self, group: dist.ProcessGroup) -> None: ...


class GenerationWatch:
    """Looks for what ends a wait in a generation: one that is gone, one that is late, values that never come."""

    def __init__(self, elastic: Waits, record: Record, connect_s: float) -> None:
        self.connect_s = connect_s
        self._elastic, self._record = elastic, record
        self._num_ends = -1

    def look(self, entered: Entered, waited_s: float) -> None:
        try:
            why = self._why_over(entered, waited_s)
        except Unreachable as error:  # the generation goes on as long as all are there
            is_late = waited_s > self._longest_s(entered)
            why = f"no values came for {in_seconds(waited_s)}. {error}" if is_late else ""
        if why:
            raise self.break_off(why)

    def _why_over(self, entered: Entered, waited_s: float) -> str:
        elastic, number = self._elastic, self._record.number
        if why := elastic.at_once.broken(number):
            return why
        what = f"wait{elastic.island.rank}"
        if entered.place:
            elastic.members.say(number, what, elastic.member, entered.place)  # before others ask who is late
        if waited_s < _LOOK_S:
            return ""
        now = elastic.members.record()
        if now is not None and now.number > number:
            return "the others have gone on"
        places = elastic.members.said(number, what, self._record.ids)
        late = [one for one in self._record.ids if places.get(one) != entered.place]
        num_ends, before = elastic.notes.count("ends"), self._num_ends
        self._num_ends = num_ends
        for one in self._record.ids if num_ends != before else ():
            if ended := elastic.notes.noted("gone", one):
                return f"{elastic.notes.name_of(one)}: {ended}"
        for one in self._record.ids:
            if silent_s := elastic.signs.silent_s(one):
                return f"{elastic.notes.name_of(one)}: its machine gave no sign for {in_seconds(silent_s)}"
        if late and waited_s > (limit_s := max(map(elastic.limit_s, late))):
            for one in late:
                elastic.members.say(number, "late", one, "1")
            return f"{', '.join(map(elastic.notes.name_of, late))}: late by more than {in_seconds(limit_s)}"
        if not late and waited_s > self._longest_s(entered):
            return f"no values came for {in_seconds(waited_s)}, though all wait for them"
        return ""

    def _longest_s(self, entered: Entered) -> float:
        """Return how long a wait may last of which nothing is known."""
        return self._elastic.grace_s + entered.nbytes / self._elastic.slowest_bps

    def note_end(self, entered: Entered, waited_s: float) -> None:
        if entered.nbytes >= _MEASURED_BYTES:
            self._elastic.slowest_bps = entered.nbytes / waited_s / _SLOWER

    def retire(self, group: dist.ProcessGroup) -> None:
        self._elastic.retire(group)

    def break_off(self, reason: str) -> RankFailure:
        with suppress(Unreachable):
            self._elastic.at_once.mark_broken(self._record.number, reason)
        return RankFailure(f"The generation of these replicas is over: {reason}.")
