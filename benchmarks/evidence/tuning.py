# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning after a run: its weights, and their running mean, are trained on another text by DDP."""

from __future__ import annotations

import math
import pydoc_data.topics
import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from evidence.inner import AdamW
from evidence.runs import SHAPES, Run

RATE = 0.056  # by width, the same after all methods; it falls to 0 by a cosine
HELD_OUT = 8  # the last part of so many is held out
SEQUENCES = 256  # of it that are judged
READOUTS = ("slow", "slow, mean of 5", "last", "last, mean of 5")


@cache
def topics() -> tuple[Tensor, Tensor]:
    """Return the bytes of Python's own documentation of the language to train on, and those that are held out."""
    text = torch.frombuffer(bytearray(Path(pydoc_data.topics.__file__).read_bytes()), dtype=torch.uint8)
    end = len(text) - len(text) // HELD_OUT
    return text[:end], text[end:]


def tuned(
    run: Run,
    weights: dict[str, Tensor],
    differentiate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    old_loss: Callable[[Tensor], float],
    loss: Callable[[Tensor, Tensor], Tensor],
    context: int,
) -> dict[str, float]:
    """Return the held-out losses, in nats a byte, of both texts after the fine-tuning of each readout.

    Args:
        weights: `[1, parameters]` by readout.
        differentiate: returns gradients and losses of rows, given `[rows, batch, context + 1]` bytes.
        old_loss: of weights `[1, parameters]`, on the text of the run.
        loss: of a row, on a batch.
    """
    names = [name for name in READOUTS if name in weights and len(weights[name]) == 1]
    rows, (train, held_out) = torch.cat([weights[name] for name in names]), topics()
    optimizer, span = AdamW(rows), torch.arange(context + 1)
    generator = torch.Generator().manual_seed(run.seed)
    for step in range(run.tuned_steps):
        starts = torch.randint(len(train) - context - 1, (run.replicas * run.batch,), generator=generator)
        batch = train[starts[:, None] + span].expand(len(rows), -1, -1)
        gradients, _ = differentiate(rows, batch)
        gradients *= (1.0 / (gradients.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
        fall = (1 + math.cos(math.pi * step / run.tuned_steps)) / 2
        optimizer.step(gradients, RATE / SHAPES[run.size].width * fall)
    places = torch.linspace(0, len(held_out) - context - 1, SEQUENCES).long()
    batches = held_out[places[:, None] + span].split(64)
    found: dict[str, float] = {}
    for name, row in zip(names, rows, strict=True):
        found[f"{name}, tuned"] = statistics.mean(loss(row, batch).item() for batch in batches)
        found[f"{name}, tuned, first text"] = old_loss(row[None])
    return found
