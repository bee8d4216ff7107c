# SPDX-License-Identifier: Apache-2.0
"""Prepared loaders: batches on their device, one fetched ahead, and the training loop told which one is the last."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from farflung.base.errors import StateError
from farflung.base.torch_internals import forget_workers, has_live_workers, is_exhausted
from farflung.base.words import counted
from farflung.data.iterable import IterableDatasetShard, Marked
from farflung.data.iteration import NOTHING, Epochs, Iteration
from farflung.data.position import (
    Position,
    RandomStates,
    Resumption,
    generators_of,
    plain_or_none,
    replay,
    set_generators,
    state_of,
    with_present_keys,
)
from farflung.data.torch_loaders import (
    LoaderView,
    announce,
    keeper_of,
    made_loader,
    mover,
    num_batches_of,
    order_of,
    reads_indices,
    refuse_mesh,
    seeded_samplers,
    set_order,
    without_first,
)
from farflung.data.workers import RecordingCollate, WorkerHistory, WorkerPlan, can_record, checked, plain
from farflung.loop.state import LoopState
from farflung.process.seed import synchronize_rng_states

_Prepared = TypeVar("_Prepared", bound="PreparedLoader")


class PreparedLoader(LoaderView):
    """What sharding and dispatching loaders have in common: epochs, the device, and reports to the loop.

    Args:
        base: the torch loader that makes the batches.
        state: told when this loader starts, hands out a batch after another one did, and ends; None: that of the
            `Accelerator` that prepares it, once there is one.
        device: where batches go; None leaves them where they are.
        non_blocking: do not wait for the copies to the device.
        agree: called at the start of each iteration: makes ranks draw the same random order.
        total_batch_size: samples that all ranks together consume in one step, None when that varies.
        may_be_uneven: ranks may get different numbers of batches.
        ends_apart: and these may differ by more than one.

    Attributes:
        end_of_dataloader: the batch handed out last was the final one of its iteration.
        remainder: samples that are no padding in the batch handed out last, over all ranks; 0: all of them.
        skip_batches: batches left out at the beginning of each iteration.
    """

    end_of_dataloader: bool
    remainder: int
    skip_batches: int
    device: torch.device | None
    total_batch_size: int | None
    may_be_uneven: bool
    _state: LoopState
    _is_free: bool

    def __init__(
        self,
        base: DataLoader[Any],
        *,
        state: LoopState | None,
        device: torch.device | None = None,
        non_blocking: bool = False,
        agree: Callable[[], None] | None = None,
        total_batch_size: int | None = None,
        may_be_uneven: bool = False,
        ends_apart: bool = False,
        **own: Any,
    ) -> None:
        super().__init__(
            base,
            end_of_dataloader=False,
            remainder=-1,
            skip_batches=0,
            device=device,
            total_batch_size=total_batch_size,
            may_be_uneven=may_be_uneven,
            ends_apart=ends_apart,
            _state=LoopState() if state is None else state,
            _is_free=state is None,
            _move=mover(device, non_blocking),
            _agree=agree,
            _epochs=Epochs(),
            _is_copy=False,
            **own,
        )

    def report_to(self, state: LoopState) -> None:
        """Report to `state` from now on, unless this loader was given one already."""
        if self._is_free:
            self._state, self._is_free = state, False

    @property
    def iteration(self) -> int:
        """The number of the epoch that is under way, or of the next one when none is."""
        epochs: Epochs = self._epochs
        return epochs.number if epochs.chosen is None else epochs.chosen

    @property
    def total_dataset_length(self) -> int:
        """Samples in the data set, over all ranks."""
        dataset: Any = self.base_dataloader.dataset
        if isinstance(dataset, IterableDatasetShard):
            dataset = dataset.dataset
        return dataset.total_length if hasattr(dataset, "total_length") else len(dataset)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be number `epoch`; samplers and data sets that have `set_epoch` are told now."""
        self._epochs.choose(epoch)
        announce(epoch, self.base_dataloader)

    def skipping(self: _Prepared, num_batches: int) -> _Prepared:
        """Return a copy that leaves out the first `num_batches` of what this one hands out. Both count one epoch."""
        other = copy.copy(self)
        skip = self.skip_batches + num_batches
        other.__dict__.update(skip_batches=skip, end_of_dataloader=False, remainder=-1, _is_copy=True)
        return other

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._state.begin(self)
        under_way = self._begun()
        epoch, state = under_way.epoch, self._state
        self._show(under_way)
        state.enter(under_way)
        one_at_a_time = self.base_dataloader.persistent_workers
        try:
            for batch, last, real in self._stream(under_way):
                under_way.end_of_dataloader, under_way.remainder = last, real
                under_way.num_batches += 1
                state.enter(under_way, batch)
                if last is not self.end_of_dataloader or real != self.remainder:
                    self._show(under_way)
                yield batch
                if one_at_a_time and self._epochs.newest is not under_way:
                    raise StateError(
                        "This loader was iterated again before this iteration ended. Its persistent workers can serve "
                        "only one iteration at a time: use persistent_workers=False, or two loaders."
                    )
            self._epochs.finish(epoch)
            state.leave(under_way, at_end=True)
        finally:
            under_way.prefetched = under_way.source = None  # workers end with it
            state.leave(under_way)
            if self._epochs.newest is under_way:
                self._epochs.newest = None  # it knows this loader, which is freed at once when nobody else holds it
            around = state.current
            if isinstance(around, Iteration) and around.loader is self:
                self._show(around)

    def _begun(self) -> Iteration:
        """Start an iteration, or go on with the one whose position was loaded."""
        epochs, base, skip = self._epochs, self.base_dataloader, self.skip_batches
        position, epochs.position = epochs.position, None
        is_chosen = epochs.chosen is not None
        if position is not None and position.ended and (is_chosen or self._is_told(skip < position.batches)):
            self._run_out(position)
            position = None
        resumption = None
        if position is not None:
            skip = skip if self._is_told() else position.batches
            resumption = Resumption(position if skip == position.batches else position.moved(skip))
            resumption.begin(base)
        start = RandomStates.of(base) if position is None else position.start
        if self._agree is not None:
            self._agree()
        epoch = epochs.start(goes_on=position is not None)
        announce(epoch, base)
        under_way = epochs.newest = Iteration(self, epoch, skip, start, resumption)
        under_way.has_workers = self._has_workers if position is None else position.has_workers
        return under_way

    def _is_told(self, something: bool = True) -> bool:
        """Whether `skip_first_batches` said how many to leave out, whatever position was loaded."""
        return self._is_copy and something

    def _run_out(self, position: Position) -> None:
        """Come to the end of an iteration of which nothing is left, so that its generators are where it leaves them."""
        epochs = self._epochs
        chosen, epochs.chosen = epochs.chosen, None
        epochs.position = position
        whole = copy.copy(self)
        whole.__dict__.update(skip_batches=0, _is_copy=False)
        for _ in whole:
            raise AssertionError("an iteration that had ended went on")
        if chosen is not None:
            epochs.choose(chosen)

    def get_sampler(self) -> Any:
        """Return the sampler that puts the samples in order."""
        return order_of(self.base_dataloader)[0]

    def set_sampler(self, sampler: Any) -> None:
        """Put the samples in the order of another sampler from the next iteration on."""
        set_order(self.base_dataloader, sampler)

    def state_dict(self) -> dict[str, Any]:
        """Return where this loader stands: the epoch, and in the middle of an iteration the position in it.

        Each rank has its own. It is plain data: tensors, numbers, texts and their lists and dictionaries.
        """
        epochs, base = self._epochs, self.base_dataloader
        one = epochs.newest
        is_live = one is not None and epochs.position is None and any(one is other for other in self._state.loaders)
        position = self._position_of(one) if is_live else epochs.position
        return {
            "epoch": epochs.number,
            "under_way": epochs.under_way,
            "position": None if position is None else position.to_dict(),
            "generators": [generator.get_state() for generator in generators_of(base)],
            "seeds": [sampler.initial_seed for sampler in seeded_samplers(base)],
            "has_workers": self._has_workers,
            "worker_states": plain(epochs.worker_states),
            "total_batch_size": self.total_batch_size,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` stood: the next iteration of this loader, or of a copy that skips, is there.

        Raises:
            KeyError, TypeError, ValueError: it is no such state; nothing is changed then.
        """
        epochs, base = self._epochs, self.base_dataloader
        saved = with_present_keys(state_dict)
        position = None if saved["position"] is None else Position.from_dict(saved["position"])
        if position is not None and position.worker_plan is not None:
            WorkerPlan.from_dict(position.worker_plan)
        number, under_way, has_workers = int(saved["epoch"]), bool(saved["under_way"]), bool(saved["has_workers"])
        worker_states = checked(saved.get("worker_states"))
        samplers = seeded_samplers(base)
        set_generators(base, saved["generators"])
        for sampler, seed in zip(samplers, saved["seeds"], strict=False):
            sampler.initial_seed = seed
        epochs.choose(number)
        epochs.under_way, epochs.has_workers, epochs.position, epochs.chosen = under_way, has_workers, position, None
        epochs.worker_states, epochs.is_loaded = worker_states, True

    def describe_position(self) -> str:
        """Say in a few words where the next iteration goes on."""
        epochs, position = self._epochs, self._epochs.position
        if position is None:
            return f"starts epoch {epochs.number + epochs.under_way}"
        try:
            total = f" of {len(self)}"
        except TypeError:  # a stream that does not know its length
            total = ""
        if position.ended:
            return f"continues after the last batch of epoch {epochs.number}: the first loop over it ends immediately"
        where = f"continues after batch {position.batches}{total} of epoch {epochs.number}"
        now = self.base_dataloader.num_workers
        then = 0 if position.worker_plan is None else len(position.worker_plan["workers"])
        if then and then != now:
            where += f", with {counted(now, 'worker')} instead of {then}, which draw different random numbers"
        return where

    def keep(self) -> Callable[[], None]:
        """Return what undoes a `load_state_dict` that comes now."""
        epochs, before = self._epochs, dict(self._epochs.__dict__)
        generators = [(generator, generator.get_state()) for generator in generators_of(self.base_dataloader)]
        samplers = [(sampler, sampler.initial_seed) for sampler in seeded_samplers(self.base_dataloader)]

        def undo() -> None:
            epochs.__dict__.update(before)
            for generator, state in generators:
                generator.set_state(state)
            for sampler, seed in samplers:
                sampler.initial_seed = seed

        return undo

    def _position_of(self, one: Iteration) -> Position:
        num_prefetched, prefetched = self._prefetched(one)
        keeper = self._keeper()
        first, dataset = None, None
        if keeper is not None and (num_prefetched == 0 or prefetched is not None):
            first = plain_or_none(one.first)
            dataset = state_of(keeper) if one.first is None or first is not None else None
        return Position(
            batches=one.skip + one.num_batches,
            ended=one.end_of_dataloader,
            start=one.start,
            num_prefetched=num_prefetched,
            prefetched=prefetched,
            first=first,
            dataset=dataset,
            has_workers=one.has_workers,
            worker_plan=None if one.history is None else one.history.worker_plan(one.skip + one.num_batches).to_dict(),
            exhausted=is_exhausted(one.source),
        )

    def _keeper(self) -> Any:
        return keeper_of(self.base_dataloader)

    def _prefetched(self, one: Iteration) -> tuple[int, Any]:
        """Return how much was prefetched, and that as plain data, None where it is none."""
        if one.prefetched is NOTHING:
            return 0, None
        batch, real = one.prefetched if type(one.prefetched) is Marked else (one.prefetched, 0)
        content = plain_or_none(batch)
        return 1, None if content is None else {"content": content, "real": real}

    @property
    def _has_workers(self) -> bool:
        """Whether persistent workers are there, or would be had the run not been interrupted."""
        base = self.base_dataloader
        return bool(base.persistent_workers and (has_live_workers(base) or self._epochs.has_workers))

    def _opened(self, base: DataLoader[Any], one: Iteration, **replaced: Any) -> Iterator[Any]:
        """Start the base loader, or a copy of it, without drawing a seed for workers that would be there already.

        Args:
            replaced: attributes that workers which are started now see instead of the loader's own.
        """
        has_workers = self._has_workers if one.resumption is None else one.resumption.position.has_workers
        if has_workers and not has_live_workers(base):
            replaced["generator"] = torch.Generator()
        kept = {name: getattr(base, name) for name in replaced}
        base.__dict__.update(replaced)
        try:
            return iter(base)
        finally:
            base.__dict__.update(kept)

    def _show(self, one: Iteration) -> None:
        """Let this loader's attributes be those of one of its iterations."""
        self.end_of_dataloader, self.remainder = one.end_of_dataloader, one.remainder

    def _stream(self, one: Iteration) -> Iterator[tuple[Any, bool, int]]:
        """Yield batches on the device, whether each is the last, and how much of its round is no padding (0: all)."""
        raise NotImplementedError


class DataLoaderShard(PreparedLoader):
    """A loader whose batches belong to this rank alone, and are not shared out any further.

    Args:
        dataset: what to load from.
        device: where batches go; None leaves them where they are.
        rng_types: the random states that all ranks take from rank 0 at the start of each iteration.
        synchronized_generator: the one that `generator` among them means.
        skip_batches: batches left out at the beginning of each iteration.
        use_stateful_dataloader: see `DataLoaderConfiguration`.
        torch_device_mesh: of axes along which ranks see different data; it changes nothing.
        iteration: the number of the first epoch.
        kwargs: those of torch's `DataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: list[str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        refuse_mesh(torch_device_mesh)
        base = made_loader(dataset, use_stateful_dataloader, kwargs)
        agree = None if not rng_types else partial(synchronize_rng_states, rng_types, synchronized_generator)
        super().__init__(
            base,
            state=None,
            device=device,
            non_blocking=_non_blocking,
            agree=agree,
            total_batch_size=base.batch_size,
            stateful=use_stateful_dataloader,
            _count=None,
            _marked=False,
        )
        self.skip_batches = skip_batches
        self._epochs.choose(iteration)

    @classmethod
    def over(
        cls, base: DataLoader[Any], *, count: Callable[[Any], int] | None = None, marked: bool = False, **common: Any
    ) -> DataLoaderShard:
        """Prepare a loader that is there already.

        Args:
            base: makes this rank's batches.
            count: says how many samples in the last round are no padding, given this rank's batch; 0: all of them.
            marked: batches of padded rounds come as `Marked`, with that number.
            common: see `PreparedLoader`.
        """
        made = cls.__new__(cls)
        PreparedLoader.__init__(made, base, _count=count, _marked=marked, **common)
        return made

    def __len__(self) -> int:
        return max(0, num_batches_of(self.base_dataloader) - self.skip_batches)

    def _stream(self, one: Iteration) -> Iterator[tuple[Any, bool, int]]:
        move, marked = self._move, self._marked
        held, held_real, real = NOTHING, 0, 0
        for batch in self._batches(one):
            if marked:
                batch, real = batch if type(batch) is Marked else (batch, 0)
            if move is not None:
                batch = move(batch)
            one.prefetched = Marked(batch, real) if real else batch
            if held is not NOTHING:
                yield held, False, held_real
            held, held_real = batch, real
        one.prefetched = NOTHING
        if held is not NOTHING:
            count = self._count
            yield held, True, held_real if count is None else count(held)

    def _batches(self, one: Iteration) -> Iterator[Any]:
        base, resumption = self.base_dataloader, one.resumption
        reads = reads_indices(base)
        if can_record(base):
            one.source = self._recorded(one)
        elif resumption is None or reads:
            one.source = self._opened(without_first(base, one.skip) if one.skip and reads else base, one)
        if resumption is None:
            return one.source if reads else islice(one.source, one.skip, None)
        position = resumption.position
        first: list[Any] = []
        if not reads and position.dataset is not None:
            one.source = iter(()) if position.is_read else self._told(position)
        else:
            if not reads:
                one.source = self._opened(base, one)
                replay(one.source, position.batches)
            first = list(islice(one.source, 1))  # of those that were prefetched; orders are drawn with it
        if position.prefetched is not None:
            content, real = position.prefetched["content"], position.prefetched["real"]
            first = [Marked(content, real) if real else content]
        resumption.arrive(None if reads else base)
        return chain(first, one.source)

    def _recorded(self, one: Iteration) -> Iterator[Any]:
        """Start workers whose random states are recorded, and go on where they were left."""
        epochs, base = self._epochs, self.base_dataloader
        if epochs.is_loaded:  # those that are there have drawn for another run
            forget_workers(base)
            epochs.is_loaded = False
        number, stay = base.num_workers, base.persistent_workers
        saved = None if one.resumption is None else one.resumption.position.worker_plan
        if saved is not None and len(saved["workers"]) == number:
            worker_plan = WorkerPlan.from_dict(saved)
        elif has_live_workers(base):
            worker_plan = WorkerPlan.begun(number, one.skip, epochs.worker_states or [None] * number)
        else:
            worker_states = plain(epochs.worker_states) or []
            worker_plan = WorkerPlan.begun(number, one.skip, worker_states if len(worker_states) == number else None)
        one.history = WorkerHistory(worker_plan)
        loader = without_first(base, worker_plan.start) if worker_plan.start else base
        recording = RecordingCollate(loader.collate_fn, loader.worker_init_fn, worker_plan.workers, each=stay)
        arriving = self._opened(loader, one, collate_fn=recording, worker_init_fn=recording.start)
        epochs.worker_states = [None] * number if stay else None
        return self._handed_out(one.history, arriving, one.skip)

    def _handed_out(self, history: WorkerHistory, arriving: Iterator[Any], wanted: int) -> Iterator[Any]:
        yield from history.hand_out(arriving, wanted)
        if self.base_dataloader.persistent_workers:
            self._epochs.worker_states = history.newest

    def _told(self, position: Position) -> Iterator[Any]:
        keeper_of(self.base_dataloader).load_state_dict(position.dataset)
        return iter(self.base_dataloader)
