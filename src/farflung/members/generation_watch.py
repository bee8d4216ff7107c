# SPDX-License-Identifier: Apache-2.0
"""Ends waits in a generation of replicas if a member is gone or late, values never come, or the store is lost."""

from __future__ import annotations

import time
from contextlib import suppress

from farflung.address.member_store import Record
from farflung.address.transport import Entered
from farflung.base.errors import RankFailure, Unreachable
from farflung.base.words import in_seconds
from farflung.comm.group import Group
from farflung.members.peers import MissingMembers, Peers
from farflung.votes.generation import OddMembers

_LOOK_S = 1.0  # how long a wait lasts before it asks who is late
_SLOWER = 10  # how much slower than the latest ones values may come before they count as lost
_MEASURED_BYTES = 1_000_000  # at least: smaller ones say little of a line


class GenerationWatch:
    """Checks whether a wait in a generation must end: a member is gone, or late, or values never come."""

    def __init__(self, peers: Peers, member: int, island: Group, record: Record, connect_s: float) -> None:
        self.connect_s = connect_s
        self._peers, self._member, self._record = peers, member, record
        self._what = f"wait{island.rank}"
        self._num_ends = -1

    def look(self, entered: Entered, waited_s: float) -> None:
        try:
            why = self._why_over(entered, waited_s)
        except Unreachable as error:  # the generation continues as long as all are there
            is_over = error.is_gone and self._peers.needs_store
            is_late = is_over or waited_s > self._longest_s(entered)
            why = f"no values came for {in_seconds(waited_s)}. {error}" if is_late else ""
        if why:
            raise self.break_off(why)

    def _why_over(self, entered: Entered, waited_s: float) -> str:
        peers, number = self._peers, self._record.number
        missing = [self._record.ids[rank] for rank in entered.missing]
        if missing:
            peers.awaited = MissingMembers(entered.place, self._what, missing, time.monotonic() - waited_s)
        if why := peers.members_soon.broken(number):
            return why
        if entered.place:
            peers.members_soon.put(number, self._what, self._member, entered.place)  # before others ask who is late
        if waited_s < _LOOK_S:
            return ""
        if peers.members_soon.current().number > number:
            return "the others have entered a later generation"
        missing = missing or [*self._record.ids]
        ask_each = peers.notes_soon.board.map
        num_ends = peers.notes_soon.num_ends()
        ids = self._record.ids if num_ends != self._num_ends else ()
        for one, ended in zip(ids, ask_each(lambda one: peers.notes_soon.get("gone", one), ids), strict=True):
            if ended:
                return f"{peers.notes_soon.name_of(one)}: {ended}"
        self._num_ends = num_ends  # once all were asked: a request may have failed
        for one, silent_s in zip(missing, ask_each(peers.heartbeats_soon.silent_s, missing), strict=True):
            if silent_s:
                return f"{peers.notes_soon.name_of(one)}: its machine gave no sign for {in_seconds(silent_s)}"
        if waited_s <= min(map(peers.limit_s, missing)):
            return ""
        places = peers.members_soon.get(number, self._what, missing)
        late = [one for one in missing if places.get(one) != entered.place]
        if late and waited_s > (limit_s := max(map(peers.limit_s, late))):
            ask_each(lambda one: peers.members_soon.put(number, "late", one), late)
            return f"{', '.join(map(peers.notes_soon.name_of, late))}: late by more than {in_seconds(limit_s)}"
        if not late and waited_s > self._longest_s(entered):
            return f"no values came for {in_seconds(waited_s)}, though all wait for them"
        return ""

    def _longest_s(self, entered: Entered) -> float:
        """Return how long a wait may last while no cause is known."""
        return self._peers.grace_s + entered.nbytes / self._peers.slowest_bps

    def note_end(self, entered: Entered, took_s: float) -> None:
        self._peers.awaited = None
        if entered.nbytes >= _MEASURED_BYTES:
            self._peers.slowest_bps = entered.nbytes / took_s / _SLOWER

    def break_off(self, reason: str, author: int | None = None) -> RankFailure:
        with suppress(Unreachable):
            self._peers.at_once.mark_broken(self._record.number, reason)
        if author is not None:
            return OddMembers({self._record.ids[author]: reason})
        return RankFailure(f"The generation of these replicas is over: {reason}.")
