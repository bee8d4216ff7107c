# SPDX-License-Identifier: Apache-2.0
"""What does the folder of a run cost a step? With what `farflung launch` has each rank write, and without.

A step that takes 10 ms, on a rank that logs two values in each. Torch's hook counts it, `accelerator.log` keeps the
values for a thread, and once a second, so every hundred steps, a thread writes both down and where the rank is.

python benchmarks/bench_run_folder.py [--rounds 200] [--write]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from threading import Timer
from typing import Any

import torch
from _measure import interleave, medians_us, report, seeded
from torch import nn

from farflung.process.run_files import Heartbeat, Metrics, Steps

SEED = 0
STEP_MS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--write", action="store_true", help="append to benchmarks/results/run_folder.jsonl")
    options = parser.parse_args()
    seeded(SEED)
    torch.set_num_threads(1)
    figures = measure(options.rounds)
    write_to = "run_folder.jsonl" if options.write else None
    report("What does the folder of a run cost a step?", figures, seed=SEED, write_to=write_to, step_ms=STEP_MS)


def measure(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        metrics, heartbeat = Metrics(folder), Heartbeat(folder)
        metrics._writer = Timer(0, metrics.write)  # never started: steps here log a hundred times as often as real ones
        steps = Steps()
        turns = {"without": stepping(None, None), "with": stepping(steps._count, metrics.add)}
        us = medians_us(interleave(turns, rounds, calls=100))
        in_thread = {"sign": busy_us(heartbeat._tell), "metrics": busy_us(lambda: kept(metrics))}
        heartbeat.close(0)
    added = us["with"] - us["without"] + sum(in_thread.values()) * STEP_MS / 1000
    return {
        "us_of_a_step": us,
        "us_in_threads_each_second": in_thread,
        "us_added": round(added, 2),
        "share_of_a_step": round(added / (STEP_MS * 1000), 5),
    }


def stepping(count: Callable[..., Any] | None, log: Callable[..., Any] | None) -> Callable[[], None]:
    """Return a step of a tiny model, with torch's hook and a log of two values, or without."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if count is not None:
        optimizer.register_step_post_hook(count)
    x = torch.randn(4, 8)

    def step() -> None:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values = {"loss": loss.detach(), "lr": 0.1}
        if log is not None:
            log(values, 1)

    return step


def kept(metrics: Metrics) -> None:
    """Write what a second of steps has logged."""
    metrics._rows = [(time.time(), 1, {"loss": 0.5, "lr": 0.1})] * (1000 // STEP_MS)
    metrics.write()


def busy_us(act: Callable[[], Any]) -> float:
    """Return the median time in which a thread computes for `act`."""
    took = []
    for _ in range(200):
        begun = time.thread_time()
        act()
        took.append(time.thread_time() - begun)
    return round(1e6 * median(took), 1)


if __name__ == "__main__":
    main()
