# SPDX-License-Identifier: Apache-2.0
"""Detects data sets and samplers that take their part by rank by themselves, without reading any sample."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch.utils import data as torch_data
from torch.utils.data import IterableDataset

from farflung.base.errors import ConfigError, Unsupported
from farflung.comm.group import Group
from farflung.data.torch_loaders import Source
from farflung.loop.uneven import SAY_SHARDED

# How classes call the number of shares and which one is this process's: torch's and transformers' samplers, data sets
# for several processes, our own shards and Accelerate's.
_PAIRS = (("num_replicas", "rank"), ("world_size", "rank"), ("num_processes", "process_index"))
_ASKS = {"get_rank", "process_index", "RANK"}  # what the code of a stream has that takes every n-th sample by rank


def refuse_unshareable(source: Source, group: Group, already_sharded: bool | None) -> None:
    """Raise ConfigError if ranks visibly have their own shares of the data, and the script does not say so."""
    if isinstance(source.dataset, getattr(torch_data, "IterDataPipe", ())):  # torch says it will go away
        raise Unsupported(
            f"The data set is a data pipe ({type(source.dataset).__name__}); torch makes a collective of each of its "
            "iterators. Wrap it in an IterableDataset whose __iter__ iterates over it."
        )
    for thing in () if already_sharded or group.size == 1 else (*source.samplers, source.dataset):
        why = shares_of(thing, group.rank, group.size, asks=already_sharded is None)
        if why is not None:
            raise ConfigError(
                f"This loader's {type(thing).__name__} already gives each rank a share of its own: {why}. If those "
                f"were shared out again, most of the data would never be seen. {SAY_SHARDED}"
            )


def shares_of(thing: Any, rank: int, size: int, asks: bool = True) -> str | None:
    """Return the evidence that a sampler or a data set gives this rank, of so many, a share of its own; None: none.

    With `asks`, a stream that asks for the rank counts too.
    """
    split = getattr(thing, "_distributed", None)  # of `datasets`, by `split_dataset_by_node`
    for owner, name in ((thing, ""), (split, "_distributed.")):
        for count, index in _PAIRS:
            found = getattr(owner, count, None), getattr(owner, index, None)
            if found == (size, rank) or (type(found[0]) is int and found[0] > 1 and (split or count == "num_replicas")):
                return f"{name}{count}={found[0]}, {name}{index}={found[1]}"
    code = getattr(getattr(type(thing), "__iter__", None), "__code__", None)
    if asks and isinstance(thing, IterableDataset) and code is not None and (asked := _ASKS.intersection(_words(code))):
        return f"its __iter__ asks for {' and '.join(sorted(asked))}"
    return None


def _words(code: CodeType) -> Iterator[str]:
    """Yield the names and texts in a function's code, and in that of functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _words(constant)
        elif isinstance(constant, str):
            yield constant
