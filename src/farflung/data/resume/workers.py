# SPDX-License-Identifier: Apache-2.0
"""The random states of worker processes: recorded now and then, so that another run's workers continue from them.

Workers take turns: each makes one batch of a turn. They draw as long as they live, and when a state is taken they have
drawn for batches that the training has not got yet. So batches come with their worker's random states after them. A
worker that continues in the middle of an iteration repeats the batches since those states, and throws away the ones
that had been handed out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, get_worker_info

from farflung.base.events import Kind, record
from farflung.base.torch_internals import MAKE_ITERATOR, forget_workers, has_live_workers
from farflung.checkpoint import rng
from farflung.data.torch_loaders import Source
from farflung.process.world import current_world

_RECORD_EVERY_S = 0.005  # reading all states takes 60 us, and as much as this is made again
_FRESH = "fresh"  # what a worker has when it starts by itself

# The random states of a worker: bytes as they come from it, a dictionary as in a checkpoint, _FRESH, None: not known.
States = bytes | dict[str, Any] | str | None


class RecordedBatch(NamedTuple):
    """A batch, and the random states of its worker after it, if they were recorded."""

    content: Any
    states: bytes | None


@dataclass
class RecordingCollate:
    """A collate function that adds its worker's random states to a batch; `start` begins a worker."""

    collate_fn: Callable[[Any], Any]
    init_fn: Callable[[int], None] | None
    workers: list[tuple[int, States]]  # for each, after how many batches it is given which states
    every_s: float = _RECORD_EVERY_S  # between two records
    num_made: int = 0
    recorded_at: float = -inf

    def start(self, worker: int) -> None:
        if self.init_fn is not None:
            self.init_fn(worker)
        self._restore(worker)

    def __call__(self, samples: Any) -> RecordedBatch:
        content = self.collate_fn(samples)
        worker = get_worker_info().id  # type: ignore[union-attr]
        self.num_made += 1
        self._restore(worker)
        now = time.perf_counter()
        if self.num_made < self.workers[worker][0] or now - self.recorded_at < self.every_s:
            return RecordedBatch(content, None)
        self.recorded_at = now
        return RecordedBatch(content, rng.pack_host())  # bytes, which are not pinned one by one either

    def _restore(self, worker: int) -> None:
        number, states = self.workers[worker]
        if number == self.num_made and isinstance(states, dict):
            rng.write_host(states)


@dataclass(frozen=True)
class WorkerPlan:
    """Where the workers of an iteration begin."""

    start: int  # the batch that the first worker makes first
    workers: list[tuple[int, States]]  # for each, after how many batches it is to have which states

    @classmethod
    def begun(cls, number: int, start: int, states: list[States] | None = None) -> WorkerPlan:
        """Return a plan in which `number` workers begin with `states`; None: as they start by themselves."""
        return cls(start, [(0, one) for one in states or [_FRESH] * number])

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> WorkerPlan:
        """Undo `to_dict`; KeyError, TypeError or ValueError if it is something else."""
        workers = [(int(number), states) for number, states in saved["workers"]]
        checked([states for _, states in workers])
        return cls(int(saved["start"]), workers)

    def to_dict(self) -> dict[str, Any] | None:
        """Return it as plain data, None if states are not known."""
        states = known([states for _, states in self.workers])
        if states is None:
            return None
        return {
            "start": self.start,
            "workers": [(number, one) for (number, _), one in zip(self.workers, states, strict=True)],
        }


