# SPDX-License-Identifier: Apache-2.0
"""Replicas that come and go: a membership that one c10d store decides on.

A member that is lost, or late for too long, breaks the generation: each of the others closes its connections, says in
the store how far its rounds have come, and waits until all that still live have said so. One of them then replaces the
generation's record by compare-and-set, and all go by that. Newcomers ask in the store; the votes of a round let all
members know of them at the same point.
"""

from __future__ import annotations

import logging
import time
from ast import literal_eval
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from farflung.base.errors import RUN_ENDED, ConfigError, RankFailure, Unreachable
from farflung.base.words import counted, in_seconds
from farflung.comm.board import Board
from farflung.comm.collectives import from_first, gather_object
from farflung.comm.exchange import Exchange
from farflung.comm.generation_group import GenerationGroup
from farflung.comm.group import Group, SoloGroup
from farflung.comm.member_store import DONE, Applicant, LauncherNotes, MemberStore, Record, Signs
from farflung.outer.admission import description_of, other_versions, unlike, unlike_tensors, versions
from farflung.outer.generation_watch import GenerationWatch
from farflung.outer.membership import ALL, Generation, Needs, open_generation

_logger = logging.getLogger(__name__)

_POLL_S = 0.005  # how often those that meet look whether all have come
_CAUSES_S = 0.02  # and why some have not
_JOIN_S = 0.02  # how often a newcomer looks whether it is let in
_ASK_S = 0.5  # how often a member asks who waits to join, at most, and a newcomer who could let it in
_GRACE_S, _GAPS = 30.0, 2  # by default, or so many times the time between two rounds: a machine 3 times slower is kept
_READY_S = 5.0  # a newcomer that is let in has looked for it every `_JOIN_S`
_HOLDER_GRACES = 20  # how long those that have nothing wait for the one that has what was trained
_LONGEST_PAUSE_S = 60.0  # before one that was late several times asks again
_CONNECT_S = 2.0
_RELEASE_S = 0.1  # at the end, with Python's lock free
_RETIRED_S = 1.0  # after which gloo's threads have let go of all that they ended
_SLOWEST_BPS = 125_000  # bytes per second; slower values count as lost, until a speed was measured


