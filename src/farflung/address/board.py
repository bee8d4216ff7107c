# SPDX-License-Identifier: Apache-2.0
"""Records that the replicas and launchers of a run share, and logs of decisions; a transport says where they lie."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Protocol, TypeVar

from farflung.address.seal import Seal
from farflung.base.errors import Unreachable

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")

_FORGET_EVERY = 8  # decisions
_LATE_S, _PAUSES = 10.0, 5  # how late a listing may be; pauses of the board between two


class Board(Protocol):
    """Records by key. A request returns its answer, or raises `Unreachable` and nothing else.

    The protocol is small enough for a key-value server, a folder and a bucket: it has no counters, no appends and no
    compare-and-set. `Log` builds decisions on `put_new`.

    Attributes:
        heartbeat_s: how often a launcher writes its heartbeat there, in seconds.
        grace_s: how long the others wait for a replica that is late, if no setting says so.
        seal: of the run's key, which seals what is written and opens what is read; None: it has none.
    """

    seal: Seal | None = None

    heartbeat_s: ClassVar[float] = 0.5
    grace_s: ClassVar[float] = 30.0

    @property
    def pause_s(self) -> float:
        """How many seconds to wait between two reads of what others write."""

    def put(self, key: str, value: bytes) -> None:
        """Write a value, which must not be empty, over any earlier one; others may see it a moment later."""

    def put_new(self, key: str, value: bytes) -> bool:
        """Write a value unless the key has one; return whether the key has this value afterwards.

        A request may be sent twice, if an answer was lost. So competing writers must write different values.
        """

    def get(self, key: str) -> bytes | None:
        """Return the value of a key; None if it has none."""

    def has(self, keys: Iterable[str]) -> bool:
        """Return whether all of these keys exist, in one request: members that wait for each other poll it."""

    def delete(self, *keys: str) -> None:
        """Delete those of these records that exist, in any order and in one request if that can be."""

    def silent_s(self) -> float:
        """Return for how many seconds a request of any part has had no answer; 0: none waits, and the last one had."""
        return 0.0

    def part(self, name: str) -> Board:
        """Return the keys that begin with this name and a slash, as a board of their own."""

    def patient(self, seconds: float) -> Board:
        """Return the same board for callers that wait up to `seconds` for an answer; 0: one attempt."""

    def list(self, prefix: str) -> Sequence[str]:
        """Return the keys that begin with a prefix."""

    def map(self, ask: Callable[[_Item], _Found], items: Iterable[_Item]) -> Sequence[_Found]:
        """Return what `ask`, which makes requests, returns for each item; where answers take long, for many at a time.

        What it takes to ask about a member thus does not grow with their number.
        """
        return [ask(item) for item in items]


def vanished(key: str) -> Unreachable:
    """Return the error for a record that was there and is not, though no member or launcher has deleted it."""
    return Unreachable(
        f"Records of the run have vanished: {key} was written, and is not there any more. Did something purge old "
        "files, or a lifecycle rule old objects?",
        is_gone=True,
    )


def forget(board: Board, prefix: str) -> None:
    """Delete all keys that begin with a prefix."""
    board.delete(*board.list(prefix))


def numbers_below(board: Board, name: str) -> list[int]:
    """Return the numbers of the keys `<name>/<number>`. Others may have put something else there, such as copies."""
    found = (key.rpartition("/")[2] for key in board.list(f"{name}/"))
    return [int(number) for number in found if number.isdecimal()]


class Log:
    """Decisions, each of which replaces the one before: the record with the highest number counts.

    Each number can be written once, so one of several concurrent writers decides. Old records are deleted in the order
    of their numbers. So a reader that finds no record after the one it knows, and then finds that one unchanged, knows
    the latest one. A writer that has written a record, and then finds the one before it unchanged, has not rewritten a
    deleted one. Record 0 is written before others are deleted, for readers that know of no record.

    A listing may be late, so the latest record is looked for by name after the latest one that it shows. If records
    vanish that no writer deletes (a purge, a lifecycle rule), `Unreachable` says so: a log never begins again.

    Args:
        name: of the log; its keys are `<name>/<number>`.
        keep: how many records to keep. A writer that is overtaken by so many decisions between two requests does not
            learn that its own one counted, so give more than the number of concurrent writers.
    """

    def __init__(self, board: Board, name: str, keep: int = 16) -> None:
        self._board, self._name, self._keep = board, name, keep
        self._known: tuple[int, bytes | None] = 0, None

    def last(self) -> tuple[int, bytes | None]:
        """Return the number and the value of the latest decision; 0 and None if there is none yet."""
        number, value = self._known
        if self.get(number + 1) is None and self.get(number) == value:
            return self._known
        until = time.monotonic() + _LATE_S
        while True:
            found = max((one for one in self._numbers() if one >= number), default=number)
            content = self.get(found)
            while (later := self.get(found + 1)) is not None:
                found, content = found + 1, later
            if found > number and content is not None:
                self._known = found, content
                return self._known
            if found == number and content == value:
                return self._known  # another writer had overwritten it for a moment
            if time.monotonic() > until:
                raise vanished(self._key(number))
            time.sleep(_PAUSES * self._board.pause_s)

    def renew(self) -> None:
        """Write the latest two decisions again, unless others have deleted them: a purge deletes what is old."""
        last, _ = self.last()
        rows = {number: self.get(number) for number in (0, last - 1, last) if number >= 0}
        for number, content in rows.items():
            if content is not None:
                self._board.put(self._key(number), content)
        if Log(self._board, self._name).last()[0] >= last + self._keep // 2:  # this process was stopped meanwhile
            self._board.delete(*(self._key(number) for number in rows if number))

    def get(self, number: int) -> bytes | None:
        """Return a decision, the latest or one before it; None if it is not there, or not any more."""
        return self._board.get(self._key(number))

    def append(self, after: int, value: bytes) -> bool:
        """Append a decision, unless there is one after the number `after`; return whether it counts."""
        known, before = self._known if self._known[0] == after else self.last()
        if known != after or not self._board.put_new(self._key(after + 1), value):
            return False
        if self.get(after) != before:
            self._board.delete(self._key(after + 1))
            return False
        self._known = after + 1, value
        if (after + 1) % _FORGET_EVERY == 0:
            self._board.put_new(self._key(0), b"forgotten")
            for number in sorted(self._numbers()):
                if 0 < number <= after + 1 - self._keep:
                    self._board.delete(self._key(number))
        return True

    def count(self) -> int:
        """Append a record without a decision; return its number, which no other caller gets."""
        while True:
            number, _ = self.last()
            if self.append(number, secrets.token_bytes(8)):
                return number + 1

    def _key(self, number: int) -> str:
        return f"{self._name}/{number}"

    def _numbers(self) -> list[int]:
        return numbers_below(self._board, self._name)
