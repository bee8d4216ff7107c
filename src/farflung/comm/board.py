# SPDX-License-Identifier: Apache-2.0
"""Records that the replicas and launchers of a run share, and logs of decisions; a transport says where they lie."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Protocol

_FORGET_EVERY = 8  # decisions


class Board(Protocol):
    """Records by key. A request has an answer, or ends with `Unreachable` and nothing else.

    So small that a server of keys, a folder and a bucket can all be one: no counters, nothing that is written behind
    what is there, no compare-and-set. `Log` makes decisions of `put_new`.
    """

    @property
    def pause_s(self) -> float:
        """How long to wait between two looks at what others write."""

    def put(self, key: str, value: bytes) -> None:
        """Write a value, which must not be empty, in place of what is there; others may see it a moment later."""

    def put_new(self, key: str, value: bytes) -> bool:
        """Write a value if nothing is there; return whether this value is there then.

        A request may be made twice, where an answer was lost. So writers who compete bring different values.
        """

    def get(self, key: str) -> bytes | None:
        """Return what is there; None if nothing is."""

    def has(self, keys: Iterable[str]) -> bool:
        """Whether all of these keys are there: one request, as those that meet ask it again and again."""

    def delete(self, key: str) -> None:
        """Forget a record, if it is there."""

    def part(self, name: str) -> Board:
        """Return the keys that begin with this name and a slash, as a board of their own."""

    def patient(self, seconds: float) -> Board:
        """Return the same keys for callers who wait so long for an answer; 0: one attempt."""

    def list(self, prefix: str) -> Sequence[str]:
        """Return the keys that begin with a prefix."""


def forget(board: Board, prefix: str) -> None:
    """Delete all keys that begin with a prefix."""
    for key in board.list(prefix):
        board.delete(key)


class Log:
    """Decisions, of which each replaces the one before: the record of the highest number counts.

    The next number can be written once, so of several who decide at a time one does. Old records are deleted in the
    order of their numbers. So who finds none behind the record that it knows, and then finds that record unchanged,
    knows the latest one; and who has written a record, and then finds the one before unchanged, has not written one
    again that was deleted. Record 0 is written before others are deleted, for those who know of none.

    Args:
        name: of the log; its keys are `<name>/<number>`.
        keep: how many records to keep. Who is outrun by so many decisions between two requests does not learn that its
            own one counted, so give more than writers may decide at a time.
    """

    def __init__(self, board: Board, name: str, keep: int = 16) -> None:
        self._board, self._name, self._keep = board, name, keep
        self._known: tuple[int, bytes | None] = 0, None

    def last(self) -> tuple[int, bytes | None]:
        """Return the number of the latest decision and what it is; 0 and None if there is none yet."""
        number, value = self._known
        if self._get(number + 1) is not None or self._get(number) != value:
            value = None
            while value is None:  # or else it was deleted meanwhile
                number = max(self._numbers())
                value = self._get(number)
            self._known = number, value
        return number, value

    def append(self, after: int, value: bytes) -> bool:
        """Decide, unless somebody has decided after the decision of the number `after`; return whether it counts."""
        known, before = self._known if self._known[0] == after else self.last()
        if known != after or not self._board.put_new(self._key(after + 1), value):
            return False
        if self._get(after) != before:
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
        """Append a record that says nothing; return its number, which nobody else gets."""
        while True:
            number, _ = self.last()
            if self.append(number, secrets.token_bytes(8)):
                return number + 1

    def _key(self, number: int) -> str:
        return f"{self._name}/{number}"

    def _get(self, number: int) -> bytes | None:
        return self._board.get(self._key(number))

    def _numbers(self) -> list[int]:
        return [int(key.rpartition("/")[2]) for key in self._board.list(f"{self._name}/")]