class Elastic:
    """Membership of replicas that may fail, leave or join at any time.

    Args:
        store: a c10d store that all members and launchers share, such as a `TCPStore`, or a board over it.
        member: this replica's id, which no other has had; the launcher gives it.
        expected: how many replicas the first generation waits for.
        least: the number that suffices after `grace_s` seconds.
        most: how many there will be at most.
        grace_s: how many seconds the others wait for a replica that is late before they go on without it. None: 30, or
            twice the time between the latest two rounds if that is longer.
        island: the ranks that train this replica.

    Attributes:
        record: the generation that this replica is in, or was in last.
        data: what is known of the data before the first replica is met, which must be the same on all.
        joined: the number of the generation in which it came in as a newcomer; 0 if it was there from the first one on.
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
        grace_s: float | None = None,
        island: Group | None = None,
    ) -> None:
        self.island = island or SoloGroup()
        self.most, self._grace_s = most, grace_s
        board = Board.of(store)
        self.notes = LauncherNotes(board)
        self.signs = Signs(self.notes)
        self.data, self._versions = "", versions()
        self.member = member
        self.record: Record | None = None
        self.joined = 0
        self._expected, self._least = expected, least
        self._share_group = Exchange(self.island.duplicate())
        # Loops are numbered as other replicas number theirs.
        number = from_first(self._share_group, lambda: board.add(f"loops/{member}", 1))
        self._board = board.part(f"loop{number}")
        self.members = MemberStore(self._board)
        self.at_once = MemberStore(self._board.patient(0))  # for questions that training must not wait for
        self._decided: Record | None = None  # the next generation, where this one is over
        self._generation: Generation | None = None
        self._needs: Needs | None = None
        self._num_answered = 0  # questions to join
        self._ask_at = self._last_round_at = time.monotonic()
        self._gap_s = 0.0  # between two rounds
        self._retired: list[tuple[float, dist.ProcessGroup]] = []  # groups of generations before, and since when
        self._is_over = False  # the run
        self.slowest_bps = float(_SLOWEST_BPS)
        self._num_failed = 0  # generations that did not come about, one after the other
        self.is_admitting = False  # newcomers of this generation may still be on their way into it
        # It comes before its time, and those that are not there by then are not late. The ranks of an island would hear
        # of a signal at different steps.
        self.last_round_s = self.grace_s / 2 if self.island.size == 1 else 0.0

    @property
    def grace_s(self) -> float:
        """How many seconds the others wait for a replica that is late."""
        return max(_GRACE_S, _GAPS * self._gap_s) if self._grace_s is None else self._grace_s

    # ---- what an outer loop asks

    def enter(self, needs: Needs) -> Generation:
        self._needs = needs
        record = from_first(self._share_group, lambda: self._next(needs))
        if record == self.record and self._generation is not None:
            return self._generation
        self.record, self._generation, self._decided, self.is_admitting = record, None, None, bool(record.newcomers)
        if self.member in record.newcomers:
            self.joined = record.number
        from_first(self._share_group, lambda: self._await_ready(record))
        watch = GenerationWatch(self, record, min(_CONNECT_S * 2**self._num_failed, self.grace_s))
        board = self._board.part(f"g{record.number}")
        rank, size = record.ids.index(self.member), len(record.ids)
        group = GenerationGroup(board, f"c{self.island.rank}", rank, size, watch)
        newcomers = [record.ids.index(one) for one in record.newcomers]
        generation = open_generation(record.number, record.ids, group, self.island, needs, newcomers)
        self._generation = replace(generation, lost=record.lost, may_lose=True)
        self._num_failed = 0
        if self.island.rank == 0:
            self.notes.note("in", self.member)
            if rank == 0:
                self.members.forget_before(record.number)
        return self._generation

    def is_awaited(self, needs: Needs) -> bool:
        now = time.monotonic()
        self._gap_s, self._last_round_at, self.is_admitting = now - self._last_round_at, now, False
        self._retired = [(since, group) for since, group in self._retired if now < since + _RETIRED_S]
        is_first = self.record is not None and self.record.ids[0] == self.member and self.island.rank == 0
        if not is_first or now < self._ask_at:
            return False
        try:
            return self.at_once.num_applied() > self._num_answered and bool(self._waiting(needs))
        except Unreachable:
            return False
        finally:
            took_s = time.monotonic() - now
            self._ask_at = now + max(_ASK_S, 10 * took_s)  # seldom, where the store gives no answer

    def agree(self, num_votes: int, complete: Mapping[int, int], odd: Mapping[int, str]) -> dict[int, int]:
        self._end_island_waits()
        everyone, seen = zip(*gather_object(self._share_group, [(dict(complete), dict(odd))]), strict=True)
        least = {vote: min(one.get(vote, ALL) for one in everyone) for vote in set().union(*everyone)}
        post = {
            "votes": num_votes,
            "complete": least,
            "has_state": True,
            "odd": {k: v for one in seen for k, v in one.items()},
        }
        record = self._decided = from_first(self._share_group, lambda: self._settled(post))
        if self.member not in record.ids:
            return dict.fromkeys(complete, 0)
        return {vote: ALL if vote < record.past else record.common.get(vote, 0) for vote in complete}

    def lost(self, failure: RankFailure) -> None:
        if self._is_over or self._needs is None:
            raise failure
        needs, self._num_failed = self._needs, self._num_failed + (self._generation is None)
        if self._decided is None and self.record is not None:
            self._end_island_waits()
            has_state = needs.has_state and self.member not in self.record.newcomers
            post = {"votes": needs.num_votes, "complete": {}, "has_state": has_state, "odd": {}}
            self._decided = from_first(self._share_group, lambda: self._settled(post))
        self._generation = None

    def retire(self, group: dist.ProcessGroup) -> None:
        """Let go of a process group, when no thread of gloo's is busy with it any more."""
        self._retired.append((time.monotonic(), group))

    def end(self, reason: str) -> None:
        if self._retired:
            time.sleep(_RELEASE_S)
            self._retired.clear()
        if self.island.rank == 0 and not self._is_over:
            with suppress(Unreachable):
                self.notes.note("left", self.member, reason or DONE)

    # ---- who is in the next generation; one rank of each replica decides

    def _next(self, needs: Needs) -> Record:
        record = self._decided or self.record
        if record is None or self.member not in record.ids or not (needs.has_state or self._decided):
            return self._ask(needs, needs.has_state and (record is None or self.member not in record.odd))
        if self._decided is None and needs.admits:
            return self._admitting(record, needs)
        return record

    def _ask(self, needs: Needs, has_state: bool) -> Record:
        """Ask to be let in, and wait for it; where nobody is left who could do so, begin with others that ask.

        Raises:
            ConfigError: this replica is not like the members.
            RankFailure: the run has ended; or those who have what was trained give no sign of life.
        """
        last = 0 if self.record is None else self.record.number
        mine = Applicant(self.member, last, has_state, self._description(needs))
        began = quiet_since = time.monotonic()
        number, looked_at, told, pause_s = 0, 0.0, "", self._pause_s(self.member)
        while True:
            record = self.members.record()
            if record is not None and record.number > last and self.member in record.ids:
                self._heed(number)
                return record
            now = time.monotonic()
            if not number and now >= began + pause_s:
                number = self.members.apply(mine, needs.tensors)
            if now >= looked_at + _ASK_S:
                looked_at, asked = now, self.members.applicants(0)
                self._heed(number)
                holders = {} if record is None else self._holders(record, asked.values())
                if not holders:
                    pause_s = 0.0
                    self._begin(record, asked, now - began)
                quiet_since = quiet_since if holders and all(holders.values()) else now
                if holders and now - began > self.grace_s:
                    told = self._tell_wait(holders, told)
                if now - quiet_since > _HOLDER_GRACES * self.grace_s:
                    raise RankFailure(self._without_holders(holders, now - quiet_since))
            time.sleep(_JOIN_S)

    def _holders(self, record: Record, asked: Iterable[Applicant]) -> dict[int, str]:
        """Return who may still have what was trained, by id, and why nothing is heard of it; RankFailure at the end."""
        came_back = {one.member for one in asked if one.last >= record.number} | {self.member}
        if any(self.notes.noted("left", one) == DONE for one in record.ids):
            self._is_over = True
            self.notes.note("left", self.member, "too late")
            raise RankFailure(RUN_ENDED)
        there = [one for one in record.ids if one not in came_back and self._may_hold(record, one)]
        holders = {one: self.signs.missing(one) for one in there if not self.signs.ended(one)}
        for one in asked:  # it has state, and can't begin with us
            if one.has_state and not self.signs.ended(one.member) and (why := self.signs.unheard(one.member)):
                holders[one.member] = why
        return holders

    def _begin(self, record: Record | None, asked: Mapping[int, Applicant], waited_s: float) -> None:
        """Make those that ask a generation, as soon as there are enough: nobody else has anything that was trained."""
        there = [(number, one) for number, one in asked.items() if not self.signs.ended(one.member)]
        there = [(number, one) for number, one in there if not self.signs.unheard(one.member)]
        there.sort(key=lambda row: (not row[1].has_state, -row[1].last, row[1].member))
        fit = {one.member: number for number, one in there if self._fits(number, one, there[0][1].description)}
        if len(fit) < self._least or (len(fit) < self._expected and waited_s <= self.grace_s):
            return
        ids, has_state = tuple(fit), there[0][1].has_state
        number = 1 if record is None else record.number + 1
        new = Record(number, self.member, ids, ids[1:] if has_state else (), is_fresh=not has_state)
        if self.members.replace(record, new):
            self.members.forget_applicants(fit.values())
            self.notes.tell(f"generation {number}: training begins with {counted(len(ids), 'replica')}")

    def _fits(self, number: int, one: Applicant, mine: str, tensors: Sequence[str] = ()) -> bool:
        """Whether a replica is like the others; else refuse it."""
        if not (why := unlike(one.description, mine)):
            return True
        if not self.members.answered("refused", number):
            odd = unlike_tensors(self.members.tensors(number), tensors) if tensors else ""
            why = f"{why}; {odd}" if odd else why
            self.members.answer("refused", number, why)
            self.notes.tell(f"{self.notes.name_of(one.member)} is not let in: {why}")
        return False

    def _heed(self, number: int) -> None:
        """Read what the members have answered."""
        if number and (why := self.members.answered("refused", number)):
            raise ConfigError(
                f"This replica can't join the run: {why}. Start it with the settings and model of the run."
            )
        if number and (why := self.members.answered("differs", number)):
            _logger.warning(f"This replica differs from those that it has joined: {why}")

    def _tell_wait(self, holders: Mapping[int, str], told: str) -> str:
        """Say what this replica waits for, unless it has `told` so before; return what in a word."""
        what = "lost" if all(holders.values()) else "admission"
        if what != told:
            why = f"the others let it in after their next round, unless they are {self.most} already"
            why = self._missing(holders) if what == "lost" else why
            self.notes.tell(f"{self.notes.name_of(self.member)} waits: {why}")
        return what

    def _missing(self, holders: Mapping[int, str]) -> str:
        named = "; ".join(f"{self.notes.name_of(one)}: {why}" for one, why in holders.items())
        return f"nobody else has what was trained ({named})"

    def _without_holders(self, holders: Mapping[int, str], waited_s: float) -> str:
        return (
            f"Nobody is there who has what was trained, for {in_seconds(waited_s)}: {self._missing(holders)}. To train "
            "from the beginning would lose it. Start the run again from its newest checkpoint."
        )

    def _description(self, needs: Needs) -> str:
        return description_of(needs, self.island.size, self.data, self._versions)

    def _pause_s(self, member: int) -> float:
        """Return how long one that was late several times waits before it asks again."""
        num_lates = self.notes.count(f"lates/{member}")
        return min(_LONGEST_PAUSE_S, 2.0**num_lates) if num_lates > 1 else 0.0

    def _waiting(self, needs: Needs) -> dict[int, Applicant]:
        """Return those that wait to be let in, by the number of their question."""
        asked = self.members.applicants(self._num_answered)
        here = () if self.record is None else self.record.ids
        there = {number: one for number, one in asked.items() if one.member not in here}
        there = {number: one for number, one in there.items() if not self.signs.ended(one.member)}
        mine = self._description(needs)
        there = {number: one for number, one in there.items() if self._fits(number, one, mine, needs.tensors)}
        if not there and asked:
            self._num_answered = max(asked)
        return {number: one for number, one in there.items() if not self.signs.unheard(one.member)}

    def _admitting(self, record: Record, needs: Needs) -> Record:
        """Return the next generation, with those that wait, as one of the members decides: all come here together."""
        waiting = self._waiting(needs)
        newcomers = tuple(sorted({one.member for one in waiting.values()}))[: self.most - len(record.ids)]
        new = Record(record.number + 1, self.member, record.ids + newcomers, newcomers, past=needs.num_votes)
        numbers = {number: one for number, one in waiting.items() if one.member in newcomers}
        mine = self._description(needs)
        differs = {number: why for number, one in numbers.items() if (why := other_versions(one.description, mine))}
        for number, why in differs.items():
            self.members.answer("differs", number, why)
        if not self.members.replace(record, new):
            found = self.members.record()
            assert found is not None
            return found
        self.members.forget_applicants(numbers)
        for number, why in differs.items():
            self.notes.tell(f"{self.notes.name_of(numbers[number].member)} differs from the others: {why}")
        names = ", ".join(map(self.notes.name_of, newcomers))
        if newcomers:
            self.notes.tell(f"generation {new.number}: {names} joined; {counted(len(new.ids), 'replica')} train")
        for one in newcomers:
            self.notes.tell_launcher(one, f"{self.notes.name_of(one)} was let in; {len(new.ids)} replicas train")
        return new

    def _settled(self, post: Mapping[str, Any]) -> Record:
        """Meet those that are left of a generation, and return the next one; RankFailure without a store to decide."""
        record = self.record
        assert record is not None
        began, asked, was_told = time.monotonic(), 0.0, False
        try:
            self.members.mark_broken(record.number, "members were lost")
            self.members.say(record.number, "post", self.member, repr(dict(post)))
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
                    holders = self._absent_holders(record, posts, absent)
                    if all(absent.values()) and not holders:
                        self._decide(record, posts, absent)
                        continue
                    if holders and not was_told and min(posts) == self.member:
                        who = ", ".join(map(self.notes.name_of, posts))
                        self.notes.tell(f"{who} can't begin: {self._missing(holders)}")
                    was_told |= bool(holders)
                    if holders and asked - began > _HOLDER_GRACES * self.grace_s:
                        raise RankFailure(self._without_holders(holders, asked - began))
                time.sleep(_POLL_S)
        except Unreachable as error:
            raise RankFailure(
                "A replica was lost, and those that are left can't agree on who goes on, as the run's store is gone "
                f"too. {error} Start the run again from its newest checkpoint."
            ) from None

    def _absent_holders(self, record: Record, posts: Mapping[int, Any], absent: Mapping[int, str]) -> dict[int, str]:
        """Return those who alone have what was trained, and are not known to have ended."""
        if not all(absent.values()) or any(post["has_state"] for post in posts.values()):
            return {}
        return {one: why for one, why in absent.items() if not self.signs.ended(one) and self._may_hold(record, one)}

    def _may_hold(self, record: Record, member: int) -> bool:
        """Whether a member may have what was trained: one that had nothing gets it only once all are ready."""
        had_nothing = member in (record.ids if record.is_fresh else record.newcomers)
        return not had_nothing or bool(self.members.said(record.number, "ready", [member]))

    def _decide(self, record: Record, posts: Mapping[int, Any], absent: Mapping[int, str]) -> None:
        """Make those that have come the next generation, unless another one was quicker."""
        odd = {one: why for post in posts.values() for one, why in post["odd"].items()}
        have = [one for one in record.ids if one in posts and posts[one]["has_state"]]
        have = [one for one in have if one not in odd] or have
        ids = tuple(have or (one for one in record.ids if one in posts))  # or nobody is left who had anything
        complete = {one: posts[one]["complete"] for one in ids}
        common = {}
        for vote in set().union(*complete.values()):
            has = [complete[one].get(vote, ALL if vote < posts[one]["votes"] else 0) for one in ids]
            has_passed = any(vote not in complete[one] and vote < posts[one]["votes"] for one in ids)
            common[vote] = ALL if has_passed else min(has)
        odd = {one: why for one, why in odd.items() if one not in ids}
        lost = {**absent, **odd}
        new = Record(record.number + 1, self.member, ids, common=common, lost=lost, odd=tuple(odd), is_fresh=not have)
        if self.members.replace(record, new):
            left = counted(len(ids), "replica")
            goes_on = f"training goes on with {left}" if have else f"training begins again with {left}"
            for one, why in lost.items():
                name = self.notes.name_of(one)
                self.notes.tell(f"generation {new.number}: {name} is out: {why}; {goes_on}{self._late_again(one)}")
                if not self.notes.noted("gone", one):  # else its launcher knows better
                    self.notes.tell_launcher(one, f"{name} was left out: {why}; it asks to be let in again")
            if not lost:
                why = self.members.broken(record.number)
                self.notes.tell(f"generation {new.number}: {left} connected anew ({why})")

    def _late_again(self, member: int) -> str:
        """Count that a replica was late; from the second time on, return what helps."""
        if self.signs.ended(member) or self.signs.unheard(member):
            return ""
        num_lates = self.notes.count(f"lates/{member}", 1)
        if num_lates == 1:
            return ""
        return (
            f" (late {num_lates} times by now: rounds by time, as in edit(seconds=...), fewer steps a round, or a "
            f"longer --grace_s would keep it; it asks again in {in_seconds(self._pause_s(member))})"
        )

    def _await_ready(self, record: Record) -> None:
        """Wait until all members of a generation have come to it; RankFailure where one was lost."""
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
        if ended := self.signs.ended(member):
            return ended
        if silent_s := self.signs.silent_s(member):
            return f"its machine gave no sign for {in_seconds(silent_s)}"
        if self.record is not None and self.members.said(self.record.number, "late", [member]):
            return f"it was late by more than {in_seconds(self.limit_s(member))}"
        if waited_s > self.grace_s and self.notes.noted("stopped", member):
            return f"its process is stopped, and {in_seconds(self.grace_s)} are over"
        if waited_s > self.limit_s(member) + (0 if self.is_on_its_way(member) else self._gap_s):
            return f"it did not come within {in_seconds(waited_s)}"
        return ""

    def is_on_its_way(self, member: int) -> bool:
        """Whether a newcomer has been let in a moment ago, and has made no round yet."""
        return self.is_admitting and self.record is not None and member in self.record.newcomers

    def limit_s(self, member: int) -> float:
        """Return how long others wait for a member that is late."""
        return min(self.grace_s, _READY_S) if self.is_on_its_way(member) else self.grace_s

    def _end_island_waits(self) -> None:
        """Let the other ranks of the replica, who may wait for this one in a round, come here too."""
        if self.island.size > 1:
            self.island.leave("its replica goes on without one that was lost")
