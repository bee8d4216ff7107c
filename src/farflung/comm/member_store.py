# SPDX-License-Identifier: Apache-2.0
"""What the members of an elastic run and their launchers tell each other, in one c10d store.

The store alone decides who takes part: one key holds the current epoch, and it is replaced only by compare-and-set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

_NONE = "-"  # no value of a key
_OF_EPOCH = re.compile(r"e(\d+)/")


@dataclass(frozen=True)
class Record:
    """An epoch as the store has it.

    Attributes:
        number: 1 for the first one.
        by: who has put it there.
        ids: of its members, in the order of their ranks.
        newcomers: the ids of those that get what the others have in common.
        common: of rounds that were under way, how many buckets all members apply, by vote.
        past: the number of the first vote that no member has had yet.
        lost: why members of the epoch before are not in it, by id.
    """

    number: int
    by: int
    ids: tuple[int, ...]
    newcomers: tuple[int, ...] = ()
    common: Mapping[int, int] = field(default_factory=dict)
    past: int = 0
    lost: Mapping[int, str] = field(default_factory=dict)

    def encode(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Record:
        """Return what `encode` made a text of."""
        said = json.loads(text)
        common = {int(vote): number for vote, number in said.pop("common").items()}
        lost = {int(one): why for one, why in said.pop("lost").items()}
        ids, newcomers = tuple(said.pop("ids")), tuple(said.pop("newcomers"))
        return cls(ids=ids, newcomers=newcomers, common=common, lost=lost, **said)


@dataclass(frozen=True)
class Applicant:
    """A replica that asks to be let in.

    Attributes:
        last: the number of the epoch that it was in before, 0 for none.
        has_state: it has what members have in common, as they had it then.
    """

    member: int
    last: int
    has_state: bool


def part_of(store: Any, name: str) -> Any:
    """Return the part of a c10d store that has keys of its own."""
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def read(store: Any, key: str) -> str:
    """Return what is under a key, empty if nothing is: `get` would wait, if another one deletes the key meanwhile.

    No value is ever empty, as torch's store without libuv takes 0.2 s to give that back.
    """
    text = store.compare_set(key, _NONE, _NONE).decode()
    return "" if text == _NONE else str(text)


class LauncherNotes:
    """What launchers say of the processes that they have started, by the ids of the members.

    Args:
        store: a c10d store that all of them share.
    """

    def __init__(self, store: Any) -> None:
        self.store = store

    def new_id(self) -> int:
        """Return an id that no member has had."""
        return int(self.store.add("ids", 1))

    def name(self, member: int, name: str, machine: str) -> None:
        """Say how a member is called, and which launcher looks after it; none does if that is empty."""
        self.store.set(f"name/{member}", name)
        if machine:
            self.store.set(f"machine/{member}", machine)

    def name_of(self, member: int) -> str:
        """Return how a member is called."""
        return read(self.store, f"name/{member}") or f"member {member}"

    def machine_of(self, member: int) -> str:
        """Return which launcher looks after a member; empty if none does."""
        return read(self.store, f"machine/{member}")

    def note_end(self, member: int, how: str) -> None:
        """Say that a member's process has ended, and how."""
        self.store.set(f"gone/{member}", how)
        self.store.add("ends", 1)

    def num_ends(self) -> int:
        """Return how many processes have ended."""
        return int(self.store.add("ends", 0))

    def end_of(self, member: int) -> str:
        """Return how a member's process has ended; empty if it has not, as far as is known."""
        return read(self.store, f"gone/{member}")

    def note_stopped(self, member: int, is_stopped: bool) -> None:
        """Say whether a member's process is stopped."""
        if is_stopped:
            self.store.set(f"stopped/{member}", "1")
        else:
            self.store.delete_key(f"stopped/{member}")

    def is_stopped(self, member: int) -> bool:
        """Whether a member's process is stopped, as far as is known."""
        return bool(read(self.store, f"stopped/{member}"))

    def beat(self, machine: str) -> None:
        """Count a heartbeat of the launcher of a machine."""
        self.store.add(f"beat/{machine}", 1)

    def beats_of(self, machine: str) -> int:
        """Return how many heartbeats there were."""
        return int(self.store.add(f"beat/{machine}", 0))

    def count_launchers(self, change: int) -> int:
        """Add to the number of launchers at work, and return it."""
        return int(self.store.add("launchers", change))

    def forget(self, member: int) -> None:
        """Delete all entries of a member."""
        for key in ("name", "machine", "gone", "stopped", "left", "in", "loops"):
            self.store.delete_key(f"{key}/{member}")

    # ---- what members say

    def note_in(self, member: int) -> None:
        """Say that a member has been in an epoch."""
        self.store.set(f"in/{member}", "1")

    def was_in(self, member: int) -> bool:
        """Whether a member has been in an epoch."""
        return bool(read(self.store, f"in/{member}"))

    def note_left(self, member: int, reason: str) -> None:
        """Say that a member takes no part any more: with a reason, or as its work is done."""
        self.store.set(f"left/{member}", reason or "done")

    def left(self, member: int) -> str:
        """Return why a member takes no part any more, `done` if its work is; empty if it does."""
        return read(self.store, f"left/{member}")

    def tell(self, event: str) -> None:
        """Add a line to what the first launcher prints."""
        self.store.append("events", f"{event}\n")

    def take_told(self) -> list[str]:
        """Return the lines that were added since the last call."""
        text = read(self.store, "events")
        while (now := self.store.compare_set("events", text, "\n").decode()) != "\n":
            text = now  # another line came meanwhile
        return [line for line in text.split("\n") if line]


