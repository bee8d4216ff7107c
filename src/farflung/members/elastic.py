# SPDX-License-Identifier: Apache-2.0
"""Replicas that come and go: a membership whose generations are decisions on one board.

A member that is lost, or late for too long, breaks the generation: each of the others closes its connections, records
on the board how far its rounds have come, and waits until all survivors have done so. One of them then decides on the
next generation, and all follow it. Newcomers ask on the board; the votes of a round notify all members of them at the
same point.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from farflung.address.member_store import DONE, Ask, LauncherNotes, Post, Record
from farflung.address.objects import ObjectBoard
from farflung.address.transport import Transport
from farflung.base.errors import CollectiveMismatch, RankFailure, Unreachable
from farflung.base.events import Event, Kind
from farflung.comm.collectives import from_first, gather_object
from farflung.comm.exchange import Exchange
from farflung.comm.group import Group, SoloGroup
from farflung.members.admission import Admission
from farflung.members.generation_watch import GenerationWatch
from farflung.members.leaving import LeavingOnSignal
from farflung.members.peers import Peers, description_of, versions
from farflung.members.saver import Saver
from farflung.members.settlement import await_ready, settle
from farflung.members.transfers import Transfers
from farflung.votes.generation import ALL, Generation, Needs, Reached, open_generation

_ASK_S = 0.5  # how often a member looks who asks to be admitted, at most
_CONNECT_S = 2.0
_DISPUTES = 3  # undecided ones in a row, after which members that accuse each other end
_PAUSES = 4  # of the board, between two looks whether the last state was written


class Elastic:
    """Membership of replicas that may fail, leave or join at any time.

    Args:
        transport: how they meet, such as `C10dTransport(store)` over a c10d store that all members and launchers share.
        member: this replica's id, which no other has had; the launcher gives it.
        expected: how many replicas the first generation waits for.
        least: the number that suffices after `grace_s` seconds.
        most: how many there will be at most.
        grace_s: how many seconds the others wait for a replica that is late before they continue without it. None: 30,
            or twice the time between the latest two rounds if that is longer.
        state_every: rounds lost at most if all replicas die, provided that records outlive them. None: see `Saver`.
        island: the ranks that train this replica.

    Attributes:
        data: a description of the data, set before the first generation, which must be the same on all replicas.
        joined: the number of the generation that it entered as a newcomer; 0 if it belonged to the first one.
        round_listeners: called when a round begins, before anything is sent.
        has_kept: it had been a member before that, and has kept its steps since its last round.
    """

    is_fixed = False

    def __init__(
        self,
        transport: Transport,
        member: int,
        *,
        expected: int = 1,
        least: int = 1,
        most: int = 64,
        grace_s: float | None = None,
        state_every: int | None = None,
        island: Group | None = None,
    ) -> None:
        self.island, self.member, self.most = island or SoloGroup(), member, most
        self.data, self.joined, self.has_kept = list[str](), 0, False
        self.round_listeners: list[Callable[[], None]] = []
        self._transport = transport
        self._share_group = Exchange(self.island.duplicate())
        number = from_first(self._share_group, lambda: LauncherNotes(transport.board).number_of_loop(member))
        self.peers = Peers(transport, f"loop{number}", grace_s)
        board = transport.board.part(self.peers.loop)
        # What the first members write to the run's address, where it stays.
        self.saver: Saver | None = None
        if transport.is_lasting and isinstance(board, ObjectBoard):
            self.saver = Saver(transport.board, board, self._share_group, state_every)
        self._versions = versions()
        self._admission = Admission(self.peers, member, self.saver, expected, least, most)
        self._decided: Record | None = None  # the next generation, if this one is over
        self._generation: Generation | None = None
        self._needs: Needs | None = None
        self._check_at = time.monotonic()  # whether the run is still there
        self._look_at = time.monotonic()  # who asks to be admitted
        self._num_failed = 0  # generations that did not come about, one after the other
        self._is_unapplied = False  # nobody has applied what it had on the way when it was left out last
        self._transfers = Transfers(transport, self.peers, member, self.island, self._share_group, self.saver)
        self._asking: dict[str, Ask] = {}  # who may be admitted, when the first member looked last

    @property
    def record(self) -> Record | None:
        """The generation that this replica is in, or was in last."""
        return self.peers.record

    @property
    def loop(self) -> str:
        """The name of the outer loop, the same on all replicas."""
        return self.peers.loop

    def keep_logs(self, names: Sequence[str], landed_in: Callable[[bytes], tuple[int, int]]) -> None:
        """Make the values of logs of the run, which may become more, part of the state at its address.

        Args:
            landed_in: returns the latest round, as its generation and its vote, that a value may know of.
        """
        if self.saver is not None:
            self.saver.logs, self.saver.landed_in = names, landed_in

    def enter(self, needs: Needs) -> Generation:
        self._needs, peers = needs, self.peers
        given: Mapping[str, Any] = {}
        with self._transfers.receiving() if self._must_ask(needs) else nullcontext() as receiver:
            record = from_first(self._share_group, lambda: self._next(needs))
            if self.member not in record.ids:
                raise RankFailure("the others have entered a later generation without this replica")
            peers.record, peers.is_admitting = record, bool(record.newcomers)
            self._generation, self._decided = None, None
            # Others still wait: without the next look, a round that is repeated would stop their transfers.
            self._asking = {name: one for name, one in self._asking.items() if one.member not in record.ids}
            if receiver is not None and self.member in record.newcomers:
                self.joined, self.has_kept = record.number, needs.may_keep and self._is_unapplied
                if self.saver is not None and record.saved:
                    given = self.saver.given(record.saved)
                else:
                    given = self._transfers.receive(receiver, record)
            elif record.newcomers and self.member == record.giver:
                self._transfers.finish(record, needs.state)
        if layout := given.get("place", {}).get("layout"):
            needs = needs.aligned(layout)
        from_first(self._share_group, lambda: await_ready(peers, self.member, record))
        connect_s = min(_CONNECT_S * 2**self._num_failed, peers.grace_s)
        watch = GenerationWatch(peers, self.member, self.island, record, connect_s)
        rank, size = record.ids.index(self.member), len(record.ids)
        name = f"{peers.loop}/g{record.number}/c{self.island.rank}"
        group = self._transport.connect(name, rank, size, watch)
        newcomers = [record.ids.index(newcomer) for newcomer in record.newcomers]
        generation = open_generation(
            record.number, record.ids, group, self.island, needs, newcomers, is_fresh=record.is_fresh
        )
        self._transfers.stop(record.newcomers)
        keeps = bool(given) and self.has_kept
        self._generation = replace(generation, lost=record.lost, may_lose=True, given=given, keeps=keeps)
        self._num_failed = 0
        from_first(self._share_group, lambda: self._note_entry(record))
        return self._generation

    def _note_entry(self, record: Record) -> None:
        self.peers.notes.put("in", self.member)
        if record.ids[0] == self.member:
            if self.saver is not None:
                self.saver.note_generation(record.number)
            self.peers.members.forget_before(record.number, self._transfers.names)

    def is_awaited(self, needs: Needs) -> bool:
        self.peers.note_round()
        for listener in self.round_listeners:
            listener()
        if self.record is None or self.record.ids[0] != self.member:
            return False
        asking = from_first(self._share_group, lambda: self._look(needs))
        ready = self._transfers.serve([one.member for one in asking.values()], needs.state)
        if not needs.overlaps:
            self._transfers.pause()
        try:
            names = [name for name, one in asking.items() if one.member in ready and self.island.rank == 0]
            self.peers.at_once.board.map(self.peers.at_once.mark_ready, names)
        except Unreachable:
            return False
        return bool(ready)

    def landed(self, needs: Needs, vote: int) -> None:
        self._needs = needs
        with suppress(Unreachable):
            for event in self.peers.notes.strangers():
                self.peers.notes_soon.send(event)
        if self.saver is not None and self.record is not None:
            self.saver.description = self._description(needs)
            is_first = self.record.ids[0] == self.member
            self.saver.note_round((self.record.number, vote), needs, is_first)

    def offer(self, parts: Callable[[], Mapping[str, Any]]) -> None:
        self._transfers.offer(parts)

    def _look(self, needs: Needs) -> dict[str, Ask]:
        """Return the replicas that may be admitted, by the name of their question, as the last look has found them."""
        now = time.monotonic()
        if now >= self._look_at and self.record is not None:
            try:
                there = self.peers.at_once.has_asks()
                if is_due := now >= self._check_at:
                    self._check_at = now + self._transport.board.heartbeat_s
                    self.peers.check()
                # It may have vanished, or be a later one, whose members admit others.
                if (there or is_due) and self.peers.at_once.current().number > self.record.number:
                    there = False
                asking = self._admission.waiting(self.record, self._description(needs), needs) if there else {}
                self._asking = dict([*asking.items()][: max(0, self.most - len(self.record.ids))])
            except Unreachable as error:
                if error.is_gone and self.saver is not None:
                    raise
            took_s = time.monotonic() - now
            self._look_at = now + max(_ASK_S, 10 * took_s)  # seldom, if the board gives no answer
        return self._asking

    def agree(self, num_votes: int, here: Reached, odd: Mapping[int, str]) -> Reached:
        self._end_island_waits()
        mine = dict(here.complete), dict(odd), here.acts, here.in_act
        everyone, seen, acts, in_act = zip(*gather_object(self._share_group, [mine]), strict=True)
        least = {vote: min(one.get(vote, ALL) for one in everyone) for vote in set().union(*everyone)}
        found = {one: why for some in seen for one, why in some.items()}
        post = Post(num_votes, True, least, found, max(acts), any(in_act))
        record = self._decided = self._settled(post)
        if self.member not in record.ids:
            self._is_unapplied = bool(least) and self._know_unapplied(least)
            return Reached(dict.fromkeys(here.complete, 0))
        common = {vote: ALL if vote < record.past else record.common.get(vote, 0) for vote in here.complete}
        return Reached(common, record.acts)

    def lost(self, failure: RankFailure) -> None:
        if self._admission.is_over or self._needs is None:
            raise failure
        needs, self._num_failed = self._needs, self._num_failed + (self._generation is None)
        if self._decided is None and self.record is not None:
            self._end_island_waits()
            has_state = needs.has_state and self.member not in self.record.newcomers
            # Nobody has come out of a generation that did not come about, or trains in it.
            self._decided = self._settled(Post(needs.num_votes, has_state), trains=self._generation is not None)
            if self._decided.is_fresh and from_first(self._share_group, lambda: self._admission.found() is not None):
                self.peers.record, self._decided = self._decided, None  # it asks, and begins with what was saved
            elif has_state and self.member not in self._decided.ids:
                self._is_unapplied = self._know_unapplied(())
        if self.record is not None:
            self._transfers.stop(self.record.newcomers)
        self._generation = None

    def expect_round(self, seconds: float) -> None:
        self.peers.expect_round(seconds)

    def agreed(self, text: str, waits: bool = True) -> str:
        board = self._transport.board.part(self.peers.loop)
        board = board if waits else board.patient(0)

        def first() -> str:
            if text:
                board.put_new("agreed", text.encode())
            return (board.get("agreed") or b"").decode()

        return from_first(self._share_group, first)

    def leaving(self) -> LeavingOnSignal:
        # This round is early, so members that have not reached it are not late: wait half of the grace period.
        silent_s = self._transport.board.silent_s
        return LeavingOnSignal(self.peers.grace_s / 2, self.island, self.peers.loop, silent_s)

    def end(self, reason: str, is_alone: bool = False) -> None:
        self._transfers.close()
        needs, saver, record = self._needs, self.saver, self.record
        is_alone = is_alone and self.island.size > 1  # the others may not come to a collective
        has_all = needs is not None and (not reason or needs.is_shared())
        if saver is not None and record is not None and needs is not None and has_all:
            is_first = record.ids[0] == self.member
            writes = partial(self._writes_last, saver, record, reason)
            if is_first if is_alone else from_first(self._share_group, writes):
                saver.finish(record.number, self.member, needs, is_last=not reason, is_alone=is_alone)
        self._transport.close()
        if not is_alone:
            from_first(self._share_group, lambda: self._note_left(reason))
        elif self.island.rank == 0:
            self._note_left(reason)

    def note(self, kind: Kind, member: int, **facts: Any) -> None:
        notes = self.peers.notes_soon
        with suppress(Unreachable):
            if self.island.rank == 0:
                notes.send(Event.now(kind, notes.name_of(member), **facts))

    def note_weights(self, digest: int) -> None:
        if self.island.rank == 0:
            with suppress(Unreachable):
                self.peers.notes_soon.put("weights", self.member, f"{self.peers.loop} {digest}")

    def _note_left(self, reason: str) -> None:
        if not self._admission.is_over:
            notes = self.peers.notes_soon if reason else self.peers.notes  # who is interrupted waits for no store
            with suppress(Unreachable):
                notes.leave_loop(self.peers.loop, self.member, reason or DONE)

    def _writes_last(self, saver: Saver, record: Record, reason: str) -> bool:
        """Return whether this replica writes the last state: no member before it does.

        At the end of the run each waits until those before it have written it, or can't do so any more. One that leaves
        a run for a `reason` waits for nobody: the others continue.
        """
        heartbeats, began = self.peers.heartbeats, time.monotonic()
        try:
            while before := [one for one in record.ids[: record.ids.index(self.member)] if not heartbeats.ended(one)]:
                is_late = time.monotonic() > began + self.peers.grace_s
                if is_late and all(map(heartbeats.missing, before)):
                    break
                if reason or saver.has_last(record.number):
                    return False
                time.sleep(_PAUSES * self.peers.pause_s)
            return bool(reason) or not saver.has_last(record.number)
        except Unreachable:  # each keeps it elsewhere, as in a round
            return True

    def _next(self, needs: Needs) -> Record:
        """Return the current generation, as one rank of each replica finds or decides it."""
        record = self._decided or self.record
        if record is None or self._must_ask(needs):
            has_state = needs.has_state and (record is None or self.member not in record.odd)
            return self._admission.ask(has_state, self._description(needs), needs)
        if self._decided is None and needs.admits:
            return self._admission.admit(record, self._description(needs), needs)
        return record

    def _must_ask(self, needs: Needs) -> bool:
        """Return whether this replica is in no generation, or can't continue in it."""
        record = self._decided or self.record
        return record is None or self.member not in record.ids or not (needs.has_state or self._decided)

    def _settled(self, post: Post, trains: bool = True) -> Record:
        record = from_first(self._share_group, lambda: settle(self.peers, self.member, post, trains))
        if record.disputes >= _DISPUTES and post.odd:
            names = " and ".join(map(self.peers.notes.name_of, sorted({self.member, *post.odd})))
            raise CollectiveMismatch(
                f"{names} have come to different calls in {_DISPUTES} generations in a row, without a majority for "
                f"either: {'; '.join(post.odd.values())}. Start them with the same script, model and recipe."
            )
        return record

    def stranded(self, error: Unreachable) -> Exception:
        how = "Start the run again from its newest checkpoint."
        if self.saver is not None and self._needs is not None and self._needs.has_state:
            how = self.saver.keep_here(self.member, self._needs)
        return RankFailure(f"The replicas can't agree on how to continue, as the run's store is gone. {error} {how}")

    def _know_unapplied(self, votes: Iterable[int]) -> bool:
        """Return whether those that left this replica out have applied nothing of its open rounds, as records show."""

        def find() -> bool:
            number = 0 if self.record is None else self.record.number
            while (record := self.peers.members.record_of(number := number + 1)) is not None:
                ended = max(record.past, record.ended)
                if any(record.common.get(vote, vote < ended) > 0 for vote in votes):
                    return False
                if self.member not in record.ids:
                    return self.member not in record.odd
            return False

        return from_first(self._share_group, find)

    def _description(self, needs: Needs) -> str:
        return description_of(needs, self.island.size, self.data, self._versions)

    def _end_island_waits(self) -> None:
        """End the waits of the replica's other ranks for this one in a round, so that they come here too."""
        if self.island.size > 1:
            self.island.leave("its replica continues without one that was lost")
