# SPDX-License-Identifier: Apache-2.0
"""The iterations of a loader: what is known of one that is under way, and how they are counted."""

from __future__ import annotations

from typing import Any

from farflung.data.place import Place, Resumption, Start
from farflung.data.workers import Log, States

NOTHING = object()  # where there is no batch


class Pass:
    """One iteration of a prepared loader: what the training loop knows it by, also where two go on at a time.

    Attributes:
        loader: the loader that is iterated.
        epoch: the number of this iteration.
        num_batches: how many it has handed out.
        end_of_dataloader, remainder: see `PreparedLoader`, of this iteration alone.
        skip: batches that it leaves out at its beginning.
        start: the random states in which it began.
        resumption: where it goes on, if it does not begin at the beginning.
        ahead: what was read but not handed out: a batch, or the rounds of a dispatching loader.
        first: the first round of a dispatching loader.
        source: the iterator that batches are read from.
        log: of workers whose random numbers are noted.
        warm: persistent workers were there when it began.
    """

    __slots__ = (
        "ahead",
        "end_of_dataloader",
        "epoch",
        "first",
        "loader",
        "log",
        "num_batches",
        "remainder",
        "resumption",
        "skip",
        "source",
        "start",
        "warm",
    )

    def __init__(self, loader: Any, epoch: int, skip: int, start: Start, resumption: Resumption | None = None) -> None:
        self.loader = loader
        self.epoch = epoch
        self.num_batches = 0
        self.end_of_dataloader = False
        self.remainder = 0
        self.skip = skip
        self.start = start
        self.resumption = resumption
        self.ahead: Any = NOTHING
        self.first: Any = None
        self.source: Any = None
        self.log: Log | None = None
        self.warm = False

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def place(self) -> str | None:
        """Which batch is in hand, where ranks may have different numbers of them and so come to differ in it."""
        return f"batch {self.num_batches} of epoch {self.epoch}" if self.loader.may_be_uneven else None


class Epochs:
    """Counts the iterations of a loader and of its copies that skip batches.

    Attributes:
        number: the epoch of the iteration that is under way, or of the next one when none is.
        newest: the iteration that began last.
        place: where the next iteration goes on, once a state was loaded.
        chosen: the epoch that was chosen for it, where nothing is left of the one of `place`.
        under_way: an iteration of epoch `number` has begun; it may have been broken off.
        warm: persistent workers were started, so that starting them draws no seed any more.
        drawn: the random states with which they begin the next iteration, None: as they start by themselves.
        is_loaded: a state was loaded, and workers that are there know nothing of it.
    """

    def __init__(self) -> None:
        self.number = 0
        self.under_way = False
        self.newest: Pass | None = None
        self.place: Place | None = None
        self.chosen: int | None = None
        self.warm = False
        self.drawn: list[States] | None = None
        self.is_loaded = False

    def start(self, goes_on: bool = False) -> int:
        """Begin the next epoch, also when the one before was broken off, or go on with it; return its number."""
        if self.under_way and not goes_on:
            self.number += 1
        self.under_way = True
        return self.number

    def finish(self, number: int) -> None:
        """Note that epoch `number` came to its end."""
        if self.under_way and number == self.number and self.place is None:
            self.choose(number + 1)

    def choose(self, number: int) -> None:
        """Let the next iteration be epoch `number`. A place to go on stays if it is in that one."""
        if self.place is not None and number != self.number:
            if self.place.ended:
                self.chosen = number
                return
            self.place = None
        self.chosen = None
        self.number = number
        self.under_way = False
