# SPDX-License-Identifier: Apache-2.0
"""Data sets and samplers that take their part by rank by themselves: what shows it without reading any sample."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch.utils.data import IterableDataset

# How classes call the number of shares and which one is this process's: torch's and transformers' samplers, data sets
# for several processes, our own shards and Accelerate's.
_PAIRS = (("num_replicas", "rank"), ("world_size", "rank"), ("num_processes", "process_index"))
_ASKS = {"get_rank", "process_index", "RANK"}  # what the code of a stream has that takes every n-th sample by rank


def shares_of(thing: Any, rank: int, size: int, asks: bool = True) -> str | None:
    """Return what shows that a sampler or a data set gives this rank, of so many, a share of its own; None: nothing.

    With `asks`, that a stream asks for the rank shows it too.
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
