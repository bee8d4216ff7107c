# SPDX-License-Identifier: Apache-2.0
"""What does talking less cost in loss? A byte-level GPT on real text, two replicas, each recipe after the same steps.

python benchmarks/bench_convergence.py [--rows DDP "local_sgd(8)"] [--seeds 0 1 2] [--write]

Replicas are simulated, by the real outer loop. Each run is a line of its own in results/convergence.jsonl; with --write
runs that are in it already are not done again, so a long series can be broken off and taken up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from _measure import RESULTS, report
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from farflung.demo.gpt import GPT, loss_per_sequence
from farflung.demo.settings import SIZES, Shape
from farflung.demo.text import load_text
from farflung.demo.train import MAX_NORM, WARMUP, rise_and_fall
from farflung.outer import (
    AverageState,
    Int8,
    Recipe,
    Replace,
    diloco,
    eager_diloco,
    edit,
    gossip,
    local_sgd,
    noloco,
    post_local_sgd,
    quadratic,
    slowmo,
    sparse_loco,
    streaming_diloco,
)
from farflung.testing.simulate import Simulation, simulate

QUESTION = "What does talking less cost in loss?"
FILE = "convergence.jsonl"
STEPS, REPLICAS, BATCH = 480, 2, 8
SHAPE = SIZES["small"]
# What is best for DDP in so few steps: a constant rate ends at 1.82 (seed 0), one that falls to 0 from 1.5e-3, 3e-3 or
# 6e-3 at 1.87, 1.88 and 1.99.
LR = 3e-3
EVALUATION_SEQUENCES = 256
# In the order in which they are run: what matters most comes first.
ROWS: dict[str, Recipe | None] = {
    "DDP": None,
    "local_sgd(8)": local_sgd(8),
    "diloco(16)": diloco(16),
    "streaming_diloco(16, 3, delay=3) 4 bits": streaming_diloco(16, 3, delay=3),
    "eager_diloco(16) int8": eager_diloco(16),
    # What eager_diloco is without its correction: a mean that is a round late replaces the round that was done.
    "plain delay(16) int8": replace(eager_diloco(16, momentum=0.3), merge=Replace()),
    "local_sgd(16)": local_sgd(16),
    "diloco(16) int8": diloco(16, codec=Int8()),
    "diloco(16, lr=0.7, momentum=0.9)": diloco(16, lr=0.7, momentum=0.9),
    "sparse_loco(16, lr=1.0)": sparse_loco(16, lr=1.0),
    "gossip(16)": gossip(16),
    "local_sgd(16), Adam averaged": replace(local_sgd(16), inner=AverageState()),
    "slowmo(16)": slowmo(16),
    "noloco(16, momentum=0.5)": noloco(16, momentum=0.5),
    "edit(16)": edit(16),
    "post_local_sgd(48, 16)": post_local_sgd(48, 16),
    "quadratic(8, 0.01)": quadratic(8, 0.01),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--write", action="store_true", help="append to results/convergence.jsonl what is not in it")
    parser.add_argument("--summary", action="store_true", help="print a table of what is in that file, and run nothing")
    chosen = parser.parse_args()
    if chosen.summary:
        print(summary())
        return
    torch.set_num_threads(1)
    lab = Lab(chosen.steps)
    known = {(run["row"], run["seed"], run["steps"]) for run in read()} if chosen.write else set()
    for seed in chosen.seeds:
        for row in chosen.rows:
            if (row, seed, chosen.steps) not in known:
                began = time.perf_counter()
                figures = figures_of(lab.run(ROWS[row], seed))
                figures["minutes"] = round((time.perf_counter() - began) / 60, 2)
                report(
                    QUESTION,
                    figures,
                    seed=seed,
                    write_to=FILE if chosen.write else None,
                    row=row,
                    steps=chosen.steps,
                    replicas=REPLICAS,
                    parameters=lab.parameters,
                )


class Lab:
    """The demo's model, text and inner optimizer, whose learning rate stays after a warm-up, or falls to 0."""

    def __init__(
        self, steps: int, lr: float = LR, batch: int = BATCH, falls: bool = False, shape: Shape = SHAPE
    ) -> None:
        text = load_text(None)
        self.steps, self.lr, self.batch, self.falls, self.shape = steps, lr, batch, falls, shape
        self.train = torch.frombuffer(bytearray(text.train), dtype=torch.uint8)
        held_out = torch.frombuffer(bytearray(text.validation), dtype=torch.uint8)
        starts = torch.linspace(0, len(held_out) - shape.context - 1, EVALUATION_SEQUENCES).long().tolist()
        self.held_out = torch.stack([held_out[start : start + shape.context + 1] for start in starts])
        self.parameters = sum(parameter.numel() for parameter in GPT(shape).parameters())

    def run(self, recipe: Recipe | None, seed: int, **settings: Any) -> Simulation:
        return simulate(
            lambda: GPT(self.shape),
            self.batches,
            recipe,
            replicas=REPLICAS,
            steps=self.steps,
            make_optimizer=partial(AdamW, lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1),
            make_scheduler=self.schedule,
            loss=loss_of,
            max_norm=MAX_NORM,
            seed=seed,
            evaluate=self.judge,
            **settings,
        )

    def batches(self, rank: int) -> Iterator[Tensor]:
        last = len(self.train) - self.shape.context - 1
        while True:
            starts = torch.randint(last, (self.batch,)).tolist()
            yield torch.stack([self.train[start : start + self.shape.context + 1] for start in starts])

    def schedule(self, optimizer: Optimizer) -> LambdaLR:
        if self.falls:
            return LambdaLR(optimizer, lambda step: rise_and_fall(step / self.steps))
        warmup = max(1, round(WARMUP * self.steps))
        return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))

    def judge(self, model: nn.Module) -> float:
        return statistics.mean(loss_of(model, batch).item() for batch in self.held_out.split(32))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return loss_per_sequence(model(batch[:, :-1]), batch[:, 1:]).mean()


def figures_of(run: Simulation) -> dict[str, float]:
    return {
        "validation_loss": round(run.value, 4),
        "megabytes_sent": round(run.bytes_sent / 1e6, 3),
        "rounds": run.stats[run.first].rounds,
    }


def read() -> list[dict[str, Any]]:
    file = RESULTS / FILE
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def summary() -> str:
    """The mean and the spread of each row's losses, next to DDP's with the same seeds, and what it sent."""
    runs = [run for run in read() if run["steps"] == STEPS]
    losses: dict[str, dict[int, float]] = {row: {} for row in ROWS}
    for run in runs:
        losses[run["row"]][run["seed"]] = run["figures"]["validation_loss"]
    sent = {run["row"]: run["figures"]["megabytes_sent"] for run in runs}
    lines = ["| row | validation loss | spread | next to DDP | MB sent | seeds |", "|---|---|---|---|---|---|"]
    for row, by_seed in losses.items():
        if by_seed:
            mean, ddp = statistics.mean(by_seed.values()), statistics.mean(losses["DDP"][seed] for seed in by_seed)
            spread = max(by_seed.values()) - min(by_seed.values())
            lines.append(
                f"| `{row}` | {mean:.3f} | {spread:.3f} | {mean / ddp - 1:+.1%} | {sent[row]:.2f} | {len(by_seed)} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
