# SPDX-License-Identifier: Apache-2.0
"""What a run is: a model's size, a method, its settings, the length and the text."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from farflung.demo.settings import SIZES, Shape
from farflung.demo.text import load_text

SHAPES = {
    "34k": Shape(depth=2, width=28, heads=2, context=64),
    "100k": Shape(depth=2, width=54, heads=3, context=64),
    "385k": SIZES["small"],
    "1M": Shape(depth=4, width=140, heads=5, context=128),
}
WARMUP, LAST_LR = 0.05, 0.05  # of all steps, and of the peak


@dataclass(frozen=True)
class Run:
    """One training; its fields are the key of its line in the results, where a line without a field has its default.

    Args:
        method: `alone`, `DDP`, or a recipe of `farflung.outer`.
        settings: the recipe's arguments, or those of DDP (`hook`, `rank`, `accumulate`), as sorted JSON. With
            `average_state` the recipe averages AdamW's moments too; `last` is the interval of the last tenth, `first`
            that of plain averages in the first one; `largest` is what the outer momentum grows to, `sooner` how many
            times faster.
        lr: peak of the inner learning rate.
        batch: sequences of a replica in a step.
        common: the share of the steps, at the start, in which all methods are DDP.
        falls: the learning rate falls along a cosine, or stays.
        inner: `adamw`, or `muon` on hidden matrices and AdamW on the rest.
        parts: each replica draws from a part of the text of its own.
        strides: after the common start a replica makes one in so many of the run's steps, as a JSON list with a number
            for each replica; all make all of them if it is empty.
        tuned_steps: then train for so many steps on another text, as `tuning.py` does.
        readouts: judge it by several weights, see `readouts.py`; an outer loop then ends with the slow weights. The
            others end with those that they train, as all did once.
    """

    size: str
    method: str
    lr: float
    seed: int
    steps: int
    settings: str = "{}"
    replicas: int = 4
    batch: int = 2
    common: float = 0.1
    falls: bool = True
    inner: str = "adamw"
    parts: bool = False
    strides: str = "[]"
    readouts: bool = False
    tuned_steps: int = 0

    @property
    def split(self) -> int:
        """The number of steps at the start that all methods make as DDP."""
        return round(self.common * self.steps)

    @property
    def stacked_by(self) -> tuple[Any, ...]:
        """What runs have in common that can be done together."""
        return self.size, self.steps, self.batch

    @property
    def text(self) -> tuple[Tensor, Tensor]:
        """The bytes to train on and those that are held out."""
        return texts()

    @property
    def options(self) -> dict[str, Any]:
        return dict(json.loads(self.settings))

    def at_work(self, step: int) -> list[bool]:
        """Return which replicas make the step, counted from 0."""
        strides = json.loads(self.strides) or [1] * self.replicas
        return [step < self.split or step % stride == 0 for stride in strides]

    def factor(self, step: int) -> float:
        """Return the share of the peak learning rate that the step, counted from 0, is made with."""
        rise = (step + 1) / max(1, round(WARMUP * self.steps))
        done = max(0.0, step / self.steps - WARMUP) / (1 - WARMUP)
        fall = LAST_LR + (1 - LAST_LR) * (1 + math.cos(math.pi * done)) / 2 if self.falls else 1.0
        return min(rise, fall)


@cache
def texts() -> tuple[Tensor, Tensor]:
    """Return the bytes to train on and those that are held out."""
    text = load_text(None)
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (text.train, text.validation))
    return train, held_out


@cache
def checksum() -> str:
    """Return the first digits of the SHA-256 of the two texts: runs can be compared where it is the same."""
    return hashlib.sha256(b"\0".join(bytes(text.tolist()) for text in texts())).hexdigest()[:16]


def draws(run: Run, context: int) -> Tensor:
    """Return `[replicas, steps, batch]`, where each sequence begins; the same for all methods of a seed."""
    starts = []
    length = len(run.text[0]) // (run.replicas if run.parts else 1)
    for rank in range(run.replicas):
        generator = torch.Generator().manual_seed((run.seed << 20) + rank + 1)
        places = torch.randint(length - context - 1, (run.steps, run.batch), generator=generator)
        starts.append(places + (rank * length if run.parts else 0))
    return torch.stack(starts)
