# SPDX-License-Identifier: Apache-2.0
"""A replica's view of the others: which take part, which are alive, how long it waits for a late one, and whether one
that asks to be admitted trains the same thing."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from farflung.address.member_store import Heartbeats, LauncherNotes, MemberStore, Record
from farflung.address.transport import Transport
from farflung.base.errors import RankFailure
from farflung.base.optional import installed_version
from farflung.base.words import in_seconds
from farflung.exchanged.structure import text_of
from farflung.votes.generation import Needs

_GAPS = 2  # times between two rounds, for which a late one is awaited by default: a machine 3 times slower is kept
_NOTICE_PAUSES = 20  # of the board, after which one that has come knows that the generation has broken
_SOON_S = 2.0  # for an answer
_READY_S = 5.0  # a newcomer that is admitted looks for it many times a second
_HOLDER_GRACES = 20  # how long replicas without a state wait for the one that holds the trained state
_SLOWEST_BPS = 125_000  # bytes per second; slower values count as lost, until a speed was measured

_PROTOCOL = 5  # of what replicas say to each other; other numbers don't understand it
_SETTINGS = ("protocol", "processes in a replica", "outer loop", "data")
_TENSORS_SHOWN = 5
_PARTS = "parts"  # of a description: those of its settings


class MissingMembers(NamedTuple):
    """Members that had not come to a collective when this replica last looked: which one, and since when it waits."""

    place: str
    note: str  # by which each member records its own place
    members: Sequence[int]
    since: float


class Peers:
    """The members of one outer loop, as one of them sees them.

    Args:
        loop: the name of the outer loop, whose own keys begin with it.
        grace_s: see `Elastic`.

    Attributes:
        record: the generation that this replica is in, or was in last.
        check: raises Unreachable once another run has begun in the place of this one.
        needs_store: rounds can't continue without the run's store, as values travel through it.
        at_once: `members`, for questions that training must not wait for.
        members_soon, notes_soon, heartbeats_soon: the same for waits that have a limit of their own, and ask again.
        awaited: whom this replica waits for, or waited for when the generation broke.
        is_admitting: newcomers of this generation may still be on their way into it.
        slowest_bps: values that arrive at fewer bytes per second count as lost, after `grace_s`.
    """

    def __init__(self, transport: Transport, loop: str, grace_s: float | None) -> None:
        self.check, self.needs_store, board = transport.check, transport.is_lasting, transport.board
        own = board.part(loop)
        self.loop = loop
        self.notes = LauncherNotes(board)
        self.heartbeats = Heartbeats(self.notes, loop)
        self.members_soon, self.notes_soon = MemberStore(own.patient(_SOON_S)), LauncherNotes(board.patient(_SOON_S))
        self.heartbeats_soon = self.heartbeats.over(self.notes_soon)
        self.members, self.at_once = MemberStore(own), MemberStore(own.patient(0))
        self.pause_s = board.pause_s
        self.record: Record | None = None
        self.is_admitting = False
        self.awaited: MissingMembers | None = None
        self.slowest_bps = float(_SLOWEST_BPS)
        self._grace_s = grace_s
        self._last_round_at, self._gap_s = time.monotonic(), 0.0

    @property
    def grace_s(self) -> float:
        """How many seconds the others wait for a replica that is late."""
        return max(self.notes.board.grace_s, _GAPS * self._gap_s) if self._grace_s is None else self._grace_s

    def expect_round(self, seconds: float) -> None:
        """Take the next round to be as long as one before it was."""
        self._gap_s = seconds

    def note_round(self) -> None:
        """Record that a round begins."""
        now = time.monotonic()
        self._gap_s, self._last_round_at, self.is_admitting = now - self._last_round_at, now, False

    def limit_s(self, member: int) -> float:
        """Return how many seconds others wait for a member that is late."""
        return min(self.grace_s, _READY_S) if self._is_on_its_way(member) else self.grace_s

    def cause(self, member: int, waited_s: float, trains: bool = True) -> str:
        """Return why the others stop waiting for a member that has not come; empty while they wait.

        Args:
            trains: it may be on its way to its next round, and know nothing of the wait before.
        """
        if ended := self.heartbeats.ended(member):
            return ended
        if silent_s := self.heartbeats.silent_s(member):
            return f"its machine gave no sign for {in_seconds(silent_s)}"
        # Others that wait for a third one may be taken for late, too; these come at once.
        if waited_s > _SOON_S and self.record is not None and self.members.get(self.record.number, "late", [member]):
            return f"it was late by more than {in_seconds(self.limit_s(member))}"
        if waited_s > self.grace_s and self.notes.get("stopped", member):
            return f"its process is stopped, and {in_seconds(self.grace_s)} are over"
        more_s = self._gap_s if trains else _NOTICE_PAUSES * self.pause_s
        if waited_s > self.limit_s(member) + (0 if self._is_on_its_way(member) else more_s):
            return f"it did not come within {in_seconds(waited_s)}"
        return ""

    def mark_late(self) -> None:
        """Record who was late when the generation broke, and has had the time that it would have had without that."""
        if self.record is None or self.awaited is None:
            return
        number, waited_s = self.record.number, time.monotonic() - self.awaited.since
        notice_s = _NOTICE_PAUSES * self.pause_s
        late = [one for one in self.awaited.members if waited_s > self.limit_s(one) + notice_s]
        places = self.members.get(number, self.awaited.note, late)
        late = [one for one in late if places.get(one) != self.awaited.place]
        self.members.board.map(lambda one: self.members.put(number, "late", one), late)

    def causes(self, waited_s: Mapping[int, float], trains: bool = True) -> dict[int, str]:
        """Return the `cause` of each member that others have waited for."""
        found = self.notes.board.map(lambda row: self.cause(*row, trains), waited_s.items())
        return dict(zip(waited_s, found, strict=True))

    def _is_on_its_way(self, member: int) -> bool:
        """Return whether a newcomer was admitted a moment ago, and has made no round yet."""
        return self.is_admitting and self.record is not None and member in self.record.newcomers

    # ---- replicas that hold the trained state

    def may_hold(self, record: Record, member: int) -> bool:
        """Return whether a member may hold the trained state: one that had none gets it only once all are ready."""
        had_nothing = member in (record.ids if record.is_fresh else record.newcomers)
        return not had_nothing or bool(self.members.get(record.number, "ready", [member]))

    def describe_missing(self, holders: Mapping[int, str]) -> str:
        """Return a text that names the only replicas that hold the trained state, and why they are silent."""
        named = "; ".join(f"{self.notes.name_of(one)}: {why}" for one, why in holders.items())
        return f"no other replica has the trained state ({named})"

    def await_holders(self, holders: Mapping[int, str], waited_s: float) -> None:
        """Raise RankFailure once the only replicas that hold the trained state were away for too long."""
        if waited_s > _HOLDER_GRACES * self.grace_s:
            raise RankFailure(
                f"No replica with the trained state has come for {in_seconds(waited_s)}: "
                f"{self.describe_missing(holders)}. Training from the beginning would lose it. Start the run again "
                "from its newest checkpoint."
            )


# ---- comparing a newcomer: settings must be equal, other versions and another script are only reported


def versions() -> dict[str, str]:
    """Return the versions, the script and the arguments of this process."""
    script = Path(sys.argv[0]) if sys.argv else Path()
    content = script.read_bytes() if script.is_file() else b""
    return {
        "Farflung": installed_version("farflung") or "unknown",  # it runs from its sources
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "script": f"{script.name} ({hashlib.blake2b(content, digest_size=4).hexdigest()})",
        "arguments": " ".join(sys.argv[1:]),
    }


def description_of(needs: Needs, island_size: int, data: list[str], versions: Mapping[str, str]) -> str:
    """Return the description of a replica that asks to be admitted, as JSON."""
    values = (_PROTOCOL, island_size, text_of(needs.settings), ", ".join(data))
    parts = {"outer loop": [part for group in needs.settings for part in group], "data": data}
    return json.dumps({**dict(zip(_SETTINGS, values, strict=True)), **versions, _PARTS: parts})


def unlike(theirs: str, mine: str) -> str:
    """Return the settings in which a replica that asks differs, with both values; empty if it may be admitted."""
    there, here = json.loads(theirs), json.loads(mine)
    odd = [name for name in _SETTINGS if there.get(name) != here.get(name)]
    return "; ".join(
        f"its {name} is {_apart(name, there, here)}; the run's is {_apart(name, here, there)}" for name in odd
    )


def unlike_tensors(theirs: Iterable[str], mine: Iterable[str]) -> str:
    """Return the first of the tensors that only their model has, or only ours."""
    odd = [f"it alone has {line}" for line in sorted(theirs)] + [f"the run alone has {line}" for line in sorted(mine)]
    return "; ".join(odd[:_TENSORS_SHOWN] + ([f"and {len(odd) - _TENSORS_SHOWN} more"] if odd[_TENSORS_SHOWN:] else []))


def other_versions(theirs: str, mine: str) -> str:
    """Return all other differences, which do no harm by themselves."""
    there, here = json.loads(theirs), json.loads(mine)
    odd = [name for name in {**here, **there} if name not in (*_SETTINGS, _PARTS) and there.get(name) != here.get(name)]
    return "; ".join(f"{name}: {str(there.get(name))!r} instead of {str(here.get(name))!r}" for name in odd)


def _apart(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the parts of a setting that only `one` description has; all of the setting if it has no parts."""
    mine, others = (each.get(_PARTS, {}).get(name, []) for each in (one, other))
    return ", ".join(part for part in mine if part not in others) or str(one.get(name))
