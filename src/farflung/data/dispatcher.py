# SPDX-License-Identifier: Apache-2.0
"""Dispatching: rank 0 reads all the data and hands each rank its own part of every round, in one collective a round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from farflung.base.errors import ConfigError
from farflung.comm.group import Group
from farflung.comm.scatter import Scatter
from farflung.data.batches import BatchView, concatenated, extended, length_of
from farflung.data.loader import LoaderSettings, PreparedLoader
from farflung.data.resume.iteration import NOTHING, Iteration, opened, pack_rounds, replay, unpack_rounds
from farflung.data.resume.progress import Progress
from farflung.data.samplers import check_split, filled
from farflung.data.torch_loaders import Source, made_loader, refuse_mesh
from farflung.process.bootstrap import join_world

SliceFn: TypeAlias = Callable[..., Any]
# The parts by rank, NOTHING if one gets none; how many samples are no padding (0: all, -1: not known).
_Round: TypeAlias = tuple[list[Any], int]

_NO_PART, _PART, _LAST_PART = range(3)


class DataLoaderDispatcher(PreparedLoader):
    """A loader that is read on rank 0 alone; all ranks iterate it together.

    A round is `size` batches of the base loader or, with `split_batches`, one. Rank 0 is one round ahead, so that it
    knows the last one when it hands it out. Arguments that are not here are those of `DataLoaderShard`.

    Args:
        split_batches: cut each batch, instead of giving one to each rank.
        slice_fn: `slice_fn(batch, slice, process_index=, num_processes=)` cuts a rank's part out of a round's batch.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: SliceFn | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        refuse_mesh(torch_device_mesh)
        world = join_world()
        base = made_loader(dataset, use_stateful_dataloader, kwargs)
        batch_size = base.batch_size
        if split_batches and batch_size is not None:
            check_split(batch_size, world.size)
        factor = 1 if split_batches else world.size
        settings = LoaderSettings(
            device=world.device,
            non_blocking=_non_blocking,
            stateful=use_stateful_dataloader,
            total_batch_size=None if batch_size is None else batch_size * factor,
        )
        self._share_out(Source(base), settings, world.group, split_batches, drop_last=_drop_last, slice_fn=slice_fn)
        self.skip_batches = skip_batches
        self._progress.choose(iteration)

    @classmethod
    def over(
        cls, source: Source, settings: LoaderSettings, group: Group, split_batches: bool = False, **options: Any
    ) -> DataLoaderDispatcher:
        """Share out the batches that a loader makes on rank 0; it is never iterated on the other ranks.

        `options` are: `changes`, attributes of the loader that are replaced; `slice_fn`; `even_batches`: complete a
        round that cannot be cut into equal parts with samples of the first, else parts differ and ranks may get none;
        `drop_last`: leave out a last round that has too few batches.
        """
        made = cls.__new__(cls)
        made._share_out(source, settings, group, split_batches, **options)
        return made

    def _share_out(
        self,
        source: Source,
        settings: LoaderSettings,
        group: Group,
        split_batches: bool,
        *,
        changes: Mapping[str, Any] = MappingProxyType({}),
        even_batches: bool = True,
        drop_last: bool,
        slice_fn: SliceFn | None,
    ) -> None:
        self._group = group
        self._scatter = Scatter(group)
        self.split_batches = split_batches
        self.even_batches = even_batches
        self._drop_last = drop_last
        self.slice_fn = slice_fn
        super().__init__(source, settings, changes, progress=Progress(reads=group.rank == 0, pack=pack_rounds))

    def __len__(self) -> int:
        whole, left = divmod(self.base_source.num_batches(), self._per_round)
        return max(0, whole + (left > 0 and not self._drop_last) - self.skip_batches)

    def _stream(self, one: Iteration) -> Iterator[tuple[Any, bool, int]]:
        move = self._move
        for kind, part, real in self._sent(one) if self._group.rank == 0 else self._received(one):
            if kind != _NO_PART:
                yield part if move is None else move(part), kind == _LAST_PART, real

    def _received(self, one: Iteration) -> Iterator[tuple[int, Any, int]]:
        # A loader draws its workers' seed when they start: draw it here too, so that ranks whose random numbers are
        # alike stay alike.
        if not one.has_workers:
            torch.empty((), dtype=torch.int64).random_(generator=self.base_dataloader.generator)
        self._progress.workers.were_started |= self.base_source.keeps_workers
        if one.resumed_at is not None:
            one.arrive()
        more = True
        while more:
            more, kind, part, real = self._scatter.receive()
            yield kind, part, real

    def _sent(self, one: Iteration) -> Iterator[tuple[int, Any, int]]:
        """Send round after round. A rank's part is its last one when no round that follows has a part for it."""
        ranks = range(self._group.size)
        rounds, prefetched = self._guarded(self._begun_rounds, one)
        one.prefetched = prefetched
        at_end = more = False
        while more or not at_end:
            while not at_end and not all(_gets_part(rank, prefetched[1:]) for rank in ranks):
                following = self._guarded(next, rounds, None)
                at_end = following is None
                prefetched += [] if following is None else [following]
            one.in_hand = parts, real = prefetched.pop(0) if prefetched else ([NOTHING for _ in ranks], 0)
            more = bool(prefetched)
            words = []
            for rank, part in enumerate(parts):
                kind = _PART if _gets_part(rank, prefetched) else _LAST_PART
                words.append((more, _NO_PART, None, 0) if part is NOTHING else (more, kind, part, real))
            _, kind, part, real = self._scatter.send(words)  # it leaves while the next round is read
            if not more:
                self._scatter.flush()
            yield kind, part, real

    def _begun_rounds(self, one: Iteration) -> tuple[Iterator[_Round], list[_Round]]:
        """Start reading; return the reader, and the rounds that were read but not handed out before it continues."""
        rounds, position = self._rounds(one), one.resumed_at
        if position is None:
            return rounds, []
        prefetched = list(islice(rounds, 0 if position.dataset is not None else max(1, position.num_prefetched)))
        if position.prefetched is not None:
            prefetched = unpack_rounds(position.prefetched)
        one.arrive()
        return rounds, prefetched

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that reads; if it fails, notify the other ranks, which are waiting or will be."""
        try:
            return function(*args)
        except Exception as error:
            self._scatter.fail(f"its data loader raised {error!r}")
            raise

    def _rounds(self, one: Iteration) -> Iterator[_Round]:
        """Start to read; return an iterator that shares out all rounds but the skipped ones."""
        per_round, drop = self._per_round, one.skip
        source, position = self.base_source, one.resumed_at
        base = source.loader
        first: list[Any] | None = None
        if position is not None and position.dataset is not None:
            drop, first = 0, position.first
            if position.is_read:
                return iter(())
            source.keeper.load_state_dict(position.dataset)
        elif drop and source.by_index:
            drop = 1 if self._needs_first else 0  # the first round is read for its padding
            base = source.without_first(one.skip * per_round, keep=drop * per_round)
        one.source = batches = opened(one, base)
        if position is not None and drop > 1:
            first = list(islice(batches, per_round))
            replay(batches, (drop - 1) * per_round, to_the_end=position.ended)
            drop = 0
        return self._shared_out(one, batches, first, drop)

    @property
    def _needs_first(self) -> bool:
        """Whether samples of the first round may complete the last one."""
        return bool(self.even_batches and not self._drop_last)

    def _shared_out(
        self, one: Iteration, batches: Iterator[Any], first: list[Any] | None, drop: int
    ) -> Iterator[_Round]:
        per_round = self._per_round
        while group := list(islice(batches, per_round)):
            if len(group) < per_round and self._drop_last:
                return
            first = group if first is None else first
            one.first = first if self._needs_first else None
            if drop == 0:
                yield self._dealt(group, first)
            else:
                drop -= 1

    @property
    def _per_round(self) -> int:
        return 1 if self.split_batches else self._group.size

    def _dealt(self, group: list[Any], first: list[Any]) -> _Round:
        """Share out a round: a whole batch for each rank if that is fair, or equal parts of all of them together."""
        lengths = [length_of(batch) for batch in group]
        if self.split_batches:
            if lengths[0] is None:
                raise ConfigError(
                    "split_batches needs a tensor with a batch dimension in each batch, but got "
                    f"{group[0]!r:.80}. Use split_batches=False."
                )
        elif len(group) == self._group.size and len(set(lengths)) == 1 and self.slice_fn is None:
            return group, 0
        batches = [BatchView(batch) for batch in group]
        if None in lengths or not all(batches[0].fits(batch) for batch in batches):
            return self._dealt_whole(group, lengths)
        return self._cut(concatenated(batches), first)

    def _dealt_whole(self, group: list[Any], lengths: list[int | None]) -> _Round:
        """Give each rank a whole batch, again from the first one on if there are too few."""
        missing = self._group.size - len(group)
        if missing == 0:
            return group, 0
        if not self.even_batches:
            return group + [NOTHING] * missing, 0
        # An item of unknown length is one sample if the loader makes no batches.
        is_known = None not in lengths or not self.base_source.makes_batches
        real = sum(1 if length is None else length for length in lengths) if is_known else -1
        return filled(group, group, self._group.size), real

    def _cut(self, batch: BatchView, first: list[Any]) -> _Round:
        """Cut a round's batch into one part for each rank, completed with samples of the first round if it must."""
        size, length = self._group.size, batch.length
        assert length is not None
        part = -(-length // size)
        missing = part * size - length
        real = 0
        if missing and self.even_batches:
            source = [other for other in map(BatchView, first) if batch.fits(other)]
            batch, real = extended(batch, concatenated(source) if source else batch, missing), length
            length += missing
        cuts = [slice(rank * part, min((rank + 1) * part, length)) for rank in range(size)]
        return [self._taken(batch, cut, rank) for rank, cut in enumerate(cuts)], real

    def _taken(self, batch: BatchView, cut: slice, rank: int) -> Any:
        if cut.start >= cut.stop:
            return NOTHING
        if self.slice_fn is None:
            return batch.cut(cut)
        return self.slice_fn(batch.whole(), cut, process_index=rank, num_processes=self._group.size)


def _gets_part(rank: int, rounds: list[_Round]) -> bool:
    return any(parts[rank] is not NOTHING for parts, _ in rounds)
