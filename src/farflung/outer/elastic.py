# SPDX-License-Identifier: Apache-2.0
"""Replicas that come and go: a membership that one c10d store decides on.

A member that is lost, or late for too long, breaks the epoch: each of the others closes its connections, says in the
store how far its rounds have come, and waits until all that still live have said so. One of them then replaces the
epoch's record by compare-and-set, and all go by that. Newcomers ask in the store; the votes of a round let all members
know of them at the same point.
"""

from __future__ import annotations

import time
from ast import literal_eval
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from farflung.base.errors import RankFailure, Unreachable
from farflung.base.words import counted, in_seconds
from farflung.comm.board import Board
from farflung.comm.collectives import from_first, gather_object
from farflung.comm.epoch_group import Entered, EpochGroup
from farflung.comm.exchange import Exchange
from farflung.comm.group import Group, SoloGroup
from farflung.comm.member_store import Applicant, LauncherNotes, MemberStore, Record
from farflung.outer.membership import ALL, Epoch, Needs, open_epoch

_POLL_S = 0.005  # how often those that meet look whether all have come
_CAUSES_S = 0.02  # and why some have not
_JOIN_S = 0.02  # how often a newcomer looks whether it is let in
_ASK_S = 0.5  # how often a member asks who waits to join, at most
_LOOK_S = 1.0  # how long a wait goes on before it asks who is late
_BEAT_LOST_S = 2.5  # without a sign from a launcher, which gives one every half second
_CONNECT_S = 2.0
_RELEASE_S = 0.1  # at the end, with Python's lock free
_RETIRED_S = 1.0  # after which gloo's threads have let go of all that they ended
_SLOWEST_BPS = 125_000  # bytes per second; slower values count as lost, until a speed was measured,
_SLOWER = 10  # then those that are so many times slower than the latest ones
_MEASURED_BYTES = 1_000_000  # at least: smaller ones say little of a line