class MemberStore:
    """What the members of one outer loop tell each other.

    Args:
        store: for this loop alone.
    """

    def __init__(self, store: Any) -> None:
        self.store = store

    def record(self) -> Record | None:
        """Return the current epoch; None before the first one."""
        text = read(self.store, "epoch")
        return Record.decode(text) if text else None

    def replace(self, now: Record | None, by: Record) -> bool:
        """Put another epoch in the place of the current one, unless that is not `now` any more."""
        text = by.encode()
        return bool(self.store.compare_set("epoch", "" if now is None else now.encode(), text).decode() == text)

    def apply(self, asks: Applicant) -> None:
        """Ask to be let in."""
        self.store.set(f"applicant/{self.store.add('applicants', 1)}", json.dumps(asdict(asks)))

    def num_applied(self) -> int:
        """Return how often anyone has asked to be let in."""
        return int(self.store.add("applicants", 0))

    def applicants(self, since: int) -> dict[int, Applicant]:
        """Return those that asked after so many, by the number of their question."""
        keys = {number: f"applicant/{number}" for number in range(since + 1, self.num_applied() + 1)}
        texts = {number: read(self.store, key) for number, key in keys.items()}
        return {number: Applicant(**json.loads(text)) for number, text in texts.items() if text}

    def forget_applicants(self, numbers: Iterable[int]) -> None:
        """Delete questions that were answered."""
        for number in numbers:
            self.store.delete_key(f"applicant/{number}")

    def say(self, epoch: int, what: str, member: int, text: str) -> None:
        """Publish something of a member in an epoch, in place of what it said before."""
        self.store.set(f"e{epoch}/{what}/{member}", text)

    def have_said(self, epoch: int, what: str, members: Iterable[int]) -> bool:
        """Whether all these members have published something in an epoch."""
        return bool(self.store.check([f"e{epoch}/{what}/{member}" for member in members]))

    def said(self, epoch: int, what: str, members: Iterable[int]) -> dict[int, str]:
        """Return what members have published in an epoch."""
        keys = {member: f"e{epoch}/{what}/{member}" for member in members}
        texts = {member: read(self.store, key) for member, key in keys.items()}
        return {member: text for member, text in texts.items() if text}

    def mark_broken(self, epoch: int, reason: str) -> None:
        """Say that an epoch is over, as a collective in it can't end. The first reason stays."""
        self.store.compare_set(f"e{epoch}/broken", "", reason)

    def broken(self, epoch: int) -> str:
        """Return why an epoch is over; empty if it is not."""
        return read(self.store, f"e{epoch}/broken")

    def forget_before(self, epoch: int) -> None:
        """Delete the entries of earlier epochs, if the store can list its keys."""
        for key in self.store.list_keys() if hasattr(self.store, "list_keys") else ():
            found = _OF_EPOCH.match(key)
            if found and int(found[1]) < epoch:
                self.store.delete_key(key)
