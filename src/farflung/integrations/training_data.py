# SPDX-License-Identifier: Apache-2.0
"""Follows the data that a script reads through torch's `DistributedSampler`, and gives a replica its share.

Epochs of the training are those of the samplers that the script trains from. If replicas come and go, each is rank 0 of
1, or one of a few ranks, and its samplers would return all of the data. So a pass of training gets the replica's share
in data slots, as a prepared loader does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from farflung.integrations.patching import around

_END = object()


class TrainingData:
    """The passes over a script's data.

    A rank that has made no step yet takes the passes for training that began with its model in train mode.

    Args:
        is_training: whether a model that is trained is in train mode.

    Attributes:
        slots: the shares of a replica that comes and goes, a `farflung.data.slots.Slots`; None: there are no shares.
        num_parts: among how many ranks of this replica a sampler shares out the data.
    """

    def __init__(self, is_training: Callable[[], bool]) -> None:
        self.is_training = is_training
        self.slots: Any = None
        self.num_parts = 1
        self._trained: weakref.WeakSet[DistributedSampler[Any]] = weakref.WeakSet()
        self._begun: weakref.WeakSet[DistributedSampler[Any]] = weakref.WeakSet()  # in train mode
        self._latest: weakref.ref[DistributedSampler[Any]] | None = None  # of these
        self._shares: weakref.WeakKeyDictionary[DataLoader[Any], tuple[DataLoader[Any], Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._under_way: list[Any] = []  # shares of passes
        self._epochs: weakref.WeakKeyDictionary[DataLoader[Any], int] = weakref.WeakKeyDictionary()  # of latest passes
        self.is_inside = False  # a share is drawn, which tells samplers their epochs

    def install(self) -> None:
        around(DistributedSampler, "__iter__", self._draw)
        around(DataLoader, "__iter__", self._iterate)
        around(DataLoader, "__len__", self._length)

    def stepped(self) -> None:
        """Record that a step was made in the latest pass; StateError if other replicas train on the same batches."""
        sampler = None if self._latest is None else self._latest()
        if sampler is not None:
            self._trained.add(sampler)
        if self._under_way:
            self._under_way[-1].check_trains()

    def __contains__(self, sampler: DistributedSampler[Any]) -> bool:
        return sampler in (self._trained or self._begun)

    def is_past(self) -> bool:
        """Whether the others are in the middle of a later epoch than that of the latest pass of training."""
        return any(share.is_past for _, share in self._shares.values() if share.is_shared)

    def synchronized(self) -> None:
        """Record that all replicas have come to the end of the epoch."""
        for _, share in self._shares.values():
            if share.has_begun:
                share.synchronized()

    def _begin(self, sampler: DistributedSampler[Any]) -> None:
        if self.is_training():
            self._begun.add(sampler)
            self._latest = weakref.ref(sampler)

    def _draw(self, draw: Callable[..., Iterator[int]], sampler: DistributedSampler[Any]) -> Iterator[int]:
        if not self.is_inside:
            self._begin(sampler)
        return draw(sampler)

    def _iterate(self, iterate: Callable[..., Iterator[Any]], loader: DataLoader[Any]) -> Iterator[Any]:
        sampler = sampler_of(loader)
        if sampler is None or self.is_inside:
            return iterate(loader)
        self._begin(sampler)  # whose class may draw in a function of its own
        return iterate(loader) if not self._is_shared(sampler) else self._shared(loader, sampler)

    def _length(self, length: Callable[..., int], loader: DataLoader[Any]) -> int:
        """Return the share of one of the replicas that the run begins with, by which schedules are planned."""
        sampler = sampler_of(loader)
        if sampler is None or self.is_inside or not self._is_shared(sampler):
            return length(loader)
        is_trained = sampler in self if self._trained else sampler.shuffle
        return -(-length(loader) // self.slots.expected) if is_trained else length(loader)

    def _is_shared(self, sampler: DistributedSampler[Any]) -> bool:
        return self.slots is not None and sampler.num_replicas == self.num_parts

    @contextmanager
    def _inside(self) -> Iterator[None]:
        before, self.is_inside = self.is_inside, True
        try:
            yield
        finally:
            self.is_inside = before

    def _shared(self, loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> Iterator[Any]:
        """Yield the batches of this replica's share of an epoch, or of all the data in an evaluation."""
        with self._inside():
            if loader not in self._shares:
                self._shares[loader] = self.slots.shared_as_it_is(loader, self.num_parts)
            copy, share = self._shares[loader]
            epoch = max(sampler.epoch, self._epochs.get(loader, -1) + 1) if self.is_training() else sampler.epoch
            share.begin(epoch)
            if share.is_shared:
                self._epochs[loader] = epoch
            batches = iter(copy)
        self._under_way.append(share)
        try:
            while True:
                with self._inside():
                    batch = next(batches, _END)
                if batch is _END:
                    break
                if share.hands_out():
                    yield batch
            share.close()
        finally:
            self._under_way.remove(share)


def sampler_of(loader: DataLoader[Any]) -> DistributedSampler[Any] | None:
    """Return the `DistributedSampler` of a loader, if it has one."""
    found = getattr(loader.batch_sampler, "sampler", loader.sampler)
    return found if isinstance(found, DistributedSampler) else None
