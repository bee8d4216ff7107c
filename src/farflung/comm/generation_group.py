# SPDX-License-Identifier: Apache-2.0
"""The members of a generation as a `Group`: a process group of their own, whose end is nobody else's.

torch's default world knows nothing of it, so a lost member takes nothing else along. A wait that fails closes this
rank's connections, which ends the waits of others in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch.distributed as dist

from farflung.base.errors import RankFailure
from farflung.base.torch_internals import bare_group
from farflung.comm.board import Board
from farflung.comm.c10d_group import C10dGroup, transport_said
from farflung.comm.group import Group


class Entered(NamedTuple):
    """A collective that this rank has started: which one, of how many bytes."""

    place: str
    nbytes: int


class Watch(Protocol):
    """What the groups of a generation ask while they wait."""

    connect_s: float  # how long members wait for each other's connections

    def look(self, entered: Entered, waited_s: float) -> None:
        """Raise RankFailure where this wait can't end."""

    def note_end(self, entered: Entered, waited_s: float) -> None:
        """Record a completed wait."""

    def break_off(self, reason: str) -> RankFailure:
        """Tell all members that the generation is over, and return that as an error."""

    def retire(self, group: dist.ProcessGroup) -> None:
        """Let go of a process group, later: a thread of gloo's may want Python's lock for what it has just ended."""


class GenerationGroup(C10dGroup):
    """Members of a generation. They connect when they first send something.

    Args:
        board: for this generation alone.
        name: the same for its members, and for no other group of the generation.
    """

    is_concurrent = True

    def __init__(self, board: Board, name: str, rank: int, size: int, watch: Watch) -> None:
        self.rank, self.size = rank, size
        self.supported = {"cpu", *(("cuda",) if dist.is_nccl_available() else ())}
        self._board, self._name, self._watch = board, name, watch
        self._connected: dist.ProcessGroup | None = None
        self._num_entered = self._num_made = 0

    @property
    def pg(self) -> dist.ProcessGroup:
        """The process group; RankFailure where some members did not come."""
        if self._connected is None:
            try:
                store = self._board.lend(self._name)
                self._connected = bare_group(store, self.rank, self.size, self._watch.connect_s)
            except RuntimeError as error:
                raise self.failure(error) from None
        return self._connected

    def enter(self, kind: str, nbytes: int) -> Entered:
        self._num_entered += 1
        return Entered(f"{self._name}#{self._num_entered}", nbytes)

    @contextmanager
    def watching(self, entered: Entered) -> Iterator[Callable[[], None]]:
        began = time.monotonic()
        yield lambda: self._watch.look(entered, time.monotonic() - began)
        self._watch.note_end(entered, time.monotonic() - began)

    def failure(self, error: RuntimeError) -> RankFailure:
        self.abort()
        return self._watch.break_off(f"the transport said: {transport_said(error)}")

    def abort(self) -> None:
        if self._connected is not None:
            super().abort()

    def duplicate(self, in_background: bool = False) -> Group:
        self._num_made += 1
        return GenerationGroup(self._board, f"{self._name}.{self._num_made}", self.rank, self.size, self._watch)

    def _block(self, begin: int, end: int) -> Group:
        self._num_made += 1
        name = f"{self._name}.{self._num_made}-{begin}"
        return GenerationGroup(self._board, name, self.rank - begin, end - begin, self._watch)

    def free(self, reusable: bool = True) -> None:
        if not reusable:
            self.abort()
        if self._connected is not None:
            self._watch.retire(self._connected)
            self._connected = None

    def leave(self, reason: str, for_good: bool = False) -> None:
        self._watch.break_off(reason)
        self.abort()

    def raise_if_broken(self) -> None:
        self._watch.look(Entered("", 0), 0.0)
