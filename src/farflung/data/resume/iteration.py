# SPDX-License-Identifier: Apache-2.0
"""One iteration of a prepared loader: its batches, from the beginning or from where another process left it.

An iteration draws random numbers when it starts (an order, the seed of its workers) and reads ahead of the training
loop. To continue in its middle, it repeats the start with the random states of that time, leaves out the batches that
were handed out, and takes prefetched ones from the checkpoint, because their random numbers can't be drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from farflung.base.errors import ConfigError
from farflung.base.events import Kind, record
from farflung.base.torch_internals import has_live_workers
from farflung.base.words import counted
from farflung.checkpoint import rng
from farflung.data import worker_signals
from farflung.data.batches import plain_or_none
from farflung.data.iterable import Marked, MarkedShard, collated
from farflung.data.resume.workers import RecordingCollate, WorkerHistory, WorkerPlan, Workers, can_record
from farflung.data.samplers import made_generator
from farflung.data.torch_loaders import Source
from farflung.process.world import current_world

NOTHING: Any = object()  # stands for a missing batch


@dataclass(frozen=True)
class RandomStates:
    """The random states in which an iteration began: the process's own, and those of the loader's generators."""

    host: dict[str, Any]
    generators: list[Tensor]

    @classmethod
    def of(cls, source: Source) -> RandomStates:
        return cls(rng.read_host(), [generator.get_state() for generator in source.generators])

    def restore(self, source: Source) -> None:
        rng.write(self.host)
        source.set_generators(self.generators)
        own = source.generators
        if own and not self.generators:  # one process drew its order in this way, several share a generator
            torch.empty((), dtype=torch.int64).random_()  # the seed of workers
            if any(isinstance(sampler, RandomSampler) for sampler in source.samplers):
                own[0].manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
            else:  # others draw from torch's own generator where they have none
                own[0].set_state(torch.get_rng_state())
            rng.write(self.host)


@dataclass(frozen=True)
class Position:
    """A position in an iteration."""

    batches: int  # that were handed out, with those that were skipped
    ended: bool  # the last one was among them
    start: RandomStates  # in which it began
    num_prefetched: int = 0  # how many batches (of a dispatching loader: rounds) are read, but not handed out by then
    prefetched: Any = None  # those, or None where they are no plain data
    again: bool = False  # the first of those was in hand, and the loop around it not done with it
    first: Any = None  # of a dispatching loader, its first round, whose samples complete the last one
    dataset: Any = None  # the state of a data set, or of a loader, that keeps one, after what was prefetched
    exhausted: bool = False  # the data set has nothing more
    has_workers: bool = False  # persistent ones were there when it began, so that it drew no seed for them
    worker_plan: WorkerPlan | None = None  # how they continue; None: as workers start by themselves

    @property
    def is_read(self) -> bool:
        """Whether all data are read. A data set would then take its old state for the next iteration."""
        return self.exhausted or self.ended

    def to_dict(self) -> dict[str, Any]:
        own, plan = dict(vars(self)), self.worker_plan
        start = own.pop("start")
        return {**own, **vars(start), "worker_plan": None if plan is None else plan.to_dict()}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Position:
        """Undo `to_dict`; KeyError, TypeError or ValueError where it is something else."""
        own, plan = dict(saved), saved.get("worker_plan")
        start = RandomStates(own.pop("host"), own.pop("generators"))
        rng.check(start.host)
        return cls(start=start, **{**own, "worker_plan": None if plan is None else WorkerPlan.from_dict(plan)})

    def moved(self, batches: int) -> Position:
        """Return the position after `batches` of the same iteration, with nothing read."""
        return Position(batches, self.ended, self.start, has_workers=self.has_workers)


@dataclass(eq=False, repr=False)
class Iteration:
    """One iteration of a prepared loader, by which the training loop identifies it, also if two run at a time."""

    loader: Any
    epoch: int
    skip: int  # batches that it leaves out at its beginning
    has_workers: bool  # persistent ones were there when it began
    name: str | None  # by which all ranks that iterate the loaders of one run alike call it; None: it is in no run
    resumed_at: Position | None  # where it continues, if it does not begin at the beginning
    now: RandomStates  # with which training continues after `resumed_at`
    num_batches: int = 0  # that it has handed out
    end_of_dataloader: bool = False  # see `PreparedLoader`
    remainder: int = 0  # see `PreparedLoader`
    is_beside: bool = False  # see `ActiveLoader`
    prefetched: list[Any] = field(default_factory=list)  # read but not handed out: batches, or a dispatcher's rounds
    in_hand: Any = NOTHING  # what was handed out last, likewise
    first: Any = None  # the first round of a dispatching loader
    source: Any = None  # the iterator that batches are read from
    history: WorkerHistory | None = None  # of workers whose random states are recorded
    began_with: str | None = None  # tells the first data from others, where all ranks must have the same; None: nothing
    same_on: set[int] | None = None  # the ranks that are known to have begun with the same; None: nobody was asked

    @property
    def start(self) -> RandomStates:
        """The random states in which it began."""
        return self.now if self.resumed_at is None else self.resumed_at.start

    def arrive(self) -> None:
        """Restore the random states of the training; the generators of the loader stay as the start left them.

        Those of a stream whose state was loaded are restored too: it does not draw again what it drew before.
        """
        source, position = self.loader.base_source, self.resumed_at
        rng.write(self.now.host)
        if position is not None and position.dataset is not None and not source.by_index:
            source.set_generators(self.now.generators)

    @property
    def position(self) -> str | None:
        """The batch in hand, if ranks may have different numbers of batches and so be at different ones."""
        return f"batch {self.num_batches} of epoch {self.epoch}" if self.loader.may_be_uneven else None


def pack_batches(batches: list[Any]) -> list[dict[str, Any]] | None:
    """Return batches as plain data; None: there is none, or one is no plain data."""
    marked = [one[:2] if type(one) is Marked else (one, 0) for one in batches]
    packed = [{"content": plain_or_none(batch), "real": real} for batch, real in marked]
    return packed if packed and all(one["content"] is not None for one in packed) else None


def unpack_batches(saved: Any) -> list[Any]:
    """Undo `pack_batches`."""
    rows = [saved] if isinstance(saved, dict) else saved  # one alone in the first checkpoints
    return [Marked(one["content"], one["real"]) if one["real"] else one["content"] for one in rows]


def pack_rounds(rounds: list[Any]) -> Any:
    """Return rounds as plain data; None: they are none."""
    return plain_or_none([([None if part is NOTHING else [part] for part in parts], real) for parts, real in rounds])


def unpack_rounds(saved: Any) -> list[tuple[list[Any], int]]:
    """Undo `pack_rounds`."""
    return [([NOTHING if part is None else part[0] for part in parts], real) for parts, real in saved]


def batches_of(one: Iteration, workers: Workers) -> Iterator[Any]:
    """Start to read the batches of an iteration of a loader that this rank reads for itself."""
    source, position = one.loader.base_source, one.resumed_at
    reads = source.by_index
    if can_record(source):
        one.source = _recorded(one, source, workers)
    elif reads:
        one.source = opened(one, source.without_first(one.skip) if one.skip else source.loader)
    else:
        one.source = opened(one, source.loader) if position is None else _reopened(one, source, position)
    if position is None:
        return one.source if reads else islice(one.source, one.skip, None)
    takes_next = reads or position.dataset is None  # what was prefetched; orders are drawn with it
    first = list(islice(one.source, max(1, position.num_prefetched) if takes_next else 0))
    if position.prefetched is not None:
        first = unpack_batches(position.prefetched)
    one.arrive()
    return chain(first, one.source)


def _recorded(one: Iteration, source: Source, workers: Workers) -> Iterator[Any]:
    """Start workers whose random states are recorded, and continue where they were left."""
    base = source.loader
    skip, stay = one.skip, source.keeps_workers
    plan = workers.plan(base, skip, None if one.resumed_at is None else one.resumed_at.worker_plan)
    history = one.history = WorkerHistory(plan)
    loader = source.without_first(plan.start) if plan.start else base
    recording = RecordingCollate(loader.collate_fn, loader.worker_init_fn, plan.workers)
    if stay:  # a worker that continues has the states after its last batch, so each is recorded
        recording.every_s = 0.0
    arriving = opened(one, loader, collate_fn=recording, worker_init_fn=recording.start)
    workers.states = [None] * base.num_workers if stay else None

    def handed_out() -> Iterator[Any]:
        yield from history.hand_out(arriving, skip)
        if stay:
            workers.states = history.newest

    return handed_out()


def _reopened(one: Iteration, source: Source, position: Position) -> Iterator[Any]:
    """Start a stream, and continue where it was left."""
    if position.dataset is not None:
        if position.is_read:
            return iter(())
        source.keeper.load_state_dict(position.dataset)
    batches = opened(one, source.loader)
    if position.dataset is None:
        replay(batches, position.batches, to_the_end=position.ended)
    return batches


def opened(one: Iteration, base: DataLoader[Any], **replaced: Any) -> Iterator[Any]:
    """Start the base loader without drawing a seed for workers that would be there already.

    Workers that are started now see the `replaced` attributes instead of the loader's own.
    """
    if isinstance(base.dataset, MarkedShard):  # the script may replace the loader's own at any time
        replaced["collate_fn"] = partial(collated, base.collate_fn)
    if one.has_workers and not has_live_workers(base):
        replaced["generator"] = made_generator()
    is_signalled = base.num_workers > 0 and worker_signals.is_needed()
    if is_signalled:
        init_fn = replaced.get("worker_init_fn", base.worker_init_fn)
        replaced["worker_init_fn"] = worker_signals.ignoring(init_fn)
    starting = partial(_starting, base, replaced, is_signalled)
    with starting():
        batches = iter(base)
    return _begun(batches, starting) if isinstance(batches, GeneratorType) else batches


@contextmanager
def _starting(base: DataLoader[Any], replaced: dict[str, Any], is_signalled: bool) -> Iterator[None]:
    kept = {name: getattr(base, name) for name in replaced}
    base.__dict__.update(replaced)
    try:
        with worker_signals.blocked(base.multiprocessing_context) if is_signalled else nullcontext():
            yield
    finally:
        base.__dict__.update(kept)


def _begun(batches: Iterator[Any], starting: Callable[[], AbstractContextManager[None]]) -> Iterator[Any]:
    """Yield the batches of a generator, which may start torch's own iterator whenever a batch is asked for."""
    while True:
        with starting():
            found = list(islice(batches, 1))
        if not found:
            return
        yield from found


def replay(batches: Iterator[Any], number: int, to_the_end: bool = False) -> None:
    """Read the first batches of data that can only be read from their beginning, and say so on stderr.

    With `to_the_end` there may be fewer, in a last round that was not whole; else that is a ConfigError.
    """
    world = current_world()
    if number and (world is None or world.is_main):
        read = "all batches" if to_the_end else counted(number, "batch")
        said = f"reading {read} again: the data set has no state_dict, so training can't continue after them otherwise."
        record(Kind.NOTE, message=said)
    done = sum(1 for _ in islice(batches, number))
    if done < number and not to_the_end:
        raise ConfigError(
            f"The data had {counted(number, 'batch')} when the checkpoint was written, and {done} now. "
            "Check that it is the same dataset."
        )
