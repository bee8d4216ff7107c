# SPDX-License-Identifier: Apache-2.0
"""How replicas come into a run: they ask to be admitted, and members admit those that are like them."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
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
                looked_at, askers = now, self._members.askers()
                self._heed(question)
                if question and question not in askers:  # it was admitted, and left out as it did not come
                    self._members.ask(mine, needs.tensors, needs.could)
                holders = {} if record is None else self._holders(record, askers.values(), now - began)
                quiet_since = quiet_since if holders and all(holders.values()) else now
                if now - quiet_since > peers.grace_s and self.found() is not None:
                    holders = {}  # there is what those have written of whom nothing is heard
                few = ""
                if not holders:
                    pause_s = 0.0
                    few = self._begin(record, self._members.asks(), now - began)
                elif now - began > peers.grace_s:
                    told = self._tell_wait(holders, told)
                peers.await_holders(holders, now - quiet_since if holders else 0.0)

    def _holders(self, record: Record, askers: Iterable[tuple[int, int]], waited_s: float) -> dict[int, str]:
        """Return members that may hold the trained state or begin now, and why they are silent; RankFailure at the end.

        If launchers start at the same moment, one replica begins and is not ready yet when others ask. One that is not
        silent is enough: then no more is asked.

        Args:
            askers: members that ask, each with the generation that it was in before.
        """
        heartbeats, ask_each = self._peers.heartbeats, self._notes.board.map
        came_back = {member for member, last in askers if last >= record.number} | {self._member}
        begins = record.is_fresh and waited_s < self._peers.grace_s

        def why_missing(one: int) -> str | None:
            may_hold = self._peers.may_hold(record, one) or (begins and not heartbeats.missing(one))
            return heartbeats.missing(one) if may_hold and not heartbeats.ended(one) else None

        def why_unheard(one: int) -> str:  # it has state, and can't begin with us
            return "" if heartbeats.ended(one) else heartbeats.unheard(one)

        there, holders = [one for one in record.ids if one not in came_back], dict[int, str]()
        for some in (there[:1], there[1:]):
            if all(holders.values()):  # the first one lives, as a rule
                found = zip(some, ask_each(why_missing, some), strict=True)
                holders |= {one: why for one, why in found if why is not None}
        # After the looks above: one whose work is done in between had not ended there. A listing may be late.
        self._check_over(record, self._notes.have_left(self._peers.loop) if holders else record.ids)
        if not all(holders.values()):
            return holders
        with_state = [ask.member for ask in self._members.asks().values() if ask.has_state]
        unheard = zip(with_state, ask_each(why_unheard, with_state), strict=True)
        return holders | {one: why for one, why in unheard if why}

    def _check_over(self, record: Record, ids: Collection[int]) -> None:
        """Raise RankFailure if a member of the last generation, among `ids`, has done its work: nothing is left."""
        notes, loop = self._notes, self._peers.loop
        if any(notes.board.map(lambda one: notes.is_done_with(one, loop), [one for one in record.ids if one in ids])):
            self.is_over = True
            self._notes.put("left", self._member, LATE)
            are_gone = all(self._notes.get("gone", one) or self._peers.heartbeats.unheard(one) for one in record.ids)
            if are_gone and not all(self._notes.why_left(one) for one in record.ids):
                raise RankFailure(_ENDED_LATER, Cause.FAULT)
            raise RankFailure(_RUN_ENDED, Cause.RUN_ENDED)

    def _begin(self, record: Record | None, asks: Mapping[str, Ask], waited_s: float) -> str:
        """Make a generation of those that ask, as soon as there are enough: no other replica holds a trained state.

        Returns how many there are, in words, if they are too few.
        """
        heartbeats = self._peers.heartbeats
        ask_each = self._notes.board.map
        absent = ask_each(lambda one: heartbeats.ended(one.member) or heartbeats.unheard(one.member), asks.values())
        there = [row for row, why in zip(asks.items(), absent, strict=True) if not why]
        there.sort(key=lambda row: (not row[1].has_state, -row[1].last, row[1].member))
        saved = None if any(one.has_state for _, one in there) else self.found()
        mine = there[0][1].description if there else ""
        trained, could = self._members.tensors(there[0][0]) if there else ([], [])
        if saved is not None and self._saver is not None:  # which is the run's, whoever asks first
            mine, trained = saved.description or mine, self._saver.lines()
        are_fit = ask_each(lambda row: self._fits(*row, mine, trained, could), there)
        names = [(one.member, name) for (name, one), is_fit in zip(there, are_fit, strict=True) if is_fit]
        fit = dict(names[: self._most])
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
        if self._members.append(new):
            if saved is not None and self._saver is not None:  # before it is ready, so that nobody trains meanwhile
                self._saver.restore_logs(saved, lambda: self._members.record() == new)
            ask_each(self._members.close, fit.values())
            self._notes.send(Event.now(Kind.BEGAN, "", number, replicas=len(ids), **state))
        return ""

    def found(self) -> Saved | None:
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
        heartbeats, asks = self._peers.heartbeats, self._members.asks()

        def may_come(row: tuple[str, Ask]) -> bool:
            name, one = row
            is_in = one.member in record.ids
            if heartbeats.ended(one.member) or (is_in and one.last < record.number):
                self._members.close(name)
                return False
            fits = not is_in and self._fits(name, one, description, needs.tensors, needs.could)
            return fits and not heartbeats.unheard(one.member)

        found = zip(asks.items(), self._notes.board.map(may_come, asks.items()), strict=True)
        return {name: one for (name, one), comes in found if comes}

    def admit(self, record: Record, description: str, needs: Needs) -> Record:
        """Return the next generation, which admits the waiting replicas. One member decides; all members call this."""
        there = self.waiting(record, description, needs)
        are_ready = self._notes.board.map(self._members.is_ready, there)
        waiting = {name: one for (name, one), is_ready in zip(there.items(), are_ready, strict=True) if is_ready}
        newcomers = tuple(sorted({one.member for one in waiting.values()}))[: max(0, self._most - len(record.ids))]
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
        self._notes.board.map(self._members.close, names)
        name_of, count = self._notes.name_of, len(new.ids)
        for name, why in differs.items():
            self._notes.send(Event.now(Kind.DIFFERS, name_of(names[name].member), why=why))

        def send_joined(member: int) -> None:
            self._notes.send(Event.now(Kind.JOINED, name_of(member), new.number, replicas=count))
            self._notes.send_to_launcher(member, Event.now(Kind.JOINED, name_of(member), replicas=count))

        self._notes.board.map(send_joined, newcomers)
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
