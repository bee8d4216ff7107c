# SPDX-License-Identifier: Apache-2.0
"""What the members of an elastic run and their launchers tell each other, on one board.

The store alone decides who takes part: one key holds the current generation, which is replaced by compare-and-set.
"""

from __future__ import annotations

import re
import time
from ast import literal_eval
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from farflung.base.words import in_seconds
from farflung.comm.board import Board

DONE = "done"  # why a member has left whose work is done
_BEAT_LOST_S = 2.5  # without a sign from a launcher, which gives one every half second
_OF_GENERATION = re.compile(r"g(\d+)/")


@dataclass(frozen=True)
class Record:
    """A generation as the store has it."""

    number: int  # 1 for the first one
    by: int  # who has put it there
    ids: tuple[int, ...]  # of its members, in the order of their ranks
    newcomers: tuple[int, ...] = ()  # the ids of those that get what the others have in common
    common: Mapping[int, int] = field(default_factory=dict)  # buckets that all apply of open rounds, by vote
    past: int = 0  # the number of the first vote that no member has had yet
    lost: Mapping[int, str] = field(default_factory=dict)  # why members of the generation before are not in it, by id
    odd: tuple[int, ...] = ()  # those of them whose state was not that of the others
    is_fresh: bool = False  # nobody had anything that was trained, so all begin alike

    def encode(self) -> str:
        return repr(astuple(self))

    @classmethod
    def decode(cls, text: str) -> Record:
        return cls(*literal_eval(text))


@dataclass(frozen=True)
class Applicant:
    """A replica that asks to be let in."""

    member: int
    last: int  # the number of the generation that it was in before, 0 for none
    has_state: bool  # it has what members have in common, as they had it then
    description: str = "{}"  # of itself, as JSON


Note: TypeAlias = Literal["name", "machine", "gone", "stopped", "in", "left"]


class LauncherNotes:
    """What launchers say of the processes that they have started, by the ids of the members, and members of themselves.

        name, machine      how a member is called; which launcher looks after it, if any does
        gone, stopped      how its process has ended; there while it is stopped
        in, left           there once it has been in a generation; why it takes no part any more, `done` if its work is,
                           `too late` if it has asked to be let in when the run had ended
        beat               how often the launcher of a machine has given a sign
        lates              how often it was left out as it was late
        ids, ends          how many there have been, of all members; of these how many processes have ended
        launchers          how many are at work
        events             lines that the first launcher has yet to print, or that of a machine
        first              the machine of the first launcher

    Args:
        store: a c10d store that all of them share, or a board over it.
    """

    def __init__(self, store: Any) -> None:
        self.board = Board.of(store)

    def note(self, what: Note, member: int, text: str = "1") -> None:
        self.board.put(f"{what}/{member}", text)

    def noted(self, what: Note, member: int) -> str:
        return self.board.get(f"{what}/{member}")

    def forget(self, member: int, *what: Note) -> None:
        for key in what or [*get_args(Note), "loops", "lates"]:
            self.board.delete(f"{key}/{member}")

    def count(self, what: str, change: int = 0) -> int:
        """Add to a number, and return it."""
        return self.board.add(what, change)

    def note_end(self, member: int, how: str) -> None:
        self.note("gone", member, how)
        self.count("ends", 1)

    def name_of(self, member: int) -> str:
        return self.noted("name", member) or f"member {member}"

    def tell(self, event: str) -> None:
        self.board.append("events", f"{event}\n")

    def tell_launcher(self, member: int, event: str) -> None:
        """Have a line printed by the launcher of a member, where it is not the first one, which prints all events."""
        machine = self.noted("machine", member)
        if machine and machine != self.board.get("first"):
            self.board.append(f"events/{machine}", f"{event}\n")

    def take_told(self, machine: str = "") -> list[str]:
        """Return the lines that were told since the last call, to the first launcher or to that of a machine."""
        key = f"events/{machine}" if machine else "events"
        text = self.board.get(key)
        while text and (now := self.board.swap(key, text, "\n")) != "\n":
            text = now  # another line came meanwhile
        return [line for line in text.split("\n") if line]


