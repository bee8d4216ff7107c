# SPDX-License-Identifier: Apache-2.0
"""The iterations of a loader: what is known of one that is under way, and how they are counted."""

from __future__ import annotations

from typing import Any

from farflung.data.position import Position, RandomStates, Resumption
from farflung.data.workers import States, WorkerHistory

NOTHING = object()  # where there is no batch


class Iteration:
    """One iteration of a prepared loader: what the training loop knows it by, also where two go on at a time.

    Attributes:
        loader: the loader that is iterated.
        epoch: the number of this iteration.
        num_batches: how many it has handed out.
        end_of_dataloader, remainder: see `PreparedLoader`, of this iteration alone.
        skip: batches that it leaves out at its beginning.
        start: the random states in which it began.
        resumption: where it goes on, if it does not begin at the beginning.
        prefetched: what was read but not handed out: a batch, or the rounds of a dispatching loader.
        first: the first round of a dispatching loader.
        source: the iterator that batches are read from.
        history: of workers whose random states are recorded.
        has_workers: persistent workers were there when it began.
        name: what all ranks that iterate the loaders of one run alike call it; None: the loader is in no run.
    """

    def __init__(
        self, loader: Any, epoch: int, skip: int, start: RandomStates, resumption: Resumption | None = None
    ) -> None:
        self.loader = loader
        self.epoch = epoch
        self.num_batches = 0
        self.end_of_dataloader = False
        self.remainder = 0
        self.skip = skip
        self.start = start
        self.resumption = resumption
        self.prefetched: Any = NOTHING
        self.first: Any = None
        self.source: Any = None
        self.history: WorkerHistory | None = None
        self.has_workers = False
        self.name: str | None = loader._epochs.next_name()

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def position(self) -> str | None:
        """Which batch is in hand, where ranks may have different numbers of them and so come to differ in it."""
        return f"batch {self.num_batches} of epoch {self.epoch}" if self.loader.may_be_uneven else None


class Epochs:
    """Counts the iterations of a loader and of its copies that skip batches.

    Attributes:
        number: the epoch of the iteration that is under way, or of the next one when none is.
        run_number: of the loader among those of its run; None: it is in none.
        newest: the iteration that began last.
        position: where the next iteration goes on, once a state was loaded.
        chosen: the epoch that was chosen for it, where nothing is left of the one of `position`.
        under_way: an iteration of epoch `number` has begun; it may have been broken off.
        has_workers: persistent workers were started, so that starting them draws no seed any more.
        worker_states: the random states with which they begin the next iteration; None: as they start by themselves.
        is_loaded: a state was loaded, and workers that are there know nothing of it.
    """

    def __init__(self) -> None:
        self.number = 0
        self.run_number: int | None = None
        self._passes = 0
        self.under_way = False
        self.newest: Iteration | None = None
        self.position: Position | None = None
        self.chosen: int | None = None
        self.has_workers = False
        self.worker_states: list[States] | None = None
        self.is_loaded = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "run_number": None, "newest": None}  # the copy is in no run and in no iteration

    def next_name(self) -> str | None:
        """Name one more iteration, of whatever epoch."""
        self._passes += 1
        return None if self.run_number is None else f"{self.run_number}/{self._passes}"

    def start(self, goes_on: bool = False) -> int:
        """Begin the next epoch, also when the one before was broken off, or go on with it; return its number."""
        if self.under_way and not goes_on:
            self.number += 1
        self.under_way = True
        return self.number

    def finish(self, number: int) -> None:
        """Note that epoch `number` came to its end."""
        if self.under_way and number == self.number and self.position is None:
            self.choose(number + 1)

    def choose(self, number: int) -> None:
        """Let the next iteration be epoch `number`. A position to go on from stays if it is in that one."""
        if self.position is not None and number != self.number:
            if self.position.ended:
                self.chosen = number
                return
            self.position = None
        self.chosen = None
        self.number = number
        self.under_way = False
