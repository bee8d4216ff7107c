# SPDX-License-Identifier: Apache-2.0
"""Prepared loaders: they move batches to the device, fetch one ahead, and tell the training loop which is the last."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from farflung.base.errors import StateError, Unsupported
from farflung.base.tree import send_to_device
from farflung.data.iterable import IterableDatasetShard, Marked
from farflung.data.resume.iteration import NOTHING, Iteration, batches_of
from farflung.data.resume.progress import Progress
from farflung.data.samplers import BatchSamplerShard
from farflung.data.torch_loaders import LoaderView, Source, made_loader, refuse_mesh
from farflung.loop.state import LoopState
from farflung.process.seed import synchronize_rng_states

_Prepared = TypeVar("_Prepared", bound="PreparedLoader")


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """Settings of a prepared loader in addition to those of the loader behind it, however the data are shared out.

    Attributes:
        state: to report to; None: that of the `Accelerator` that prepares this loader later.
        device: where batches go; None leaves them where they are.
        stateful: the view is to be an instance of torchdata's loader.
        agree: makes ranks draw the same order, at the start of each iteration.
        total_batch_size: samples of all ranks in one step; None: that varies.
        may_be_uneven: ranks may get different numbers of batches.
        ends_apart: these may differ by more than one.
        already_sharded: the script gives ranks their shares.
    """

    state: LoopState | None = None
    device: torch.device | None = None
    non_blocking: bool = False
    stateful: bool = False
    agree: Callable[[], None] | None = None
    total_batch_size: int | None = None
    may_be_uneven: bool = False
    ends_apart: bool = False
    already_sharded: bool = False


class PreparedLoader(LoaderView):
    """Base of sharding and dispatching loaders: epochs, the device, and reports to the loop."""

    share: Any = None  # this replica's, if replicas come and go

    def __init__(
        self,
        source: Source,  # makes the batches, with these changes
        settings: LoaderSettings,
        changes: Mapping[str, Any] = MappingProxyType({}),
        *,
        progress: Progress | None = None,
    ) -> None:
        self.end_of_dataloader = False  # the batch handed out last was the final one of its iteration
        self.remainder = -1  # samples that are no padding in that batch, over all ranks; 0: all of them
        self.skip_batches = 0  # batches left out at the beginning of each iteration
        self.skips_exactly = False  # these, whatever position was loaded: `skip_first_batches` said so
        self.device = settings.device
        self.total_batch_size = settings.total_batch_size
        self.may_be_uneven = settings.may_be_uneven
        self.ends_apart = settings.ends_apart
        self.already_sharded = settings.already_sharded
        self._state = LoopState() if settings.state is None else settings.state
        self._is_free = settings.state is None
        self._move: Callable[[Any], Any] | None = None  # of a batch; None: it is where it goes, as with CPUs only
        if settings.device is not None and (settings.device.type != "cpu" or torch.accelerator.is_available()):
            self._move = partial(send_to_device, device=settings.device, non_blocking=settings.non_blocking)
        self._agree = settings.agree
        self._progress = progress or Progress()
        super().__init__(source, changes, stateful=settings.stateful)

    def report_to(self, state: LoopState) -> None:
        if self._is_free:
            self._state, self._is_free = state, False

    @property
    def iteration(self) -> int:
        """The number of the epoch that is under way, or of the next one when none is.

        After a checkpoint of an epoch's last batch the next epoch begins. If the script reads this, on all ranks, an
        empty loop of the old epoch comes first.
        """
        self._state.under_way.has_asked = True
        return self._progress.epoch

    @iteration.setter
    def iteration(self, number: int) -> None:
        self._progress.choose(number)

    @property
    def total_dataset_length(self) -> int:
        """Samples in the data set, over all ranks."""
        dataset = self.base_source.dataset
        if isinstance(dataset, IterableDatasetShard):
            dataset = dataset.dataset
        return dataset.total_length if hasattr(dataset, "total_length") else len(dataset)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration number `epoch`, and call `set_epoch` of samplers and data sets that have it."""
        self._progress.choose(epoch)
        self.base_source.announce(epoch)

    def skipping(self: _Prepared, num_batches: int) -> _Prepared:
        """Return a copy that leaves out the first `num_batches` batches of this one. Both count one epoch."""
        other = copy.copy(self)
        skip = self.skip_batches + num_batches
        other.__dict__.update(skip_batches=skip, skips_exactly=True, end_of_dataloader=False, remainder=-1)
        return other

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        state, progress = self._state, self._progress
        progress.settle()
        state.begin(self)
        under_way = progress.begin(self, self._agree, state.under_way.has_asked)
        self._show(under_way)
        state.enter(under_way)
        one_at_a_time, untrained = self.base_dataloader.persistent_workers, state.backwards
        try:
            for batch, last, real in self._stream(under_way):
                under_way.end_of_dataloader, under_way.remainder = last, real
                under_way.num_batches += 1
                at = under_way.resumed_at
                state.enter(under_way, batch, again=at is not None and at.again and under_way.num_batches == 1)
                if last is not self.end_of_dataloader or real != self.remainder:
                    self._show(under_way)
                yield batch
                if at is not None and state.backwards > untrained:  # the first batch that was trained on
                    _warn_of_skipping(under_way.num_batches - 1, at.batches)
                    untrained = sys.maxsize
                state.asked_for_next(under_way)
                if one_at_a_time and progress.newest is not under_way:
                    raise StateError(
                        "This loader was iterated again before this iteration ended. Its persistent workers can serve "
                        "only one iteration at a time: use persistent_workers=False, or two loaders."
                    )
            progress.complete(under_way)
            state.leave(under_way, at_end=True)
        finally:
            progress.leave(under_way)
            state.leave(under_way)
            around = state.current
            if isinstance(around, Iteration) and around.loader is self:
                self._show(around)

    def get_sampler(self) -> Any:
        return self.base_source.order[0]

    def set_sampler(self, sampler: Any) -> None:
        holder = self.base_source.order[1]
        if not hasattr(holder, "sampler"):
            raise Unsupported(
                f"set_sampler: the order comes from a {type(self.base_source.indices).__name__} that holds "
                "no sampler. Prepare a loader with the sampler instead."
            )
        holder.sampler = sampler

    def state_dict(self) -> dict[str, Any]:
        """Return where this loader stands, on this rank, as plain data: the epoch, and the position in an iteration."""
        return self._progress.state_dict(self, self._state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state; if it is no such state, raise KeyError, TypeError or ValueError and change nothing."""
        self._progress.load_state_dict(self.base_source, state_dict)
        if self.may_be_uneven or self.ends_apart:  # other ranks may have batches left
            self._progress.may_be_over = False
        self._state.under_way.has_asked = False
        if self._progress.host is not None:
            self._state.resumed_in = self

    def describe_position(self) -> str:
        """Describe in a few words where the next iteration continues."""
        return self._progress.describe(self)

    def keep(self) -> Callable[[], None]:
        """Return a function that undoes the next `load_state_dict`."""
        return self._progress.keep(self.base_source)

    def _show(self, one: Iteration) -> None:
        self.end_of_dataloader, self.remainder = one.end_of_dataloader, one.remainder

    def _stream(self, one: Iteration) -> Iterator[tuple[Any, bool, int]]:
        """Yield batches on the device, whether each is the last, and how much of its round is no padding (0: all)."""
        raise NotImplementedError


def _warn_of_skipping(skipped: int, position: int) -> None:
    """Warn if a script has passed by, after a resume, as many batches as the resumed loader has left out already."""
    if skipped == position > 1:
        warnings.warn(
            f"The script has skipped {position} batches after a resume, though the loader continues after as many by "
            "itself: they are lost to training. Delete the `continue` that skips them.",
            stacklevel=3,
        )


class DataLoaderShard(PreparedLoader):
    """A loader whose batches belong to this rank alone, and are not shared out any further.

    Args:
        rng_types: the random states that all ranks take from rank 0 at the start of each iteration.
        synchronized_generator: the one that `generator` among them means.
        skip_batches: batches left out at the beginning of each iteration.
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
        self._count: Callable[[Any], int] | None = None
        self._marked = False
        self._sharding: BatchSamplerShard | None = None
        settings = LoaderSettings(
            device=device,
            non_blocking=_non_blocking,
            stateful=use_stateful_dataloader,
            agree=agree,
            total_batch_size=base.batch_size,
        )
        super().__init__(Source(base), settings)
        self.skip_batches = skip_batches
        self._progress.choose(iteration)

    @classmethod
    def over(
        cls,
        source: Source,
        settings: LoaderSettings,
        changes: Mapping[str, Any] = MappingProxyType({}),
        *,
        count: Callable[[Any], int] | None = None,
        marked: bool = False,
        shard: BatchSamplerShard | None = None,
    ) -> DataLoaderShard:
        """Prepare an existing loader.

        Args:
            changes: attributes of the loader that are replaced.
            count: says how many samples in the last round are no padding, given this rank's batch; 0: all of them.
            marked: batches of padded rounds come as `Marked`, with that number; so does that of the first round.
            shard: what takes this rank's share of an order that must be the same on all ranks.
        """
        made = cls.__new__(cls)
        made._count, made._marked, made._sharding = count, marked, shard
        PreparedLoader.__init__(made, source, settings, changes)
        return made

    def __len__(self) -> int:
        return max(0, self.base_source.num_batches() - self.skip_batches)

    def _stream(self, one: Iteration) -> Iterator[tuple[Any, bool, int]]:
        move, marked, shard = self._move, self._marked, self._sharding
        held, held_real, real = NOTHING, 0, 0
        for batch in batches_of(one, self._progress.workers):
            if marked:
                batch, real, first = batch if type(batch) is Marked else (batch, 0, None)
                one.began_with = one.began_with or first
            elif shard is not None and one.began_with is None:
                one.began_with = shard.first
            if move is not None:
                batch = move(batch)
            read, one.prefetched = one.prefetched, [Marked(batch, real) if real else batch]
            if read:
                one.in_hand = read[0]
                yield held, False, held_real
            held, held_real = batch, real
        if held is not NOTHING:
            one.in_hand, one.prefetched = one.prefetched[0], []
            count = self._count
            yield held, True, held_real if count is None else count(held)