class Elastic:
    """Membership of replicas that may fail, leave or join at any time.

    Args:
        store: a c10d store that all members and launchers share, such as a `TCPStore`, or a board over it.
        member: this replica's id, which no other has had; the launcher gives it.
        expected: how many replicas the first epoch waits for.
        least: the number that suffices after `grace_s` seconds.
        most: how many there will be at most.
        grace_s: how many seconds the others wait for a replica that is late before they go on without it.
        island: the ranks that train this replica.

    Attributes:
        record: the epoch that this replica is in, or was in last.
        joined: the number of the epoch in which it came in as a newcomer; 0 if it was there from the first one on.
        slowest_bps: values that come more slowly than so many bytes a second count as lost, after `grace_s`.
    """

    is_fixed = False

    def __init__(
        self,
        store: Any,
        member: int,
        *,
        expected: int = 1,
        least: int = 1,
        most: int = 64,
        grace_s: float = 30.0,
        island: Group | None = None,
    ) -> None:
        self.island = island or SoloGroup()
        self.most, self.grace_s = most, grace_s
        board = Board.of(store)
        self.notes = LauncherNotes(board)
        self.member = member
        self.record: Record | None = None
        self.joined = 0
        self._expected, self._least = expected, least
        self._share_group = Exchange(self.island.duplicate())
        # Loops are numbered as other replicas number theirs.
        number = from_first(self._share_group, lambda: board.add(f"loops/{member}", 1))
        self._board = board.part(f"loop{number}")
        self.members = MemberStore(self._board)
        self._decided: Record | None = None  # the next epoch, where this one is over
        self._epoch: Epoch | None = None
        self._needs: Needs | None = None
        self._num_answered = 0  # questions to join
        self._asked_at = self._last_round_at = time.monotonic()
        self._gap_s = 0.0  # between two rounds
        self._beats: dict[str, tuple[int, float]] = {}  # by machine: how many there were, and since when
        self._retired: list[tuple[float, dist.ProcessGroup]] = []  # groups of epochs before, and since when
        self._is_over = False  # the run
        self.slowest_bps = float(_SLOWEST_BPS)
        self._num_failed = 0  # epochs that did not come about, one after the other

    # ---- what an outer loop asks

    def enter(self, needs: Needs) -> Epoch:
        self._needs = needs
        record = from_first(self._share_group, lambda: self._next(needs))
        if record == self.record and self._epoch is not None:
            return self._epoch
        self.record, self._epoch, self._decided = record, None, None
        if self.member in record.newcomers:
            self.joined = record.number
        from_first(self._share_group, lambda: self._await_ready(record))
        watch = _EpochWatch(self, record, _CONNECT_S * 2**self._num_failed)
        board = self._board.part(f"e{record.number}")
        rank, size = record.ids.index(self.member), len(record.ids)
        group = EpochGroup(board, f"c{self.island.rank}", rank, size, watch)
        newcomers = [record.ids.index(one) for one in record.newcomers]
        epoch = open_epoch(record.number, record.ids, group, self.island, needs, newcomers)
        self._epoch = replace(epoch, lost=record.lost)
        self._num_failed = 0
        if self.island.rank == 0:
            self.notes.note("in", self.member)
            if rank == 0:
                self.members.forget_before(record.number)
        return self._epoch

    def is_awaited(self) -> bool:
        now = time.monotonic()
        self._gap_s, self._last_round_at = now - self._last_round_at, now
        self._retired = [(since, group) for since, group in self._retired if now < since + _RETIRED_S]
        is_first = self.record is not None and self.record.ids[0] == self.member and self.island.rank == 0
        if not is_first or now < self._asked_at + _ASK_S:
            return False
        self._asked_at = now
        with suppress(Unreachable):
            return self.members.num_applied() > self._num_answered and bool(self._waiting())
        return False

    def agree(self, num_votes: int, complete: Mapping[int, int]) -> dict[int, int]:
        self._end_island_waits()
        everyone = gather_object(self._share_group, [dict(complete)])
        least = {vote: min(one.get(vote, ALL) for one in everyone) for vote in set().union(*everyone)}
        record = self._decided = from_first(self._share_group, lambda: self._settled(num_votes, least, True))
        if self.member not in record.ids:
            return dict.fromkeys(complete, 0)
        return {vote: ALL if vote < record.past else record.common.get(vote, 0) for vote in complete}

    def lost(self, failure: RankFailure) -> None:
        if self._is_over or self._needs is None:
            raise failure
        needs, self._num_failed = self._needs, self._num_failed + (self._epoch is None)
        if self._decided is None and self.record is not None:
            self._end_island_waits()
            has_state = needs.has_state and self.member not in self.record.newcomers
            self._decided = from_first(self._share_group, lambda: self._settled(needs.num_votes, {}, has_state))
        self._epoch = None

    def retire(self, group: dist.ProcessGroup) -> None:
        """Let go of a process group, when no thread of gloo's is busy with it any more."""
        self._retired.append((time.monotonic(), group))

    def end(self, reason: str) -> None:
        if self._retired:
            time.sleep(_RELEASE_S)
            self._retired.clear()
        if self.island.rank == 0:
            with suppress(Unreachable):
                self.notes.note("left", self.member, reason or "done")

    # ---- who is in the next epoch; one rank of each replica decides

    def _next(self, needs: Needs) -> Record:
        record = self._decided or self.record
        if record is None or self.member not in record.ids or not (needs.has_state or self._decided):
            return self._apply(needs.has_state)
        if self._decided is None and needs.admits:
            return self._admitting(record, needs.num_votes)
        return record

    def _apply(self, has_state: bool) -> Record:
        """Ask to be let in, and wait for it; where there are no members, make the first epoch with others that wait."""
        last = 0 if self.record is None else self.record.number
        self.members.apply(Applicant(self.member, last, has_state))
        began = time.monotonic()
        while True:
            record = self.members.record()
            if record is not None and record.number > last and self.member in record.ids:
                return record
            asked = self.members.applicants(0)
            if record is None or not self._is_alive(record, asked.values()):
                there = {
                    one.member: one.has_state for one in asked.values() if not self.notes.noted("gone", one.member)
                }
                is_full = len(there) >= self._expected or time.monotonic() - began > self.grace_s
                if is_full and len(there) >= self._least:
                    ids = sorted(there, key=lambda one: (not there[one], one))
                    newcomers = tuple(ids[1:]) if there[ids[0]] else ()
                    new = Record(1 if record is None else record.number + 1, self.member, tuple(ids), newcomers)
                    if self.members.replace(record, new):
                        self.members.forget_applicants(asked)
                        self.notes.tell(f"epoch {new.number}: training begins with {counted(len(new.ids), 'replica')}")
            time.sleep(_JOIN_S)

    def _is_alive(self, record: Record, asked: Iterable[Applicant]) -> bool:
        """Whether an epoch has members that can let others in; RankFailure where they have done their work."""
        came_back = {one.member for one in asked if one.last >= record.number}
        left = {one: self.notes.noted("left", one) for one in record.ids}
        if "done" in left.values():
            self._is_over = True
            raise RankFailure("The run has ended: the others have done their work. Nothing is left to join.")
        return not all(left[one] or one in came_back or self.notes.noted("gone", one) for one in record.ids)

    def _waiting(self) -> dict[int, int]:
        """Return the ids of those that wait to be let in, by the number of their question."""
        asked = self.members.applicants(self._num_answered)
        here = () if self.record is None else self.record.ids
        waiting = {number: one.member for number, one in asked.items() if one.member not in here}
        waiting = {number: one for number, one in waiting.items() if not self.notes.noted("gone", one)}
        if not waiting and asked:
            self._num_answered = max(asked)
        return waiting

    def _admitting(self, record: Record, num_votes: int) -> Record:
        """Return the next epoch, with those that wait, as one of the members decides it: all come here together."""
        waiting = self._waiting()
        newcomers = tuple(sorted(set(waiting.values())))[: self.most - len(record.ids)]
        new = Record(record.number + 1, self.member, record.ids + newcomers, newcomers, past=num_votes)
        if not self.members.replace(record, new):
            found = self.members.record()
            assert found is not None
            return found
        self.members.forget_applicants(number for number, one in waiting.items() if one in newcomers)
        names = ", ".join(map(self.notes.name_of, newcomers))
        if newcomers:
            self.notes.tell(f"epoch {new.number}: {names} joined; {counted(len(new.ids), 'replica')} train")
        return new

    def _settled(self, num_votes: int, complete: Mapping[int, int], has_state: bool) -> Record:
        """Meet those that are left of an epoch, and return the next one; RankFailure without a store to decide it."""
        record = self.record
        assert record is not None
        said = repr({"votes": num_votes, "complete": dict(complete), "has_state": has_state})
        began = time.monotonic()
        try:
            self.members.mark_broken(record.number, "members were lost")
            self.members.say(record.number, "post", self.member, said)
            asked = 0.0
            while True:
                now = self.members.record()
                assert now is not None
                if now.number > record.number:
                    return now
                is_complete = self.members.have_said(record.number, "post", record.ids)
                if is_complete or time.monotonic() > asked + _CAUSES_S:
                    asked = time.monotonic()
                    posts = {one: literal_eval(text) for one, text in self._said(record, "post").items()}
                    absent = {one: self.cause(one, asked - began) for one in record.ids if one not in posts}
                    if all(absent.values()):
                        self._decide(record, posts, absent)
                        continue
                time.sleep(_POLL_S)
        except Unreachable:
            raise RankFailure(
                "A replica was lost, and those that are left can't agree on who goes on, as the run's store is gone "
                "too: the launcher that serves it has probably ended. Start the run again from its newest checkpoint."
            ) from None

    def _decide(self, record: Record, posts: Mapping[int, Any], absent: Mapping[int, str]) -> None:
        """Make those that have come the next epoch, unless another one was quicker."""
        ids = tuple(one for one in record.ids if one in posts and posts[one]["has_state"])
        ids = ids or tuple(one for one in record.ids if one in posts)  # nobody has anything yet, so all begin anew
        complete = {one: posts[one]["complete"] for one in ids}
        common = {}
        for vote in set().union(*complete.values()):
            have = [complete[one].get(vote, ALL if vote < posts[one]["votes"] else 0) for one in ids]
            has_passed = any(vote not in complete[one] and vote < posts[one]["votes"] for one in ids)
            common[vote] = ALL if has_passed else min(have)
        new = Record(record.number + 1, self.member, ids, common=common, lost=dict(absent))
        if self.members.replace(record, new):
            left = counted(len(ids), "replica")
            for one, why in absent.items():
                name = self.notes.name_of(one)
                self.notes.tell(f"epoch {new.number}: {name} is out: {why}; training goes on with {left}")
            if not absent:
                why = self.members.broken(record.number)
                self.notes.tell(f"epoch {new.number}: {left} connected anew ({why})")

    def _await_ready(self, record: Record) -> None:
        """Wait until all members of an epoch have come to it; RankFailure where one was lost."""
        began = asked = time.monotonic()
        self.members.say(record.number, "ready", self.member, "1")
        while not self.members.have_said(record.number, "ready", record.ids):
            time.sleep(_POLL_S)
            if time.monotonic() < asked + _CAUSES_S:
                continue
            asked, come = time.monotonic(), self._said(record, "ready")
            causes = {one: self.cause(one, asked - began) for one in record.ids if one not in come}
            found = [f"{self.notes.name_of(one)}: {why}" for one, why in causes.items() if why]
            now = self.members.record()
            if now is not None and now.number > record.number:
                found.append("the others have gone on")
            if found:
                raise RankFailure("; ".join(found))

    def _said(self, record: Record, what: str) -> dict[int, str]:
        return self.members.said(record.number, what, record.ids)

    def cause(self, member: int, waited_s: float) -> str:
        """Return why there is no more waiting for a member that has not come; empty while there is."""
        if ended := self.notes.noted("gone", member):
            return ended
        if left := self.notes.noted("left", member):
            return "its work is done" if left == "done" else left
        if silent_s := self.silent_s(member):
            return f"its machine gave no sign for {in_seconds(silent_s)}"
        if self.record is not None and self.members.said(self.record.number, "late", [member]):
            return f"it was late by more than {in_seconds(self.grace_s)}"
        if waited_s > self.grace_s and self.notes.noted("stopped", member):
            return f"its process is stopped, and {in_seconds(self.grace_s)} are over"
        if waited_s > self.grace_s + self._gap_s:
            return f"it did not come within {in_seconds(waited_s)}"
        return ""

    def silent_s(self, member: int) -> float:
        """Return for how long the launcher of a member has given no sign, if that is too long; else 0."""
        machine = self.notes.noted("machine", member)
        if not machine:
            return 0.0
        count, now = self.notes.count(f"beat/{machine}"), time.monotonic()
        before, since = self._beats.get(machine, (-1, now))
        self._beats[machine] = (count, since if count == before else now)
        silent = now - self._beats[machine][1]
        return silent if silent > _BEAT_LOST_S else 0.0

    def _end_island_waits(self) -> None:
        """Let the other ranks of the replica, who may wait for this one in a round, come here too."""
        if self.island.size > 1:
            self.island.leave("its replica goes on without one that was lost")


