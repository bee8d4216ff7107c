# SPDX-License-Identifier: Apache-2.0
"""Index arithmetic: which batches of indices, or which part of each, belong to one rank.

A *round* is what all ranks consume together in one step: one batch for each of them or, with `split_batches`, one batch
cut into equal parts. All rounds but the last are whole by themselves. The last one is filled up with samples from the
first round (`even_batches`), or dropped (`drop_last`), or handed out as it is. With each share comes the number of
samples in its round that are no padding; 0 means no padding.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, cycle, islice
from typing import Any, TypeAlias, TypeVar
from zlib import crc32

import torch
from torch.utils.data import BatchSampler, RandomSampler

from farflung.base.errors import ConfigError
from farflung.base.words import counted

Batch: TypeAlias = "Sequence[Any]"
T = TypeVar("T")

_SEED_MASK = 2**64 - 1  # what torch takes for a seed


def made_generator() -> torch.Generator:
    """Return a generator on torch's default device, on which samplers and loaders draw."""
    return torch.Generator(torch.get_default_device())


def filled(items: Sequence[T], first: Sequence[T], size: int) -> list[T]:
    """Complete `items` to `size` of them with those of `first`, over and over from its beginning."""
    return [*items, *islice(cycle(first), size - len(items))]


def rounds(
    items: Iterable[T], size: int, *, drop_last: bool, even: bool, first: list[T] | None = None
) -> Iterator[tuple[list[T], int]]:
    """Cut a stream into lists of `size`, each with its number of items that are no padding.

    A shorter last list is left out (`drop_last`), or filled up with the items of the first one (`even`), which is
    given if the stream starts behind it.
    """
    stream = iter(items)
    while group := list(islice(stream, size)):
        real = len(group)
        first = group if first is None else first
        if real < size and drop_last:
            return
        yield filled(group, first, size) if even and real < size else group, real


def batches_after(batch_sampler: Iterable[T], skip: int, keep: int) -> Iterator[T]:
    """Iterate over a batch sampler without its first `skip` batches, but with the first `keep` of those.

    torch's own `BatchSampler` need not even make the batches that are left out. An order is drawn when it is without
    skipping: by torch's own when the first batch is asked for, by torchdata's when its iterator is made. A loader draws
    the seed of its workers in between.
    """
    keep = min(keep, skip)
    if skip and isinstance(batch_sampler, BatchSampler) and type(batch_sampler) is BatchSampler:
        return _samples_after(batch_sampler, skip, keep)
    stream = iter(batch_sampler)
    return chain(islice(stream, keep), islice(stream, skip - keep, None))


def _samples_after(batch_sampler: BatchSampler, skip: int, keep: int) -> Iterator[Any]:
    size, drop_last = batch_sampler.batch_size, batch_sampler.drop_last
    samples = iter(batch_sampler.sampler)
    kept = BatchSampler(list(islice(samples, keep * size)), size, drop_last)
    rest = BatchSampler(islice(samples, (skip - keep) * size, None), size, drop_last)
    yield from chain(kept, rest)


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order depends on a seed and an epoch alone: the generator starts from their sum.

    Args:
        args, kwargs: those of `torch.utils.data.RandomSampler`.
        data_seed: the seed; None takes torch's initial seed at the time of construction.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin(data_seed)

    @classmethod
    def of(cls, sampler: RandomSampler, data_seed: int | None) -> SeedableRandomSampler:
        made = cls.__new__(cls)
        made.__dict__.update(sampler.__dict__)
        made._begin(data_seed)
        return made

    def _begin(self, data_seed: int | None) -> None:
        self.initial_seed = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = made_generator()
        self.generator.manual_seed((self.initial_seed + self.epoch) & _SEED_MASK)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class SamplerView(BatchSampler):
    """A batch sampler that wraps another one."""

    def __init__(self, batch_sampler: BatchSampler | Iterable[Any]) -> None:
        self.batch_sampler: Any = batch_sampler
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    @property
    def total_length(self) -> int:
        return len(self.batch_sampler)


