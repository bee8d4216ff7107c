# SPDX-License-Identifier: Apache-2.0
"""Data sets without indices: every rank reads the whole stream and keeps its own part of each round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset, default_convert

from farflung.base.tree import batch_size_of, leaves_of
from farflung.comm.packet import is_plain_bytes
from farflung.comm.tensor_memory import host_bytes
from farflung.data.batches import plain_or_none, state_of
from farflung.data.samplers import check_split, rounds


@dataclass(eq=False, repr=False)
class IterableDatasetShard(IterableDataset[Any]):
    """The share of one process in an iterable data set.

    Args:
        dataset: yields samples, the same ones in the same order on every process.
        batch_size: samples of a batch of one process or, with `split_batches`, of all processes together, when it must
            be a multiple of `num_processes`.
        drop_last: leave out a last round that is not whole.
        num_processes, process_index: how many share the samples, and which of them this is.
        even_batches: complete a last round that is not whole with samples of the first.
    """

    dataset: IterableDataset[Any]
    batch_size: int = 1
    drop_last: bool = False
    num_processes: int = 1
    process_index: int = 0
    split_batches: bool = False
    even_batches: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if self.split_batches:
            check_split(self.batch_size, self.num_processes)
        self.epoch = 0
        self._began_with: str | None = None  # tells the first sample from others, until it has gone out with its round
        self._first: list[Any] | None = None  # the first round of the iteration that began last
        self._is_read = False  # that iteration came to the end of the data
        self._goes_on = False  # the next one does not begin at the beginning

    def _begin_with(self, sample: Any) -> None:
        """Record the first sample of an iteration, the same on all processes."""

    @property
    def part(self) -> int:
        """Samples of one round that belong to this process."""
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the samples of this process; only for data sets that know their own length."""
        return self._own(len(self.dataset))  # type: ignore[arg-type]

    def num_batches(self, num_workers: int) -> int:
        """Return the batches of this process if each of `num_workers` reads every `num_workers`-th sample.

        Each worker's samples end in a batch of their own, so there may be more batches than in one stream.
        """
        length = len(self.dataset)  # type: ignore[arg-type]
        streams = [len(range(worker, length, num_workers)) for worker in range(num_workers)]
        return sum(-(-self._own(samples) // self.part) for samples in streams)

    def _own(self, length: int) -> int:
        """Return how many of a stream's `length` samples this process gets, padding included."""
        whole, left = divmod(length, self.part * self.num_processes)
        if self.drop_last or left == 0:
            return whole * self.part
        if self.even_batches:
            return (whole + 1) * self.part
        return whole * self.part + min(max(left - self.process_index * self.part, 0), self.part)

    def __iter__(self) -> Iterator[Any]:
        for samples, _ in self.shares():
            yield from samples

    def shares(self) -> Iterator[tuple[list[Any], list[Any] | None]]:
        """Yield this process's samples of each round and, when the round is padded, all its samples that are not."""
        own = slice(self.process_index * self.part, (self.process_index + 1) * self.part)
        size = self.part * self.num_processes
        first, goes_on = self._first, self._goes_on
        self._first, self._goes_on = (first, False) if goes_on else (None, False)
        source: Iterable[Any] = () if goes_on and self._is_read else self.dataset
        self._is_read = goes_on and self._is_read
        given = first if goes_on else None
        for k, (samples, real) in enumerate(
            rounds(source, size, drop_last=self.drop_last, even=self.even_batches, first=given)
        ):
            if k == 0:
                self._begin_with(samples[0])
            if self._first is None and self.even_batches and not self.drop_last:
                self._first = samples
            self._is_read = real < size
            yield samples[own], samples[:real] if len(samples) > real else None
        self._is_read = True


class Marked(NamedTuple):
    """A sample, or a batch, of a padded round, or of the first of a stream.

    `real` is the number of samples in that round that are no padding; 0: all of them. `first` tells the first sample
    of the stream from others; None: nothing can, or this is another round.
    """

    content: Any
    real: int
    first: str | None = None


@dataclass(eq=False, repr=False)
class MarkedShard(IterableDatasetShard):
    """A shard that marks the samples of padded rounds, so that the count reaches the loader with the batch.

    Only in this way does it come through worker processes, each of which has a stream, and a last round, of its own.
    With `holds_batches`, the items of the data set are whole batches, whose samples are counted. With `is_checked`,
    what tells the first sample of the stream from others comes with the batches of the first round.
    """

    holds_batches: bool = field(default=False, kw_only=True)
    is_checked: bool = field(default=False, kw_only=True)

    def _begin_with(self, sample: Any) -> None:
        self._began_with = told_apart(sample) if self.is_checked else None

    def __iter__(self) -> Iterator[Any]:
        for samples, real in self.shares():
            first, self._began_with = self._began_with, None
            if real is None and first is None:
                yield from samples
            else:
                count = sum(map(_num_samples, real or ())) if self.holds_batches else len(real or ())
                yield from (Marked(sample, count, first) for sample in samples)


class StatefulShard(MarkedShard):
    """A shard of a data set that keeps a state; of any other, loaders such as torchdata's must see that it has none."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return how far the data set was read, together with its own state; None if it has none.

        Only this process's own reading is known: with workers, each of them reads by itself.
        """
        own = state_of(self.dataset)
        first = plain_or_none(self._first)
        if own is None or (self._first is not None and first is None):
            return None
        return {"dataset": own, "first": first, "is_read": self._is_read}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._first, self._is_read, self._goes_on = state_dict["first"], state_dict["is_read"], True
        if not self._is_read:  # else it would take its old state for the iteration after this one
            self.dataset.load_state_dict(state_dict["dataset"])  # type: ignore[attr-defined]


def collated(collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    """Collate samples, and put the mark that they have on their batch."""
    if type(samples) is Marked:  # the loader does no batching
        return samples._replace(content=collate_fn(samples.content))
    if type(samples) is list and samples and type(samples[0]) is Marked:
        return samples[0]._replace(content=collate_fn([sample.content for sample in samples]))
    return collate_fn(samples)


def told_apart(sample: Any) -> str | None:
    """Return a value that identifies a sample by its content, the same in each process; None: it is not all plain."""
    found = 0
    leaves = leaves_of(sample)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and is_plain_bytes(leaf):
            leaf = host_bytes(leaf)
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufcSU":
            leaf = leaf.tobytes()
        elif isinstance(leaf, (str, bool, int, float)) or leaf is None:
            leaf = repr(leaf).encode()
        elif not isinstance(leaf, bytes):
            return None
        found = crc32(leaf, found)
    return f"{len(leaves)} {found:08x}" if leaves else None


def _num_samples(batch: Any) -> int:
    length = batch_size_of(default_convert(batch))  # type: ignore[no-untyped-call]
    return 1 if length is None else length
