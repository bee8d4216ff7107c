# SPDX-License-Identifier: Apache-2.0
"""Newcomers get the state that members share from the first member, each rank of an island from its counterpart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from farflung.address.member_store import Record
from farflung.address.state_transfer import StateReceiver, StateSender, TransferWatch
from farflung.address.transport import Transport
from farflung.base.errors import RankFailure, Unreachable
from farflung.comm.collectives import gather_object
from farflung.comm.exchange import Exchange
from farflung.comm.group import Group
from farflung.members.peers import Peers
from farflung.members.saver import Saver

_REPORT_S = 0.5  # how often a newcomer says how much has come
_CLOSE_S = 1.0
_LOOK_S = 0.1  # how often it asks whether the giver is still there


class Transfers:
    """The transfers of one replica: to newcomers, or to itself.

    Args:
        share_group: the ranks of `island`.
        saver: finds what lies at the run's address, which a newcomer takes first; None: nothing does.
    """

    def __init__(
        self, transport: Transport, peers: Peers, member: int, island: Group, share_group: Exchange, saver: Saver | None
    ) -> None:
        self._saver = saver
        self._transport, self._peers, self._member = transport, peers, member
        self._island, self._share_group = island, share_group
        self._senders: dict[int, StateSender] = {}  # by newcomer
        self._names: dict[int, str] = {}  # of their transfers
        self._num_begun = 0

    # ---- of the first member

    def serve(self, newcomers: Sequence[int], state: Callable[[bool], Mapping[str, Any]]) -> list[int]:
        """Send the state to these newcomers and no others; return those that may be admitted with the next round."""
        self.stop(self._senders.keys() - newcomers)
        self._begin([newcomer for newcomer in newcomers if newcomer not in self._senders], state)
        mine = [(self._senders[newcomer].is_over, self._senders[newcomer].may_finish) for newcomer in newcomers]
        by_newcomer = zip(*gather_object(self._share_group, [mine]), strict=True) if newcomers else ()
        ready = []
        for one, said in zip(newcomers, by_newcomer, strict=True):
            if any(is_over for is_over, _ in said):
                self.stop([one])  # the next call starts again
            elif all(may_finish for _, may_finish in said):
                ready.append(one)
        return ready

    @property
    def names(self) -> list[str]:
        """Names of the transfers under way, which keys of their objects begin with."""
        return [self._names[newcomer] for newcomer in self._senders]

    def pause(self) -> None:
        """Leave the line to a round, until the next `offer`."""
        for sender in self._senders.values():
            sender.pause()

    def offer(self, parts: Callable[[], Mapping[str, Any]]) -> None:
        """Send parts of the state that have changed."""
        found = parts() if self._senders else {}
        for sender in self._senders.values():
            sender.offer(found)

    def finish(self, record: Record, state: Callable[[bool], Mapping[str, Any]]) -> None:
        """Send those that have been admitted all that is left, in the background."""
        there = {newcomer for newcomer, sender in self._senders.items() if not sender.is_over}
        self._begin([newcomer for newcomer in record.newcomers if newcomer not in there], state)
        place = state(False)
        for newcomer in record.newcomers:
            self._senders[newcomer].finish(place)

    def stop(self, newcomers: Iterable[int]) -> None:
        there = [newcomer for newcomer in newcomers if newcomer in self._senders]
        for newcomer in there:
            self._senders.pop(newcomer).stop()
        board = self._peers.at_once

        def end(newcomer: int) -> None:
            with suppress(Unreachable):
                if board.transfer(newcomer, 0) == (self._names[newcomer], self._member):  # not yet another giver's
                    board.end_transfer(newcomer)

        board.board.map(end, there)

    def close(self) -> None:
        """End all transfers, and wait a moment for their threads."""
        there = [*self._senders.values()]
        self.stop([*self._senders])
        for one in there:
            one.join(_CLOSE_S)

    def _begin(self, newcomers: Sequence[int], state: Callable[[bool], Mapping[str, Any]]) -> None:
        record, found, board = self._peers.record, state(True) if newcomers else {}, self._peers.at_once
        for newcomer in newcomers:
            assert record is not None
            self._num_begun += 1
            name = f"g{record.number}/t{newcomer}.{self._num_begun}"  # alike on all ranks
            self._names[newcomer] = name
            self._senders[newcomer] = StateSender(partial(self._connected, name, 0, newcomer))
            self._senders[newcomer].offer(found)

        def begin(newcomer: int) -> None:
            with suppress(Unreachable):  # or else it fails, for want of a receiver, and the next call starts again
                board.begin_transfer(newcomer, self._names[newcomer], self._member)

        board.board.map(begin, newcomers if self._island.rank == 0 else ())

    def _connected(self, name: str, rank: int, other: int, is_over: Callable[[], bool]) -> Group:
        watch = TransferWatch(self._peers.heartbeats.over(self._peers.notes), other, is_over)
        return self._transport.connect(f"{self._peers.loop}/{name}/c{self._island.rank}", rank, 2, watch)

    # ---- of a newcomer

    @contextmanager
    def receiving(self) -> Iterator[StateReceiver]:
        """Receive a state from whichever member sends one, while this replica waits for admission."""
        peers = self._peers
        last = 0 if peers.record is None else peers.record.number
        receiver = StateReceiver(
            lambda: peers.at_once.transfer(self._member, last),
            lambda name, giver, is_over: self._connected(name, 1, giver, is_over),
            4 * peers.pause_s,
            dict if self._saver is None else self._saver.tensors,
            is_shown=self._island.rank == 0,
        )
        try:
            yield receiver
        finally:
            receiver.stop(_CLOSE_S)

    def receive(self, receiver: StateReceiver, record: Record) -> dict[str, Any]:
        """Return the state, once all of it has come to all ranks of the island; RankFailure if its giver is lost."""
        try:
            why = self._awaited(receiver, record)
        except Unreachable as error:  # of this rank, while the others may wait for it
            why = str(error)
        for said in gather_object(self._share_group, [why]):
            if said:
                raise RankFailure(said)
        return receiver.state

    def _awaited(self, receiver: StateReceiver, record: Record) -> str:
        """Wait for the state; return why it does not come, or an empty text."""
        peers, num_bytes = self._peers, -1
        changed_at = reported_at = time.monotonic()
        while not receiver.wait(_LOOK_S):
            now = time.monotonic()
            if receiver.num_bytes != num_bytes:
                num_bytes, changed_at = receiver.num_bytes, now
                if self._island.rank == 0 and now > reported_at + _REPORT_S:
                    reported_at = now
                    peers.members.put(record.number, "progress", self._member, str(num_bytes))
            if why := peers.cause(record.giver, now - changed_at):
                return f"{peers.notes.name_of(record.giver)}, which was to give the trained state: {why}"
            if peers.members.current().number > record.number:
                return "the others have entered a later generation"
        return ""
