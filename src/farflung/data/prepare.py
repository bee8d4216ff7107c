# SPDX-License-Identifier: Apache-2.0
"""Preparing a loader: each rank gets its share of the data, read by itself or handed out by rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader

from farflung.base.checks import check_type, check_whole, wrong_type
from farflung.base.errors import ConfigError, Unsupported
from farflung.base.tree import batch_size_of
from farflung.comm import collectives
from farflung.comm.exchange import Exchange
from farflung.comm.group import Group, SoloGroup
from farflung.config.handlers import DataLoaderConfiguration
from farflung.data.dispatcher import DataLoaderDispatcher, SliceFn
from farflung.data.iterable import MarkedShard, StatefulShard
from farflung.data.loader import DataLoaderShard, LoaderSettings, PreparedLoader
from farflung.data.samplers import BatchSamplerShard, SeedableRandomSampler, check_split, made_generator
from farflung.data.shares import refuse_unshareable
from farflung.data.torch_loaders import SkipDataLoader, Source, refuse_mesh
from farflung.loop.state import LoopState
from farflung.process.seed import share_rng_state
from farflung.process.world import current_world

if TYPE_CHECKING:
    from farflung.data.slots import Slots

_START = "iter(loader)"  # what ranks do together at the start of a pass, as errors name it


def prepare_loader(
    loader: DataLoader[Any],
    *,
    exchange: Exchange,
    device: torch.device | None,
    state: LoopState | None,
    config: DataLoaderConfiguration,
    rng_types: Iterable[str],
    slice_fn: SliceFn | None = None,
    fixed_rank: Group | None = None,
    readers: Group | None = None,
    slots: Slots | None = None,
) -> DataLoaderShard | DataLoaderDispatcher:
    """Make a loader that gives each rank its share; one that is prepared already comes back as it is.

    All ranks take the random states `rng_types` from rank 0 at the start of each iteration; `generator` is that of the
    sampler or of the iterable data set. With a `fixed_rank`, which has a rank and a size, nothing is exchanged. The
    ranks of `readers` share out the data, if not all do: others see what one of these sees.
    `slots` are the shares of a replica that comes and goes.
    """
    if isinstance(loader, (DataLoaderShard, DataLoaderDispatcher)):
        if state is not None:
            loader.report_to(state)
        return loader
    if not isinstance(loader, DataLoader):
        raise wrong_type("prepare_data_loader: data_loader", loader, "a torch DataLoader")
    source = Source(loader)
    if config.use_seedable_sampler:
        source = source.seedable(config.data_seed)
    kind = DataLoaderShard if slots is None else slots.kind
    if slots is not None:
        _refuse_in_slots(config)
        source = slots.shared(source, 1 if config.split_batches else exchange.group.size)
    group = fixed_rank or readers or exchange.group
    batch_size, dispatches = source.batch_size, config.dispatch_batches
    sees_the_same = fixed_rank is None and group.size < exchange.group.size
    if sees_the_same and dispatches:
        raise Unsupported("dispatch_batches=True does not go with tensor parallelism. Leave it out: each rank reads.")
    settings = LoaderSettings(
        state=state,
        device=device,
        non_blocking=config.non_blocking,
        stateful=config.use_stateful_dataloader,
        already_sharded=bool(config.already_sharded),
    )
    if dispatches is None:
        dispatches = source.streams and device is not None and not config.already_sharded and not sees_the_same
    # As in Accelerate: a loader that dispatches draws no seeds from its generator.
    changes: dict[str, Any] = {"generator": None} if dispatches and not source.is_view else {}
    agreement = partial(_agreement, source, exchange, [str(kind) for kind in rng_types], dispatches)
    if group.size == 1 and not config.dispatch_batches:
        count = partial(_short_count, source) if source.by_index and not source.drop_last else None
        settings = replace(settings, total_batch_size=batch_size, agree=agreement() if sees_the_same else None)
        return kind.over(source, settings, changes, count=count)
    refuse_unshareable(source, group, config.already_sharded)
    factor = 1 if config.split_batches else group.size
    settings = replace(
        settings,
        total_batch_size=None if batch_size is None else batch_size * factor,
        may_be_uneven=not config.even_batches,
        # Ranks share whole rounds of one order; not if files are shared out, or each worker has a last round of its
        # own.
        ends_apart=batch_size is None or (source.streams and not dispatches),
        agree=agreement(),
    )
    if config.already_sharded:
        return kind.over(source, replace(settings, may_be_uneven=True, ends_apart=True), changes)
    if dispatches:
        if config.split_batches and batch_size is not None:
            check_split(batch_size, group.size)
        options = {"even_batches": config.even_batches, "drop_last": source.drop_last, "slice_fn": slice_fn}
        return DataLoaderDispatcher.over(source, settings, group, config.split_batches, changes=changes, **options)
    if config.split_batches and loader.batch_size is not None:
        changes["batch_size"] = loader.batch_size // group.size
    if source.streams:
        return _sharded_stream(source, settings, changes, group, config)
    return _sharded(kind, source, settings, changes, Exchange(group) if sees_the_same else exchange, group, config)


def _refuse_in_slots(config: DataLoaderConfiguration) -> None:
    """Raise ConfigError for settings that replicas that come and go can't follow."""
    if config.dispatch_batches:
        raise ConfigError(
            "with dispatch_batches=True one rank reads all the data, but the replicas of this run come and go, and "
            "share it by index. Use dispatch_batches=None."
        )
    if config.already_sharded:
        raise ConfigError(
            "already_sharded=True, but the replicas of this run come and go, and share the data by index. Leave it "
            "out, and give each process the whole data set."
        )


