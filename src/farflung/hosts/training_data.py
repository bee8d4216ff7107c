# SPDX-License-Identifier: Apache-2.0
"""Follows the data that a script reads through torch's `DistributedSampler`, and gives a replica its share.

Epochs of the training are those of the samplers that the script trains from. If replicas come and go, each is rank 0 of
1, or one of a few ranks, and its samplers would return all of the data. So a pass of training gets the replica's share
in data slots, as a prepared loader does.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import length_hint
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from farflung.base.torch_internals import NUM_YIELDED
from farflung.hosts.elastic import expected_of
from farflung.hosts.patching import around
from farflung.loop.state import LoopState, Observer, Trace
from farflung.process.place import FIXED, Place


@dataclass(eq=False)
class LoaderPass:
    """A pass over a loader that has a `DistributedSampler`."""

    base_dataloader: DataLoader[Any]
    share: Any  # of a replica that comes and goes
    may_train: bool  # it began with a model in train mode
    is_training: bool = False  # the model was in train mode as the latest batch was fetched
    batches: Any = None  # torch's iterator over the share, once it exists
    num_batches: int = 0
    end_of_dataloader: bool = False
    remainder: int = -1
    is_beside: bool = False
    position: None = None

    @property
    def loader(self) -> LoaderPass:
        return self

    def __len__(self) -> int:
        return len(self.base_dataloader)


class ReportingIterator(Iterator[Any]):
    """A loader's iterator, which reports its batches and its end.

    Args:
        batches: the iterator itself, which has what is not here.
        length: how many batches it has; -1: unknown.
        is_training: returns whether the model is in train mode.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        length: int,
        current: LoaderPass,
        loop: LoopState,
        is_training: Callable[[], bool],
    ) -> None:
        self._batches, self._length, self._pass, self._loop = batches, length, current, loop
        self._is_training = is_training
        loop.enter(current)

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._loop.leave(self._pass, at_end=True)
            raise
        self._pass.num_batches += 1
        self._pass.is_training = self._is_training()
        self._pass.end_of_dataloader = self._pass.num_batches == self._length
        self._loop.enter(self._pass, batch)
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name in ("_batches", "_pass"):  # not set yet
            raise AttributeError(name)
        if name == NUM_YIELDED and self._pass.share is not None:
            return 0  # that a restarted replica has to skip: what it did of its share is not handed out again
        return getattr(self._batches if self._pass.batches is None else self._pass.batches, name)

    def __del__(self) -> None:
        self._loop.leave(self._pass)