class _EpochWatch:
    """Looks for what ends a wait in an epoch: one that is gone, one that is late, values that never come."""

    def __init__(self, elastic: Elastic, record: Record, connect_s: float) -> None:
        self.connect_s = connect_s
        self._elastic, self._record = elastic, record
        self._num_ends = -1

    def look(self, entered: Entered, waited_s: float) -> None:
        with suppress(Unreachable):  # without a store the epoch goes on as long as all are there
            if why := self._why_over(entered, waited_s):
                raise self.break_off(why)

    def _why_over(self, entered: Entered, waited_s: float) -> str:
        elastic, number = self._elastic, self._record.number
        if why := elastic.members.broken(number):
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
            if silent_s := elastic.silent_s(one):
                return f"{elastic.notes.name_of(one)}: its machine gave no sign for {in_seconds(silent_s)}"
        name = ", ".join(map(elastic.notes.name_of, late))
        if late and waited_s > elastic.grace_s:
            for one in late:
                elastic.members.say(number, "late", one, "1")
            return f"{name}: late by more than {in_seconds(elastic.grace_s)}"
        if not late and waited_s > elastic.grace_s + entered.nbytes / elastic.slowest_bps:
            return f"no values came for {in_seconds(waited_s)}, though all wait for them"
        return ""

    def note_end(self, entered: Entered, waited_s: float) -> None:
        if entered.nbytes >= _MEASURED_BYTES:
            self._elastic.slowest_bps = entered.nbytes / waited_s / _SLOWER

    def retire(self, group: dist.ProcessGroup) -> None:
        self._elastic.retire(group)

    def break_off(self, reason: str) -> RankFailure:
        with suppress(Unreachable):
            self._elastic.members.mark_broken(self._record.number, reason)
        return RankFailure(f"The epoch of these replicas is over: {reason}.")
