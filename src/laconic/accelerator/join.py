# SPDX-License-Identifier: Apache-2.0
"""Ranks with different numbers of batches, under DDP: those that finish early answer the others' collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.distributed.algorithms.join import Join

from laconic.accelerator.prepare import PreparedLoader
from laconic.base.errors import ConfigError
from laconic.data.samplers import BatchSamplerShard


@contextmanager
def join_uneven_inputs(
    joinables: list[Any], even_batches: bool | None, distributed: bool, loaders: list[PreparedLoader]
) -> Iterator[None]:
    """Hold torch's `Join` over `joinables`, with `even_batches` overridden on the loaders that have it.

    Raises:
        ConfigError: `even_batches` is given, but a loader hands out batches from one rank or iterates.
    """
    with ExitStack() as stack:
        if distributed and even_batches is not None:
            for loader in loaders:
                stack.enter_context(_overridden(loader, even_batches))
        if distributed:
            stack.enter_context(Join(joinables))
        yield


@contextmanager
def _overridden(loader: PreparedLoader, even_batches: bool) -> Iterator[None]:
    shard = loader.batch_sampler
    if not isinstance(shard, BatchSamplerShard):
        raise ConfigError(
            "join_uneven_inputs: even_batches can only be changed on loaders over map-style data that each rank reads "
            f"for itself, and {loader!r} is none. Leave even_batches out."
        )
    before = shard.even_batches
    shard.even_batches = even_batches
    try:
        yield
    finally:
        shard.even_batches = before
