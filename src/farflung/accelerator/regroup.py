# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of another number of processes: what each of the new ones takes of it, and what can't be the same.

data        goes on after as many samples as were seen
gradients   of an unfinished window: the mean over the old ranks, on each of the new
replicas    that trained alone: the mean of their weights, and the anchor that they had with its outer optimizer
numbers     rank r draws on where old rank r stood; ranks that there were none of begin streams of their own
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from farflung.accelerator import lazy
from farflung.base.words import counted, numbered
from farflung.checkpoint import layout
from farflung.checkpoint.reader import read_torch
from farflung.checkpoint.regular import is_file
from farflung.data.position import NOTHING_READ, with_present_keys

if TYPE_CHECKING:
    from farflung.outer.merge_states import MergedState


def regrouped(
    folder: Path, old: int, rank: int, size: int, total_batch_sizes: Sequence[int | None]
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return what `rank` of `size` takes for its own state and random states, and notes on what is not the same.

    Args:
        folder: a checkpoint of `old` ranks.
        total_batch_sizes: of the loaders here: samples of all ranks in one step.
    """
    notes = [
        f"it was written by {counted(old, 'process')} and resumes with {size}: steps see a different number of samples"
    ]
    if size > old:
        new = numbered("rank", range(old, size))
        notes.append(
            f"{new} is new: its random numbers begin a stream of their own"
            if size == old + 1
            else f"{new} are new: their random numbers begin streams of their own"
        )
    owns = [read_torch(folder / layout.loop_state(k)) for k in range(old)]
    own = dict(owns[0])
    own["gradients"], own["reduced"] = _mean_gradients(owns, notes), None
    if own["gradients"] is None:
        own = without_gradients(own)
    own["buffers"], own["asks_for_buffers"] = [], []
    own["optimizers"] = [{**one, "is_own": False} for one in own["optimizers"]]
    own["loaders"] = [
        _moved(state, old, size, total, notes) for state, total in zip(own["loaders"], total_batch_sizes, strict=False)
    ]
    if any(one["is_own"] for one in owns[0]["optimizers"]):
        notes.append(
            "replicas had trained independently: all take the mean of their weights, and rank 0's optimizer state"
        )
    return own, _random_states(folder, old, rank), notes


_FRESH = {"size": 0, "complete": True, "items": 0.0, "scale": None}


OTHER_SHARDS = "the unfinished accumulation window had reduced gradients of other shards: it starts over"


def has_reduced(owns: Iterable[dict[str, Any]]) -> bool:
    """Say whether there are gradients that were reduced, of which each rank has its own shards."""
    return any(part is not None for own in owns for parts in own.get("reduced") or () for part in parts or ())


def without_gradients(own: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's own state with its accumulation windows at their beginning."""
    nothing = [None] * len(own["optimizers"])
    loop = {"windows": [{**one, **_FRESH} for one in own["loop"]["windows"]]}
    return {**own, "gradients": nothing, "reduced": nothing, "loop": loop}


def joined_loops(folder: Path, ranks: Iterable[int]) -> list[MergedState]:
    """Return what becomes of the outer loops of `ranks`, those that held the same shards; [] where there are none."""
    paths = [folder / layout.outer_state(rank) for rank in ranks]
    if not all(is_file(path) for path in paths):
        return []
    return [lazy.merge_states(column) for column in zip(*(read_torch(path)["loops"] for path in paths), strict=True)]


def _mean_gradients(owns: list[dict[str, Any]], notes: list[str]) -> list[Any] | None:
    """Return the mean over the ranks of each optimizer's unfinished gradients; None where they can't be joined."""
    scales = {window["scale"] for own in owns for window in own["loop"]["windows"]}
    if scales != {None}:
        notes.append("the unfinished accumulation window was weighted by num_items: it starts over")
        return None
    if has_reduced(owns):
        notes.append(OTHER_SHARDS)
        return None
    joined: list[Any] = []
    for column in zip(*(own["gradients"] for own in owns), strict=True):
        there = [gradients for gradients in column if gradients is not None]
        if not there:
            joined.append(None)
            continue
        means: list[Tensor | None] = []
        for parts in zip(*there, strict=True):
            some = [part for part in parts if part is not None]
            means.append(torch.stack(some).sum(0) / len(owns) if some else None)
        joined.append(means)
    return joined


def _moved(state: dict[str, Any], old: int, size: int, total: int | None, notes: list[str]) -> dict[str, Any]:
    """Return a loader's state with its position after as many samples, in steps of another size."""
    state = with_present_keys(state)
    position = state["position"]
    if position is None:
        return {**state, "worker_states": None}
    before = state["total_batch_size"]
    samples = position["batches"] * (old if before is None or total is None else before)
    step = size if before is None or total is None else total
    batches, rest = divmod(samples, step)
    if position["ended"]:
        batches += old + size  # past the end, whatever the last steps are like
    elif rest:
        notes.append(
            f"the last {counted(rest, 'sample')} before it will be seen again, as {samples} is no multiple of {step}"
        )
    return {**state, "worker_states": None, "position": {**position, **NOTHING_READ, "batches": batches}}


def _random_states(folder: Path, old: int, rank: int) -> dict[str, Any]:
    states: dict[str, Any] = read_torch(folder / layout.random_states(rank % old))
    if rank < old:
        return states
    seed = zlib.crc32(states["torch_manual_seed"].numpy().tobytes(), rank)
    return {
        "step": states["step"],
        "random_state": random.Random(seed).getstate(),
        "numpy_random_seed": np.random.RandomState(seed).get_state(),
        "torch_manual_seed": torch.Generator().manual_seed(seed).get_state(),
    }