class Signs:
    """Whether members live, as their launchers say: asked here and nowhere else."""

    def __init__(self, notes: LauncherNotes) -> None:
        self._notes = notes
        self._beats: dict[str, tuple[int, float]] = {}  # by machine: how many there were, and since when

    def ended(self, member: int) -> str:
        """Return how a member has ended or left; empty while nobody has said that it has."""
        left = self._notes.noted("left", member)
        return self._notes.noted("gone", member) or ("its work is done" if left == DONE else left)

    def silent_s(self, member: int) -> float:
        """Return for how long the launcher of a member has given no sign, if that is too long; else 0."""
        machine = self._notes.noted("machine", member)
        if not machine:
            return 0.0
        count, now = self._notes.count(f"beat/{machine}"), time.monotonic()
        before, since = self._beats.get(machine, (-1, now))
        self._beats[machine] = (count, since if count == before else now)
        silent = now - self._beats[machine][1]
        return silent if silent > _BEAT_LOST_S else 0.0

    def unheard(self, member: int) -> str:
        """Return why a member can do nothing now, though it may live; empty if nothing of that is known."""
        if silent_s := self.silent_s(member):
            return f"its machine gave no sign for {in_seconds(silent_s)}"
        return "its process is stopped" if self._notes.noted("stopped", member) else ""

    def missing(self, member: int) -> str:
        """Return why a member that has not ended may never come; empty if its launcher says that it runs."""
        if not self._notes.noted("machine", member):
            return "no launcher looks after it, so nobody knows whether it lives"
        return self.unheard(member)


class MemberStore:
    """What the members of one outer loop tell each other.

        generation               the current `Record`
        applicant, tensors       those who ask to be let in, and what they train, by the number of their question
        refused, differs         why one is not let in, which ends it alone; in what it differs that is let in
        g<number>/<what>/<member>    what a member has said last in a generation
        g<number>/broken         why a generation is over, as a collective in it can't end; the first reason stays

    Args:
        board: for this loop alone.
    """

    def __init__(self, board: Board) -> None:
        self.board = board

    def record(self) -> Record | None:
        text = self.board.get("generation")
        return Record.decode(text) if text else None

    def replace(self, now: Record | None, by: Record) -> bool:
        """Put another generation in the place of the current one, unless that is not `now` any more."""
        text = by.encode()
        return self.board.swap("generation", "" if now is None else now.encode(), text) == text

    def apply(self, asks: Applicant, tensors: Iterable[str] = ()) -> int:
        """Ask to be let in; return the number of the question."""
        number = self.board.add("applicants", 1)
        self.board.put(f"tensors/{number}", "\n".join(tensors) or "\n")
        self.board.put(f"applicant/{number}", repr(astuple(asks)))
        return number

    def tensors(self, number: int) -> list[str]:
        return [line for line in self.board.get(f"tensors/{number}").split("\n") if line]

    def answer(self, what: Literal["refused", "differs"], number: int, why: str) -> None:
        self.board.put(f"{what}/{number}", why)

    def answered(self, what: Literal["refused", "differs"], number: int) -> str:
        return self.board.get(f"{what}/{number}")

    def num_applied(self) -> int:
        return self.board.add("applicants", 0)

    def applicants(self, since: int) -> dict[int, Applicant]:
        """Return the applicants numbered above `since`, by number."""
        texts = self._texts({number: f"applicant/{number}" for number in range(since + 1, self.num_applied() + 1)})
        return {number: Applicant(*literal_eval(text)) for number, text in texts.items()}

    def forget_applicants(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.board.delete(f"applicant/{number}")
            self.board.delete(f"tensors/{number}")

    def say(self, generation: int, what: str, member: int, text: str) -> None:
        self.board.put(f"g{generation}/{what}/{member}", text)

    def have_said(self, generation: int, what: str, members: Iterable[int]) -> bool:
        return self.board.has(f"g{generation}/{what}/{member}" for member in members)

    def said(self, generation: int, what: str, members: Iterable[int]) -> dict[int, str]:
        return self._texts({member: f"g{generation}/{what}/{member}" for member in members})

    def _texts(self, keys: Mapping[int, str]) -> dict[int, str]:
        return {number: text for number, key in keys.items() if (text := self.board.get(key))}

    def mark_broken(self, generation: int, reason: str) -> None:
        self.board.swap(f"g{generation}/broken", "", reason)

    def broken(self, generation: int) -> str:
        return self.board.get(f"g{generation}/broken")

    def forget_before(self, generation: int) -> None:
        """Delete the entries of earlier generations."""
        for key in self.board.listed():
            found = _OF_GENERATION.match(key)
            if found and int(found[1]) < generation:
                self.board.delete(key)