def _short_count(source: Source, batch: Any) -> int:
    """Count the samples of a last batch that is short; 0: it is not, or its first tensor has no entry for each."""
    try:
        left = len(source.order[0]) % (source.batch_size or 1)
    except TypeError:  # a sampler without a length
        return 0
    return left if batch_size_of(batch) == left else 0


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader without the first `num_batches` batches that `dataloader` gives this process.

    If samples are read by index, those of the skipped batches are not read. A prepared loader and the loader returned
    for it count one and the same epoch.
    """
    check_type("skip_first_batches: dataloader", dataloader, DataLoader, "a torch DataLoader")
    check_whole("skip_first_batches: num_batches", num_batches, least=0)
    if isinstance(dataloader, PreparedLoader):
        return dataloader.skipping(num_batches)
    source = Source(dataloader)
    return source.without_first(num_batches) if source.by_index else SkipDataLoader.over(source, num_batches)


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[str] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: SliceFn | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    *,
    already_sharded: bool | None = None,
) -> DataLoaderShard | DataLoaderDispatcher:
    """Prepare a loader outside of an `Accelerator`: the arguments are those of Accelerate's function of this name.

    Args:
        already_sharded: see `DataLoaderConfiguration`.
        num_processes, process_index: the processes that share the data, and which of them this is; None is those of the
            run. Other numbers only choose what this process reads: it then communicates with no other process.
        rng_types: None is `["generator"]`, so that all processes draw one order.

    Raises:
        ConfigError: settings that do not fit the loader, or dispatching among processes that are not those of the run.
        Unsupported: a mesh with axes along which ranks see the same data.
    """
    refuse_mesh(torch_device_mesh)
    world = current_world()
    group: Group = SoloGroup() if world is None else world.group
    exchange = Exchange(group) if world is None else world.exchange
    fixed_rank = None
    size = group.size if num_processes is None else num_processes
    rank = group.rank if process_index is None else process_index
    check_whole("num_processes", size, least=1)
    check_whole("process_index", rank, least=0, most=size - 1)
    if (rank, size) != (group.rank, group.size):
        if dispatch_batches:
            raise ConfigError(
                f"dispatch_batches=True for process {rank} of {size}, but this is {group.rank} of {group.size}. Leave "
                "num_processes and process_index out, or use dispatch_batches=False."
            )
        fixed_rank, exchange, dispatch_batches = SoloGroup(), Exchange(SoloGroup()), False
        fixed_rank.rank, fixed_rank.size = rank, size
    config = DataLoaderConfiguration(
        split_batches=split_batches,
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader,
        already_sharded=already_sharded,
    )
    return prepare_loader(
        dataloader,
        exchange=exchange,
        fixed_rank=fixed_rank,
        device=device if put_on_device else None,
        state=None,
        config=config,
        rng_types=["generator"] if rng_types is None else rng_types,
        slice_fn=slice_fn_for_dispatch,
    )


def _sharded(
    kind: type[DataLoaderShard],
    source: Source,
    settings: LoaderSettings,
    changes: dict[str, Any],
    exchange: Exchange,
    group: Group,
    config: DataLoaderConfiguration,
) -> DataLoaderShard:
    indices = source.indices
    shard = BatchSamplerShard(indices, group.size, group.rank, config.split_batches, config.even_batches)
    if config.even_batches:
        changes = {**changes, "in_order": True}  # a padded batch comes last on each rank
    in_batches = source.makes_batches or isinstance(indices, BatchSampler) or hasattr(indices, "batch_size")
    return kind.over(
        source,
        settings,
        {**changes, source.indices_name: shard},
        count=partial(_remainder_count, shard, None if in_batches else exchange),
        shard=None if config.already_sharded is False else shard,
    )


def _remainder_count(shard: BatchSamplerShard, exchange: Exchange | None, batch: Any) -> int:
    """Count the samples in the last round of a shard that are no padding; 0: all of them.

    With `exchange`, each index stands for a whole batch, whose length only the rank that read it knows.
    """
    if exchange is None or shard.remainder == 0:
        return shard.remainder
    length = batch_size_of(batch)
    own = 1 if length is None else length
    mine = own if shard.process_index < shard.remainder else 0
    return int(collectives.gather(exchange, torch.tensor([mine]), within="the end of iter(loader)").sum())


def _sharded_stream(
    source: Source, settings: LoaderSettings, changes: dict[str, Any], group: Group, config: DataLoaderConfiguration
) -> DataLoaderShard:
    """Prepare a loader with which each rank reads the whole stream and keeps its part, or only its own files, if any.

    Files differ in length, so with `even_batches` the whole stream it is: nothing but a collective for each batch could
    tell a rank that another one still has data.
    """
    dataset, batch_size = source.dataset, source.batch_size
    if config.split_batches:
        check_split(batch_size, group.size)
    if batch_size is not None:
        size = changes.get("batch_size", batch_size)
        changes["batch_sampler"] = BatchSampler(source.loader.sampler, size, source.drop_last)
    if not config.even_batches and hasattr(dataset, "shard"):  # files, as in `datasets`
        num_files = getattr(dataset, "num_shards", None) or getattr(dataset, "n_shards", None) or 0
        if num_files >= group.size:
            files = dataset.shard(num_shards=group.size, index=group.rank)
            return DataLoaderShard.over(source, settings, {**changes, "dataset": files})
    is_stateful = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
    shard = (StatefulShard if is_stateful else MarkedShard)(
        dataset,
        batch_size or 1,
        source.drop_last,
        group.size,
        group.rank,
        config.split_batches,
        even_batches=config.even_batches,
        holds_batches=batch_size is None,
        is_checked=config.already_sharded is None,
    )
    return DataLoaderShard.over(source, settings, {**changes, "dataset": shard}, marked=True)


def _agreement(source: Source, exchange: Exchange, kinds: list[str], dispatches: bool) -> Callable[[], None] | None:
    """Return a function that makes all ranks draw rank 0's order before an iteration; None if nothing is drawn."""
    sampler = None if dispatches else source.sampler
    seeded = sampler if isinstance(sampler, SeedableRandomSampler) else None
    generator = None if dispatches or seeded else _shared_generator(source)
    if generator is None:
        kinds = [kind for kind in kinds if kind != "generator"]
    if not kinds and seeded is None:
        return None
    return partial(_agree, exchange, kinds, generator, seeded)


def _agree(
    exchange: Exchange, kinds: list[str], generator: torch.Generator | None, seeded: SeedableRandomSampler | None
) -> None:
    for kind in kinds:
        share_rng_state(kind, generator, exchange, _START)
    if seeded is not None:
        seed = torch.from_numpy(np.array([seeded.initial_seed % 2**64], np.uint64).view(np.int64))
        collectives.broadcast(exchange, seed, within=_START)
        seeded.initial_seed = int(seed)


def _shared_generator(source: Source) -> torch.Generator | None:
    """Return the generator that decides the order of the data; a sampler that has room for one but none gets one."""
    if source.streams:
        own = getattr(source.dataset, "generator", None)
        return own if isinstance(own, torch.Generator) else None
    sampler = source.sampler
    if not hasattr(sampler, "generator"):
        return None
    if sampler.generator is None:
        sampler.generator = made_generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    return sampler.generator if isinstance(sampler.generator, torch.Generator) else None
