# SPDX-License-Identifier: Apache-2.0
"""The efficiency of a run: how many of DDP's steps end at the same loss, for each of its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from evidence.experiments import PARTS_OF_STEPS, Results, from_scratch, lengths
from evidence.runs import Run


def curve(results: Results, size: str, seed: int, replicas: int = 4) -> dict[int, float]:
    """Return DDP's loss at the end of runs of several lengths, each under a schedule of its own; it never rises."""
    runs = [run for [run] in lengths(results, size, seed).values()] + from_scratch(results, size, seed)["DDP"]
    found, least = {}, math.inf
    for run in sorted((replace(run, replicas=replicas) for run in runs), key=lambda run: run.steps):
        if math.isfinite(loss := results.loss(run)):
            found[run.steps] = least = min(least, loss)
    return found


def steps_to(loss: float, by_steps: Mapping[int, float]) -> float:
    """Return after how many steps DDP ends at a loss, on straight lines over the logarithm of its steps.

    What ends lower than its longest run counts as that.

    Raises:
        ValueError: its shortest run ends lower.
    """
    for (less, above), (more, below) in pairwise(by_steps.items()):
        if above >= loss > below:
            return less * float((more / less) ** ((above - loss) / (above - below)))
    if loss > max(by_steps.values()):
        raise ValueError(f"A loss of {loss} is above that of DDP's shortest run, {by_steps}: add a shorter one.")
    return max(by_steps)


def efficiencies(results: Results, size: str, runs: Mapping[int, Sequence[Run]]) -> list[float]:
    """Return by seed the efficiency of the last one of its runs; nothing if DDP has no shorter ones like it.

    What ends lower than DDP after as many steps counts as that.
    """
    last = {seed: of_seed[-1] for seed, of_seed in runs.items()}
    curves = {seed: curve(results, size, seed, run.replicas) for seed, run in last.items()}
    if any(len(found) <= len(PARTS_OF_STEPS) for found in curves.values()):
        return []
    shares = []
    for seed, run in last.items():
        by_steps = {steps: loss for steps, loss in curves[seed].items() if steps <= run.steps}
        shares.append(steps_to(results.loss(run), by_steps) / run.steps)
    return shares
