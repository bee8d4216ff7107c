# SPDX-License-Identifier: Apache-2.0
"""What does one faulty replica of eight cost, with a robust rule and without? A byte-level GPT on real text.

python benchmarks/bench_robust.py [--rules none trimmed clip] [--faults "x100"] [--seeds 0] [--write]

Replicas are simulated, by the real outer loop. The last one trains like the others, and what it brings to a round is
then replaced. The peer of each run, in the same call, is one of the seven others alone. Each run is a line of its own
in results/robust.jsonl; with --write runs that are in it already are not done again.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import Any

import torch
from _measure import RESULTS, report
from bench_convergence import Lab, figures_of, loss_of
from torch import Tensor, nn
from torch.optim import AdamW

from farflung.demo.gpt import GPT
from farflung.demo.settings import Shape
from farflung.demo.train import MAX_NORM
from farflung.outer import diloco, robust
from farflung.testing.simulate import Simulation, simulate

QUESTION = "What does one faulty replica of eight cost, with a robust rule and without?"
FILE = "robust.jsonl"
STEPS, REPLICAS, BATCH, EVERY, LR = 240, 8, 4, 8, 5e-3
SHAPE = Shape(depth=2, width=28, heads=2, context=64)
# What a replica brings in place of the way `moved` that it has made in a round.
FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing wrong": lambda moved: moved,
    "garbage": torch.randn_like,  # normal noise of size 1 in each weight
    "sign-flipped": torch.neg,
    "x100": lambda moved: 100 * moved,
    "x-100": lambda moved: -100 * moved,
    "NaN": lambda moved: torch.full_like(moved, math.nan),
}
RULES = ("none", "trimmed", "clip")


class Faulty(AdamW):
    """AdamW, after whose steps of a round the way made in it is replaced."""

    def __init__(self, parameters: Iterable[nn.Parameter], fault: Callable[[Tensor], Tensor], **options: Any) -> None:
        super().__init__(parameters, **options)
        self._fault, self._steps, self._starts = fault, 0, list[Tensor]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        if self._steps % EVERY == 0:
            self._starts = [parameter.clone() for parameter in parameters]
        super().step(closure)
        self._steps += 1
        if self._steps % EVERY == 0:
            for parameter, start in zip(parameters, self._starts, strict=True):
                parameter.copy_(start + self._fault(parameter - start))


def run(lab: Lab, rule: str, fault: str | None, seed: int) -> Simulation:
    """Train eight replicas of which the last has a fault; without one, the seven others."""
    recipe, replicas, numbers = diloco(EVERY), REPLICAS - (fault is None), count()

    def optimizer(parameters: Iterable[nn.Parameter]) -> AdamW:  # replicas are made in the order of their ranks
        is_faulty = next(numbers) == REPLICAS - 1 and fault is not None
        make = partial(Faulty, fault=FAULTS[fault or ""]) if is_faulty else AdamW
        return make(parameters, lr=lab.lr, betas=(0.9, 0.95), weight_decay=0.1)

    return simulate(
        lambda: GPT(SHAPE),
        lab.batches,
        recipe if rule == "none" else robust(recipe, rule),
        replicas=replicas,
        steps=lab.steps,
        make_optimizer=optimizer,
        make_scheduler=lab.schedule,
        loss=loss_of,
        max_norm=MAX_NORM,
        seed=seed,
        evaluate=lab.judge,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rules", nargs="*", default=list(RULES), choices=RULES)
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS), metavar="FAULT")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--write", action="store_true", help="append to results/robust.jsonl what is not in it")
    parser.add_argument("--summary", action="store_true", help="print a table of what is in that file, and run nothing")
    chosen = parser.parse_args()
    if chosen.summary:
        print(summary())
        return
    torch.set_num_threads(1)
    lab = Lab(chosen.steps, LR, BATCH, falls=True, shape=SHAPE)
    known = {(run["rule"], run["fault"], run["seed"]) for run in read()} if chosen.write else set()
    rows = [("none", None), *((rule, fault) for fault in chosen.faults for rule in chosen.rules)]
    for seed in chosen.seeds:
        for rule, fault in rows:
            if (rule, fault, seed) not in known:
                began = time.perf_counter()
                done = run(lab, rule, fault, seed)
                figures = figures_of(done)
                figures["rounds_left_out"] = sum(bool(this.left_out) for this in done.rounds)
                figures["rounds_dropped"] = done.stats[done.first].dropped_rounds
                figures["minutes"] = round((time.perf_counter() - began) / 60, 2)
                settings = {"steps": chosen.steps, "replicas": REPLICAS, "every": EVERY, "parameters": lab.parameters}
                write_to = FILE if chosen.write else None
                report(QUESTION, figures, seed=seed, write_to=write_to, rule=rule, fault=fault, **settings)


def read() -> list[dict[str, Any]]:
    file = RESULTS / FILE
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def summary() -> str:
    """The loss of each run, next to that of the seven others alone, as the mean over seeds."""
    runs = {(run["rule"], run["fault"], run["seed"]): run["figures"]["validation_loss"] for run in read()}
    seeds = sorted({seed for _, _, seed in runs})
    lines = ["| one of eight brings | " + " | ".join(RULES) + " |", "|---" * (1 + len(RULES)) + "|"]
    for fault in FAULTS:
        cells = []
        for rule in RULES:
            done = [seed for seed in seeds if (rule, fault, seed) in runs]
            losses = [(runs[rule, fault, seed], runs["none", None, seed]) for seed in done]
            mean, others = (sum(column) / len(done) for column in zip(*losses, strict=True))
            more = f"{mean / others - 1:+.1%}" if mean < 10 * others else f"{mean / others:,.0f} times"
            cells.append(f"{mean:,.3f} ({more})" if math.isfinite(mean) else "not finite")
        lines.append(f"| {fault} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
