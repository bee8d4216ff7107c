# SPDX-License-Identifier: Apache-2.0
"""What the members of an elastic run and their launchers tell each other, in one c10d store.

The store alone decides who takes part: one key holds the current epoch, and it is replaced only by compare-and-set.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import torch.distributed as dist

_NONE = "-"  # no value of a key
_OF_EPOCH = re.compile(r"e(\d+)/")


@dataclass(frozen=True)
class Record:
    """An epoch as the store has it."""

    number: int  # 1 for the first one
    by: int  # who has put it there
    ids: tuple[int, ...]  # of its members, in the order of their ranks
    newcomers: tuple[int, ...] = ()  # the ids of those that get what the others have in common
    common: Mapping[int, int] = field(default_factory=dict)  # buckets that all apply of open rounds, by vote
    past: int = 0  # the number of the first vote that no member has had yet
    lost: Mapping[int, str] = field(default_factory=dict)  # why members of the epoch before are not in it, by id

    def encode(self) -> str:
        return repr(astuple(self))

    @classmethod
    def decode(cls, text: str) -> Record:
        return cls(*literal_eval(text))


@dataclass(frozen=True)
class Applicant:
    """A replica that asks to be let in."""

    member: int
    last: int  # the number of the epoch that it was in before, 0 for none
    has_state: bool  # it has what members have in common, as they had it then


def part_of(store: Any, name: str) -> Any:
    """Return the part of a c10d store that has keys of its own."""
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def read(store: Any, key: str) -> str:
    """Return what is under a key, empty if nothing is: `get` would wait, if another one deletes the key meanwhile.

    No value is ever empty, as torch's store without libuv takes 0.2 s to give that back.
    """
    text = store.compare_set(key, _NONE, _NONE).decode()
    return "" if text == _NONE else str(text)


Note: TypeAlias = Literal["name", "machine", "gone", "stopped", "in", "left"]


class LauncherNotes:
    """What launchers say of the processes that they have started, by the ids of the members, and members of themselves.

        name, machine      how a member is called; which launcher looks after it, if any does
        gone, stopped      how its process has ended; there while it is stopped
        in, left           there once it has been in an epoch; why it takes no part any more, `done` if its work is
        beat               how often the launcher of a machine has given a sign
        ids, ends          how many there have been, of all members; of these how many processes have ended
        launchers          how many are at work
        events             lines that the first launcher has yet to print

    Args:
        store: a c10d store that all of them share.
    """

    def __init__(self, store: Any) -> None:
        self.store = store

    def note(self, what: Note, member: int, text: str = "1") -> None:
        self.store.set(f"{what}/{member}", text)

    def noted(self, what: Note, member: int) -> str:
        return read(self.store, f"{what}/{member}")

    def forget(self, member: int, *what: Note) -> None:
        for key in what or [*get_args(Note), "loops"]:
            self.store.delete_key(f"{key}/{member}")

    def count(self, what: str, change: int = 0) -> int:
        """Add to a number, and return it."""
        return int(self.store.add(what, change))

    def note_end(self, member: int, how: str) -> None:
        self.note("gone", member, how)
        self.count("ends", 1)

    def name_of(self, member: int) -> str:
        return self.noted("name", member) or f"member {member}"

    def tell(self, event: str) -> None:
        self.store.append("events", f"{event}\n")

    def take_told(self) -> list[str]:
        """Return the lines that were told since the last call."""
        text = read(self.store, "events")
        while (now := self.store.compare_set("events", text, "\n").decode()) != "\n":
            text = now  # another line came meanwhile
        return [line for line in text.split("\n") if line]


class MemberStore:
    """What the members of one outer loop tell each other.

        epoch                        the current `Record`
        applicant                    those who ask to be let in, by the number of their question
        e<epoch>/<what>/<member>     what a member has said last in an epoch
        e<epoch>/broken              why the epoch is over, as a collective in it can't end; the first reason stays

    Args:
        store: for this loop alone.
    """

    def __init__(self, store: Any) -> None:
        self.store = store

    def record(self) -> Record | None:
        text = read(self.store, "epoch")
        return Record.decode(text) if text else None

    def replace(self, now: Record | None, by: Record) -> bool:
        """Put another epoch in the place of the current one, unless that is not `now` any more."""
        text = by.encode()
        return bool(self.store.compare_set("epoch", "" if now is None else now.encode(), text).decode() == text)

    def apply(self, asks: Applicant) -> None:
        self.store.set(f"applicant/{self.store.add('applicants', 1)}", repr(astuple(asks)))

    def num_applied(self) -> int:
        return int(self.store.add("applicants", 0))

    def applicants(self, since: int) -> dict[int, Applicant]:
        """Return the applicants numbered above `since`, by number."""
        texts = self._texts({number: f"applicant/{number}" for number in range(since + 1, self.num_applied() + 1)})
        return {number: Applicant(*literal_eval(text)) for number, text in texts.items()}

    def forget_applicants(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.store.delete_key(f"applicant/{number}")

    def say(self, epoch: int, what: str, member: int, text: str) -> None:
        self.store.set(f"e{epoch}/{what}/{member}", text)

    def have_said(self, epoch: int, what: str, members: Iterable[int]) -> bool:
        return bool(self.store.check([f"e{epoch}/{what}/{member}" for member in members]))

    def said(self, epoch: int, what: str, members: Iterable[int]) -> dict[int, str]:
        return self._texts({member: f"e{epoch}/{what}/{member}" for member in members})

    def _texts(self, keys: Mapping[int, str]) -> dict[int, str]:
        return {number: text for number, key in keys.items() if (text := read(self.store, key))}

    def mark_broken(self, epoch: int, reason: str) -> None:
        self.store.compare_set(f"e{epoch}/broken", "", reason)

    def broken(self, epoch: int) -> str:
        return read(self.store, f"e{epoch}/broken")

    def forget_before(self, epoch: int) -> None:
        """Delete the entries of earlier epochs."""
        for key in self.store.list_keys():
            found = _OF_EPOCH.match(key)
            if found and int(found[1]) < epoch:
                self.store.delete_key(key)
