# SPDX-License-Identifier: Apache-2.0
"""One iteration of a prepared loader, and what it has read but not handed out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from farflung.checkpoint import rng
from farflung.data.iterable import Marked
from farflung.data.resume.plain import plain_or_none
from farflung.data.resume.position import Position, RandomStates, set_generators
from farflung.data.resume.workers import WorkerHistory
from farflung.data.torch_loaders import reads_indices

NOTHING: Any = object()  # where there is no batch


@dataclass(eq=False, repr=False)
class Iteration:
    """One iteration of a prepared loader: what the training loop knows it by, also where two go on at a time."""

    loader: Any
    epoch: int
    skip: int  # batches that it leaves out at its beginning
    start: RandomStates  # in which it began
    has_workers: bool  # persistent ones were there when it began
    name: str | None  # by which all ranks that iterate the loaders of one run alike call it; None: it is in no run
    resumed_at: Position | None  # where it goes on, if it does not begin at the beginning
    now: RandomStates  # with which training goes on behind `resumed_at`
    num_batches: int = 0  # that it has handed out
    end_of_dataloader: bool = False  # as of `PreparedLoader`
    remainder: int = 0  # as of `PreparedLoader`
    prefetched: Any = NOTHING  # what was read but not handed out: a batch, or the rounds of a dispatching loader
    first: Any = None  # the first round of a dispatching loader
    source: Any = None  # the iterator that batches are read from
    history: WorkerHistory | None = None  # of workers whose random states are recorded

    def __len__(self) -> int:
        return len(self.loader)

    def arrive(self) -> None:
        """Go on with the random states of the training; the generators of the loader stay as the start left them.

        Those of a stream whose state was loaded go on too: it does not draw again what it drew before.
        """
        base, position = self.loader.base_dataloader, self.resumed_at
        rng.write(self.now.host)
        if position is not None and position.dataset is not None and not reads_indices(base):
            set_generators(base, self.now.generators)

    @property
    def position(self) -> str | None:
        """Which batch is in hand, where ranks may have different numbers of them and so come to differ in it."""
        return f"batch {self.num_batches} of epoch {self.epoch}" if self.loader.may_be_uneven else None


def pack_batch(prefetched: Any) -> tuple[int, Any]:
    """Return how many batches were prefetched, and the one as plain data; None: it is none."""
    if prefetched is NOTHING:
        return 0, None
    batch, real = prefetched if type(prefetched) is Marked else (prefetched, 0)
    content = plain_or_none(batch)
    return 1, None if content is None else {"content": content, "real": real}


def unpack_batch(saved: dict[str, Any]) -> Any:
    """Undo `pack_batch`."""
    return Marked(saved["content"], saved["real"]) if saved["real"] else saved["content"]


def pack_rounds(prefetched: Any) -> tuple[int, Any]:
    """Return how many rounds were prefetched, and those as plain data; None: they are none."""
    rounds = [] if prefetched is NOTHING else prefetched
    packed = [([None if part is NOTHING else [part] for part in parts], real) for parts, real in rounds]
    return len(rounds), plain_or_none(packed)


def unpack_rounds(saved: Any) -> list[tuple[list[Any], int]]:
    """Undo `pack_rounds`."""
    return [([NOTHING if part is None else part[0] for part in parts], real) for parts, real in saved]
