# SPDX-License-Identifier: Apache-2.0
"""How replicas come into a run: they ask to be admitted, and members admit those that are like them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from farflung.address.member_store import LATE, Ask, Record
from farflung.address.saved_state import Saved
from farflung.base.causes import Cause
from farflung.base.errors import ConfigError, RankFailure
from farflung.base.events import Event, Kind
from farflung.base.words import counted, in_seconds
from farflung.comm.patience import waiting
from farflung.members.peers import Peers, other_versions, unlike, unlike_tensors
from farflung.members.saver import Saver
from farflung.votes.generation import Needs

_logger = logging.getLogger(__name__)

_PAUSES = 4  # of the board, between two looks whether this replica is admitted
_ASK_S = 0.5  # how often one that asks looks who could admit it
_RUN_ENDED = (
    "The run has ended: the others have done their work. Nothing is left to join. If they train on, as in a second fit "
    "of the script, a process that starts again can't follow them there."
)
_ENDED_LATER = (
    "All replicas have ended in a later outer loop than this one, as in a second fit of the script. A process that "
    "starts again begins with the first, whose work is done. Start the script at another address, from a checkpoint."
)
_LONGEST_PAUSE_S = 60.0  # before one that was late several times asks again


class Admission:
    """Both sides of an admission: replicas that ask for it, and the members that grant it.

    Args:
        saver: finds what lies at the run's address; None: nothing outlives the replicas.
        expected, least, most: see `Elastic`.
    """

    def __init__(self, peers: Peers, member: int, saver: Saver | None, expected: int, least: int, most: int) -> None:
        self._saver = saver
        self._peers, self._notes, self._members = peers, peers.notes, peers.members
        self._member, self._expected, self._least, self._most = member, expected, least, most
        self.is_over = False  # the run had ended before this replica was admitted

    # ---- of one that asks

    def ask(self, has_state: bool, description: str, needs: Needs) -> Record:
        """Ask to be admitted, and wait; if no member is left to admit it, begin with others that ask.

        Raises:
            ConfigError: this replica is not like the members.
            RankFailure: the run has ended; or the replicas that hold the trained state send no heartbeat.
        """
        peers = self._peers
        last = 0 if peers.record is None else peers.record.number
        mine = Ask(self._member, last, has_state, description)
        began = quiet_since = time.monotonic()
        question, looked_at, told, pause_s = "", 0.0, "", late_pause_s(self._notes.num_lates(self._member))
        few = ""
        pauses = waiting(_PAUSES * peers.pause_s, say=lambda waited_s: self._tell_few(few, waited_s))
        while True:
            next(pauses)
            record = self._members.record()
            if record is not None and record.number > last and self._member in record.ids:
                self._heed(question)
                return record
            now = time.monotonic()
            if not question and now >= began + pause_s:
                question = self._members.ask(mine, needs.tensors, needs.could)
            if now >= looked_at + _ASK_S:
                peers.check()
                looked_at, asks = now, self._members.asks()
                self._heed(question)
                if question and question not in asks:  # it was admitted, and left out as it did not come
                    self._members.ask(mine, needs.tensors, needs.could)
                holders = {} if record is None else self._holders(record, asks.values(), now - began)
                quiet_since = quiet_since if holders and all(holders.values()) else now
                if now - quiet_since > peers.grace_s and self._found() is not None:
                    holders = {}  # there is what those have written of whom nothing is heard
                few = ""
                if not holders:
                    pause_s = 0.0
                    few = self._begin(record, asks, now - began)
                elif now - began > peers.grace_s:
                    told = self._tell_wait(holders, told)
                peers.await_holders(holders, now - quiet_since if holders else 0.0)

    def _holders(self, record: Record, asks: Iterable[Ask], waited_s: float) -> dict[int, str]:
        """Return members that may hold the trained state or begin now, and why they are silent; RankFailure at the end.

        If launchers start at the same moment, one replica begins and is not ready yet when others ask.
        """
        heartbeats = self._peers.heartbeats
        came_back = {ask.member for ask in asks if ask.last >= record.number} | {self._member}
        if any(self._notes.is_done_with(one, self._peers.loop) for one in record.ids):
            self.is_over = True
            self._notes.put("left", self._member, LATE)
            are_gone = all(self._notes.get("gone", one) or heartbeats.unheard(one) for one in record.ids)
            if are_gone and not all(self._notes.why_left(one) for one in record.ids):
                raise RankFailure(_ENDED_LATER, Cause.FAULT)
            raise RankFailure(_RUN_ENDED, Cause.RUN_ENDED)
        begins = record.is_fresh and waited_s < self._peers.grace_s
        there = [
            one
            for one in record.ids
            if one not in came_back and (self._peers.may_hold(record, one) or (begins and not heartbeats.missing(one)))
        ]
        holders = {one: heartbeats.missing(one) for one in there if not heartbeats.ended(one)}
        for ask in asks:  # it has state, and can't begin with us
            if ask.has_state and not heartbeats.ended(ask.member) and (why := heartbeats.unheard(ask.member)):
                holders[ask.member] = why
        return holders

    def _begin(self, record: Record | None, asks: Mapping[str, Ask], waited_s: float) -> str:
        """Make a generation of those that ask, as soon as there are enough: no other replica holds a trained state.

        Returns how many there are, in words, if they are too few.
        """
        heartbeats = self._peers.heartbeats
        there = [(name, one) for name, one in asks.items() if not heartbeats.ended(one.member)]
        there = [(name, one) for name, one in there if not heartbeats.unheard(one.member)]
        there.sort(key=lambda row: (not row[1].has_state, -row[1].last, row[1].member))
        saved = None if any(one.has_state for _, one in there) else self._found()
        mine = there[0][1].description if there else ""
        trained, could = self._members.tensors(there[0][0]) if there else ([], [])
        if saved is not None and self._saver is not None:  # which is the run's, whoever asks first
            mine, trained = saved.description or mine, self._saver.lines()
        fit = {one.member: name for name, one in there if self._fits(name, one, mine, trained, could)}
        if len(fit) < self._least or (len(fit) < self._expected and waited_s <= self._peers.grace_s):
            wanted = self._least if waited_s > self._peers.grace_s else self._expected
            return f"{counted(len(fit), 'replica')} of {wanted} {'is' if len(fit) == 1 else 'are'} there to begin"
        ids, has_state = tuple(fit), there[0][1].has_state
        number = 1 if record is None else record.number + 1
        before = 0 if record is None else record.began
        began = before if has_state or saved is not None else number
        new = Record(number, self._member, ids, ids[1:] if has_state else (), began=began)
        state: dict[str, int] = {}
        if saved is not None and self._saver is not None:
            new = replace(new, newcomers=ids, saved=saved.name)
            state = {"step": saved.position, "rounds_lost": self._saver.num_lost(saved)}
            if not self._saver.restore_logs(saved, lambda: self._members.record() == record):
                return ""
        if self._members.append(new):
            for name in fit.values():
                self._members.close(name)
            self._notes.send(Event.now(Kind.BEGAN, "", number, replicas=len(ids), **state))
        return ""

    def _found(self) -> Saved | None:
        """Return the newest state at the run's address, if one lies there."""
        return None if self._saver is None else self._saver.found()

    def _heed(self, question: str) -> None:
        """Act on the members' answer."""
        if question and (why := self._members.take_answer("refused", question)):
            raise ConfigError(
                f"This replica can't join the run: {why}. Start it with the settings and model of the run."
            )
        if question and (why := self._members.take_answer("differs", question)):
            _logger.warning(f"This replica differs from those that it has joined: {why}")

    def _tell_wait(self, holders: Mapping[int, str], told: str) -> str:
        """Print what this replica waits for, unless it has `told` so before; return that in a word."""
        what = "lost" if all(holders.values()) else "admission"
        if what != told:
            why = f"the others admit it with one of their next rounds, unless there are {self._most} already"
            why = self._peers.describe_missing(holders) if what == "lost" else why
            self._notes.send(Event.now(Kind.WAITS, self._notes.name_of(self._member), why=why))
        return what

    def _tell_few(self, few: str, waited_s: float) -> None:
        if few:
            why = f"{few}, after {in_seconds(waited_s)}"
            self._notes.send(Event.now(Kind.WAITS, self._notes.name_of(self._member), why=why))

    # ---- of members

    def waiting(self, record: Record, description: str, needs: Needs) -> dict[str, Ask]:
        """Return the replicas that ask and may be admitted to a generation, by the name of their question."""
        found, heartbeats = {}, self._peers.heartbeats
        for name, one in self._members.asks().items():
            is_in = one.member in record.ids
            if heartbeats.ended(one.member) or (is_in and one.last < record.number):
                self._members.close(name)
            elif (
                not is_in
                and self._fits(name, one, description, needs.tensors, needs.could)
                and not heartbeats.unheard(one.member)
            ):
                found[name] = one
        return found

    def admit(self, record: Record, description: str, needs: Needs) -> Record:
        """Return the next generation, which admits the waiting replicas. One member decides; all members call this."""
        there = self.waiting(record, description, needs)
        waiting = {name: one for name, one in there.items() if self._members.is_ready(name)}
        newcomers = tuple(sorted({one.member for one in waiting.values()}))[: self._most - len(record.ids)]
        new = replace(
            Record(record.number + 1, self._member, record.ids + newcomers, newcomers),
            past=needs.num_votes,
            began=record.began,
        )
        names = {name: one for name, one in waiting.items() if one.member in newcomers}
        differs = {name: why for name, one in names.items() if (why := other_versions(one.description, description))}
        for name, why in differs.items():
            self._members.answer("differs", name, why)
        if not self._members.append(new):
            return self._members.current()
        for name in names:
            self._members.close(name)
        name_of, count = self._notes.name_of, len(new.ids)
        for name, why in differs.items():
            self._notes.send(Event.now(Kind.DIFFERS, name_of(names[name].member), why=why))
        for member in newcomers:
            self._notes.send(Event.now(Kind.JOINED, name_of(member), new.number, replicas=count))
            self._notes.send_to_launcher(member, Event.now(Kind.JOINED, name_of(member), replicas=count))
        return new

    def _fits(self, question: str, one: Ask, mine: str, trained: Sequence[str], could: Sequence[str]) -> bool:
        """Return whether a replica is like the others, which exchange `trained` and could exchange more; or refuse it.

        What it trains itself in this moment may be less, or something else.
        """
        theirs, they_could = self._members.tensors(question)
        is_known = trained and they_could
        odd = unlike_tensors(set(theirs) - set(could), set(trained) - set(they_could)) if is_known else ""
        if not (why := "; ".join(filter(None, (unlike(one.description, mine), odd)))):
            return True
        if self._members.answer("refused", question, why):
            self._notes.send(Event.now(Kind.REFUSED, self._notes.name_of(one.member), why=why))
        self._members.close(question)
        return False


def late_pause_s(num_lates: int) -> float:
    """Return how long a replica that was late several times waits before it asks again."""
    return min(_LONGEST_PAUSE_S, 2.0**num_lates) if num_lates > 1 else 0.0
