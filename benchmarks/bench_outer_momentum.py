# SPDX-License-Identifier: Apache-2.0
"""Which outer momentum suits a run of so many steps? diloco(32) with constant ones, and with the default, which grows.

python benchmarks/bench_outer_momentum.py [--steps 200 500 2000] [--schedules falling constant] [--rates 0.7]
                                          [--write] [--summary]

The model, the text and the inner optimizer are the demo's; two simulated replicas. Each run is a line of its own in
results/outer_momentum.jsonl; with --write, runs that are in it already are not done again.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from typing import Any

import torch
from _measure import RESULTS, report
from bench_convergence import Lab

from farflung.outer import diloco

QUESTION = "Which outer momentum suits a run of so many steps?"
FILE = "outer_momentum.jsonl"
GROWS = "grows"
MOMENTA = ("0.0", "0.3", "0.5", "0.6", "0.7", "0.8", "0.9", GROWS)
EVERY = 32
RATE = 0.7  # the outer learning rate of lines that have none


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--momenta", nargs="*", default=MOMENTA, metavar="MOMENTUM", help=f"or {GROWS}, the default")
    parser.add_argument("--steps", nargs="*", type=int, default=[200, 500, 2000])
    parser.add_argument("--schedules", nargs="*", default=["falling", "constant"], choices=["falling", "constant"])
    parser.add_argument("--rates", nargs="*", type=float, default=[RATE], help="outer learning rates")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--write", action="store_true", help=f"append to results/{FILE} what is not in it")
    parser.add_argument("--summary", action="store_true", help="print a table of what is in that file, and run nothing")
    chosen = parser.parse_args()
    if chosen.summary:
        print(summary())
        return
    torch.set_num_threads(1)
    known = [place(run) for run in read()] if chosen.write else []
    for seed, steps, schedule in product(chosen.seeds, chosen.steps, chosen.schedules):
        lab = Lab(steps, falls=schedule == "falling")
        for momentum, rate in product(chosen.momenta, chosen.rates):
            if (steps, schedule, rate, seed, momentum) in known:
                continue
            ended = lab.run(diloco(EVERY, lr=rate, momentum=None if momentum == GROWS else float(momentum)), seed)
            report(
                QUESTION,
                {"validation_loss": round(ended.value, 4)},
                seed=seed,
                write_to=FILE if chosen.write else None,
                momentum=momentum,
                rate=rate,
                schedule=schedule,
                steps=steps,
                every=EVERY,
            )


def place(run: dict[str, Any]) -> tuple[int, str, float, int, str]:
    """Return where on the grid a line of the results is."""
    return run["steps"], run["schedule"], run.get("rate", RATE), run["seed"], run["momentum"]


def read() -> list[dict[str, Any]]:
    file = RESULTS / FILE
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def summary() -> str:
    """A row for each length and schedule in which several momenta were tried, of seed 0."""
    losses: dict[tuple[int, str, float], dict[str, float]] = {}
    for run in read():
        steps, schedule, rate, seed, momentum = place(run)
        if seed == 0:
            losses.setdefault((steps, schedule, rate), {})[momentum] = run["figures"]["validation_loss"]
    lines = [f"| steps | learning rate | {' | '.join(MOMENTA)} |", "|" + "---|" * (len(MOMENTA) + 2)]
    for (steps, schedule, _), found in sorted(losses.items()):
        if len(found) > 1:
            cells = [f"{found[momentum]:.3f}" if momentum in found else "" for momentum in MOMENTA]
            lines.append(f"| {steps} | {schedule} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