class TrainingData:
    """The passes over a script's data.

    A rank that has made no step yet takes the passes for training that began with its model in train mode.

    Args:
        is_training: whether a model that is trained is in train mode.
        observer: is notified of passes; see `LoopState`.
        place: the replica that this process belongs to, if replicas come and go.

    Attributes:
        slots: the shares of a replica that comes and goes, a `farflung.data.slots.Slots`; None: there are no shares.
        num_parts: among how many ranks of this replica a sampler shares out the data.
    """

    def __init__(self, is_training: Callable[[], bool], observer: Observer, place: Place = FIXED) -> None:
        self.is_training, self._place = is_training, place
        self.slots: Any = None
        self.num_parts = 1
        self._loop = LoopState()
        self._loop.observe(observer)
        self._trace = Trace()
        self._trained: weakref.WeakSet[DistributedSampler[Any]] = weakref.WeakSet()
        self._begun: weakref.WeakSet[DistributedSampler[Any]] = weakref.WeakSet()  # in train mode
        self._evaluated: weakref.WeakSet[DistributedSampler[Any]] = weakref.WeakSet()  # begun in eval mode
        self._latest: weakref.ref[DistributedSampler[Any]] | None = None  # of those begun in train mode
        self._shares: weakref.WeakKeyDictionary[DataLoader[Any], tuple[DataLoader[Any], Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._epochs: weakref.WeakKeyDictionary[DataLoader[Any], int] = weakref.WeakKeyDictionary()  # of latest passes
        self.read_ahead: weakref.WeakSet[DistributedSampler[Any]] = (
            weakref.WeakSet()
        )  # whose last batch is trained on after the end of the pass, which the framework reports
        self.is_inside = False  # a share is drawn, which tells samplers their epochs

    def install(self) -> None:
        around(DistributedSampler, "__iter__", self._draw)
        around(DataLoader, "__iter__", self.iterate)
        around(DataLoader, "__len__", self._length)

    def stepped(self) -> Any:
        """Record what a step was made on; return the pass whose loop it is in, if any.

        Frameworks begin a pass of an evaluation before they put the model into eval mode, so the latest pass that began
        in train mode counts only for scripts that read a sampler without a loader. They also leave one unfinished
        without closing it, so a pass whose latest batch came in the mode of the step comes before all others.
        """
        is_training = self.is_training()
        around = self._loop.around(self._trace, lambda one: one.is_training == is_training)
        latest = None if self._latest is None else self._latest()
        sampler = latest if around is None else sampler_of(around.loader.base_dataloader)
        if sampler is not None:
            self._trained.add(sampler)
        return around

    def __contains__(self, sampler: DistributedSampler[Any]) -> bool:
        return sampler in (self._trained or self._begun)

    def _begin(self, sampler: DistributedSampler[Any]) -> None:
        if self.is_training():
            self._begun.add(sampler)
            self._latest = weakref.ref(sampler)
        else:
            self._evaluated.add(sampler)

    def _draw(self, draw: Callable[..., Iterator[int]], sampler: DistributedSampler[Any]) -> Iterator[int]:
        if not self.is_inside:
            self._begin(sampler)
        return draw(sampler)

    def iterate(self, iterate: Callable[..., Iterator[Any]], loader: DataLoader[Any]) -> Iterator[Any]:
        """Begin a pass over a loader, whose class begins one by `iterate`."""
        sampler = sampler_of(loader)
        if sampler is None or self.is_inside:
            return iterate(loader)
        copy = share = None
        if self.slots is not None and self._is_shared(sampler):
            if loader not in self._shares:
                self._shares[loader] = self.slots.shared_as_it_is(loader, self.num_parts)
            copy, share = self._shares[loader]
        current = LoaderPass(loader, share, self.is_training())
        self._loop.begin(current)
        self._begin(sampler)  # whose class may draw in a function of its own
        if copy is not None:
            batches: Any = self._shared(loader, sampler, copy, current)
            return ReportingIterator(batches, -1, current, self._loop, self.is_training)
        batches = iterate(loader)
        length = -1 if is_by_accelerate(sampler) else length_hint(batches, -1)  # it reads the last batch a step before
        return ReportingIterator(batches, length, current, self._loop, self.is_training)

    def _length(self, length: Callable[..., int], loader: DataLoader[Any]) -> int:
        """Return the share of one of the replicas that the run begins with, by which schedules are planned."""
        sampler = sampler_of(loader)
        if sampler is None or self.is_inside or not self.is_planned(sampler):
            return length(loader)
        return -(-length(loader) // (expected_of(self._place) if self.slots is None else self.slots.expected))

    def is_planned(self, sampler: DistributedSampler[Any]) -> bool:
        """Return whether a sampler is of data that replicas share in training, each as much as it can.

        A sampler that shuffles counts as such before its first pass too, as each fit makes new samplers.
        """
        if not self._is_shared(sampler):
            return False
        return sampler in self._trained or (sampler.shuffle and sampler not in self._evaluated)

    def _is_shared(self, sampler: DistributedSampler[Any]) -> bool:
        is_elastic = self.slots is not None or self._place.member is not None  # before it has a model, too
        return is_elastic and sampler.num_replicas == self.num_parts

    @contextmanager
    def _inside(self) -> Iterator[None]:
        before, self.is_inside = self.is_inside, True
        try:
            yield
        finally:
            self.is_inside = before

    def _shared(
        self, loader: DataLoader[Any], sampler: DistributedSampler[Any], copy: DataLoader[Any], current: LoaderPass
    ) -> Iterator[Any]:
        """Yield the batches of this replica's share of an epoch, or of all the data in an evaluation."""
        share = current.share
        with self._inside():
            following = self._epochs.get(loader, -1) + (not share.is_unused)
            epoch = max(sampler.epoch, following) if self.is_training() else sampler.epoch
            share.begin(epoch)
            if share.is_shared:
                self._epochs[loader] = epoch
            current.batches = iter(copy)
        while True:
            with self._inside():
                batch = next(current.batches, _END)
            if batch is _END:
                break
            if share.hands_out():
                yield batch
        if share.shows_one(sys._getframe()):
            with self._inside():
                shown = next(iter(copy))
            yield shown
        share.close()


_END = object()


def sampler_of(loader: DataLoader[Any]) -> DistributedSampler[Any] | None:
    """Return the `DistributedSampler` of a loader, or what shares out its data in its place; None: it has none."""
    found: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    shards: list[Any] = [one for one in (loader.batch_sampler, loader.dataset) if is_by_accelerate(one)]
    return next(iter(shards), found if isinstance(found, DistributedSampler) else None)


def is_by_accelerate(sampler: Any) -> bool:
    """Return whether Hugging Face's Accelerate shares out a loader's data by `sampler`; it reads a batch ahead."""
    shards = ("BatchSamplerShard", "IterableDatasetShard")
    return type(sampler).__module__ == "accelerate.data_loader" and type(sampler).__name__ in shards