class WorkerHistory:
    """The recorded states of the workers of one iteration."""

    def __init__(self, begun: WorkerPlan) -> None:
        self._begun = begun
        self._number = len(begun.workers)
        # Of each worker, the newest states, and the batch after which it has them: next to it, two before.
        self._recorded = [
            deque([(begun.start + worker + (made - 1) * self._number, states)], maxlen=3)
            for worker, (made, states) in enumerate(begun.workers)
        ]
        self._arrived = begun.start

    def hand_out(self, arriving: Iterator[Any], wanted: int) -> Iterator[Any]:
        """Yield the batches that arrive, from number `wanted` on."""
        for item in arriving:
            batch, self._arrived = self._arrived, self._arrived + 1
            is_recorded = type(item) is RecordedBatch
            if not is_recorded or item.states is not None:
                self._recorded[self._worker(batch)].append((batch, item.states if is_recorded else None))
            if batch >= wanted:
                yield item.content if is_recorded else item

    @property
    def newest(self) -> list[States]:
        """The states of the workers after their last batches, if all of these were recorded."""
        return [recorded[-1][1] for recorded in self._recorded]

    def worker_plan(self, batch: int) -> WorkerPlan:
        """Return where workers begin that are to make `batch`: one of the newest two that have arrived, or the next."""
        turn = batch - self._worker(batch)
        known = [next((b, states) for b, states in reversed(recorded) if b < turn) for recorded in self._recorded]
        begin = [b + self._number - worker for worker, (b, _) in enumerate(known)]  # the first turn after it
        start = min(begin)
        workers = [((own - start) // self._number, states) for own, (_, states) in zip(begin, known, strict=True)]
        return WorkerPlan(start, workers)

    def _worker(self, batch: int) -> int:
        return (batch - self._begun.start) % self._number


@dataclass
class Workers:
    """The state of a loader's workers from one of its iterations to the next."""

    were_started: bool = False  # persistent ones were, so that starting them draws no seed any more
    states: list[States] | None = None  # with which they begin the next iteration; None: as they start by themselves
    is_loaded: bool = False  # a state was, which existing workers do not have
    is_renewal_told: bool = False

    def are_there(self, source: Source) -> bool:
        """Whether persistent workers are there, or would be had the run not been interrupted."""
        return source.keeps_workers and (has_live_workers(source.loader) or self.were_started)

    def renew(self, source: Source) -> None:
        """Start workers again that lack what this process was given since: a loaded state, or the epoch."""
        base = source.loader
        miss_epoch = base.persistent_workers and not source.keeps_workers and has_live_workers(base)
        if self.is_loaded or miss_epoch:
            forget_workers(base)
        self.is_loaded = False
        if not miss_epoch or self.is_renewal_told:
            return
        self.is_renewal_told = True
        world = current_world()
        if world is None or world.is_main:
            message = (
                "persistent workers start again with each epoch, as the data set has a set_epoch that they "
                "would not see. If it keeps the epoch in shared memory, such as "
                "self.epoch = torch.tensor(0).share_memory_(), they stay."
            )
            record(Kind.NOTE, message=message)

    def plan(self, base: DataLoader[Any], skip: int, saved: WorkerPlan | None) -> WorkerPlan:
        """Return where the workers of an iteration begin that skips so many batches, or continues a saved plan."""
        number = base.num_workers
        if saved is not None and len(saved.workers) == number:
            return saved
        if has_live_workers(base):
            return WorkerPlan.begun(number, skip, self.states or [None] * number)
        states = known(self.states) or []
        return WorkerPlan.begun(number, skip, states if len(states) == number else None)


def can_record(source: Source) -> bool:
    """Return whether the batches of a loader come from workers that take turns, through torch's own iterator."""
    loader = source.loader
    is_plain = all(getattr(type(loader), name) is getattr(DataLoader, name) for name in MAKE_ITERATOR)
    return source.by_index and loader.num_workers > 0 and loader.in_order and is_plain


def known(states: list[States] | None) -> list[Any] | None:
    """Return the states of workers as plain data, None if those of one are not known."""
    if states is None or None in states:
        return None
    return [rng.unpack_host(state) if isinstance(state, bytes) else state for state in states]


def checked(states: list[States] | None) -> list[States] | None:
    """Check the result of `known`, and return it; KeyError, TypeError or ValueError if it is something else."""
    for one in states or []:
        if one != _FRESH:
            rng.check(one)  # type: ignore[arg-type]
    return states