class BatchSamplerShard(SamplerView):
    """The share of one process in the batches of a batch sampler.

    Args:
        batch_sampler: yields batches of indices, the same ones on every process. If it has no `batch_size`, its
            batches may be of any size and are never completed or cut: processes get whole batches, as many each.
        num_processes, process_index: how many share them, and which of them this is.
        split_batches: each process gets a part of each batch, instead of every `num_processes`-th batch. The batch size
            must be known, and a multiple of `num_processes`.
        even_batches: every process gets equally many full batches; what is missing in the last round is taken from the
            first. Otherwise each index is handed out once and the last round may be short, or missing for some.

    Attributes:
        first: tells the first batch of the latest iteration from others; None: it was not read yet, or nothing can.
        remainder: of the latest complete iteration: indices in its last round that were no padding, on all processes
            together; 0 if there was no padding.
    """

    def __init__(
        self,
        batch_sampler: BatchSampler | Iterable[Any],
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        super().__init__(batch_sampler)
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.first: str | None = None
        self.remainder = 0
        if split_batches:
            check_split(self.batch_size, num_processes)

    def __len__(self) -> int:
        total = len(self.batch_sampler)
        if self.split_batches:
            return total - self._misses_last_part(total)
        length, left = divmod(total, self.num_processes)
        gets_one_more = left > (0 if self.even_batches else self.process_index)
        return length + (gets_one_more and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        return self.after(0)

    def after(self, num_batches: int) -> Iterator[Any]:
        """Iterate without this process's first `num_batches` batches; the others are those of a whole iteration."""
        real = 0
        for share, real in self._shares(num_batches):  # noqa: B007  the last one is wanted
            yield share
        self.remainder = real

    def _shares(self, skip: int) -> Iterator[tuple[Any, int]]:
        per_round = 1 if self.split_batches else self.num_processes
        stream = self._noted(batches_after(self.batch_sampler, skip * per_round, keep=per_round))
        first = list(islice(stream, per_round)) if skip else None
        if self.batch_size is None or not (self.even_batches or self.split_batches):
            return self._whole(stream, first)
        return self._even(stream, self.batch_size, first) if self.even_batches else self._cut(stream, self.batch_size)

    def _noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        self.first = None
        for batch in islice(batches, 1):
            with suppress(TypeError, ValueError, RuntimeError):  # indices that are objects of the script's
                self.first = f"{crc32(json.dumps(batch, default=int).encode()):08x}"
            yield batch
        yield from batches

    def _whole(self, batches: Iterator[Any], first: list[Any] | None) -> Iterator[tuple[Any, int]]:
        """Deal whole batches, whatever their lengths, in turn; yield those of this process."""
        rank, size, even = self.process_index, self.num_processes, self.even_batches
        for group, real in rounds(batches, size, drop_last=self.drop_last, even=even, first=first):
            if rank < len(group):
                lengths = [len(batch) if hasattr(batch, "__len__") else 1 for batch in group[:real]]
                yield group[rank], sum(lengths) if even and real < size else 0

    def _even(self, batches: Iterator[Batch], batch_size: int, first: list[Any] | None) -> Iterator[tuple[Batch, int]]:
        """Deal batches of one size so that all processes get equally many, all full; yield those of this one.

        A batch of another size before the last one is a ConfigError.
        """
        rank, size, split = self.process_index, self.num_processes, self.split_batches
        per_round, part = (1, batch_size // size) if split else (size, batch_size)
        own = slice(rank * part, (rank + 1) * part)
        full = [batch_size] * per_round
        while group := list(islice(batches, per_round)):
            first = group if first is None else first
            if list(map(len, group)) == full:
                yield group[0][own] if split else group[rank], 0
                continue
            if self.drop_last and len(group) < per_round:
                return
            _refuse_varying(group, batches, batch_size)
            if not self.drop_last:
                samples = list(chain.from_iterable(group))
                start = list(chain.from_iterable(first))
                yield filled(samples, start, per_round * batch_size)[own], len(samples)

    def _cut(self, batches: Iterator[Batch], batch_size: int) -> Iterator[tuple[Batch, int]]:
        """Cut each batch into parts without any padding; yield those of this process that are not empty."""
        part = batch_size // self.num_processes
        for batch in batches:
            if len(batch) > batch_size:
                raise ConfigError(
                    f"split_batches: the batch sampler has batch_size {batch_size} but yielded a batch of "
                    f"{counted(len(batch), 'sample')}. Set its batch_size to the size of its longest batch, or use "
                    "split_batches=False."
                )
            share = batch[self.process_index * part : (self.process_index + 1) * part]
            if len(share) and not (self.drop_last and len(batch) < batch_size):
                yield share, 0

    def _misses_last_part(self, total: int) -> bool:
        """Whether the last batch, cut without padding, is too short to have a part for this process."""
        inner = self.batch_sampler
        if self.even_batches or self.drop_last or total == 0 or type(inner) is not BatchSampler:
            return False
        last = len(inner.sampler) - (total - 1) * inner.batch_size  # type: ignore[arg-type]
        return last <= self.process_index * (inner.batch_size // self.num_processes)


class SkipBatchSampler(SamplerView):
    """A batch sampler without its first batches, whose data is then never read.

    Args:
        keep: how many from the very first one on are handed out nevertheless: they complete a short last round. They
            do not count for the length.
    """

    def __init__(self, batch_sampler: BatchSampler | Iterable[Any], skip_batches: int = 0, *, keep: int = 0) -> None:
        super().__init__(batch_sampler)
        self.skip_batches = skip_batches
        self.keep = keep

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.batch_sampler, BatchSamplerShard):
            return self.batch_sampler.after(self.skip_batches)
        return batches_after(self.batch_sampler, self.skip_batches, self.keep)


def check_split(batch_size: int | None, num_processes: int) -> None:
    """Raise ConfigError unless batches of `batch_size` can be cut into `num_processes` equal parts."""
    if batch_size is None:
        raise ConfigError(
            "split_batches=True needs a known batch size, but neither the loader nor its batch sampler has one. Give "
            "the batch sampler a `batch_size` attribute, or use split_batches=False."
        )
    if batch_size % num_processes:
        raise ConfigError(
            f"split_batches=True needs a batch size ({batch_size}) that is a round multiple of {num_processes}, the "
            f"number of processes. Try {-(-batch_size // num_processes) * num_processes}, or use split_batches=False."
        )


def _refuse_varying(group: list[Batch], rest: Iterator[Batch], batch_size: int) -> None:
    """Raise unless the last batch of `group` alone is shorter than `batch_size`, and nothing follows."""
    lengths = [len(batch) for batch in group]
    odd = [length for length in lengths[:-1] if length != batch_size]
    if not odd and (lengths[-1] > batch_size or (lengths[-1] < batch_size and next(rest, None) is not None)):
        odd = lengths[-1:]
    if odd:
        raise ConfigError(
            f"even_batches: the batch sampler has batch_size {batch_size} but yielded a batch of "
            f"{counted(odd[0], 'sample')} before its end, so ranks cannot get equal batches. Use "
            "even_batches=False for batches of varying size."
        )
