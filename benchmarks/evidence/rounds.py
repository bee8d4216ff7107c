# SPDX-License-Identifier: Apache-2.0
"""Does a run that has twice the steps keep as much with rounds that are twice as long?

From `benchmarks`: python -m evidence.rounds [--replicas 2 4] [--seeds 0 1 2] [--steps 500 2000 4000] [--table]

Runs of 100k parameters from scratch are lines of results/evidence.jsonl, as those of `experiments.py`, each with the
better one of two inner rates. Those of 1,000 steps are experiments 8, 11 and 12. Of 500 steps there are other recipes
too, and 385k parameters.
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import replace
from itertools import product

import torch

from evidence.efficiency import steps_to
from evidence.experiments import COMPARED, STEPS, Results, best, do, from_scratch, lengths, pairs, scratch_grid
from evidence.plan import SIZES, pooled, table as by_method
from evidence.runs import Run
from evidence.tables import SEEDS, mean_and_error
from farflung.cost.methods import efficiency

SIZE = "100k"
USUAL = STEPS[SIZE]
SHOWN = (500, USUAL, 2 * USUAL, 4 * USUAL)
REPLICAS = (2, 4)
EVERY = (8, 16, 32, 64, 128)
SHORT = tuple(name for name in COMPARED if name not in ("DDP", "diloco(128) e3m0") and "delay 1" not in name)


def grids(results: Results, steps: int, replicas: int, method: str) -> list[Run]:
    """Return runs of the first seed that differ in the inner rate."""
    return [replace(run, steps=steps, replicas=replicas) for run in scratch_grid(results, SIZE, method)]


def ddp_steps(steps: int) -> list[int]:
    """Return the lengths of DDP's runs that are longer than those of experiment 11, up to `steps`."""
    return [some for some in (2 * USUAL, 3 * USUAL, 4 * USUAL) if some <= steps]


def curve(results: Results, seed: int, replicas: int) -> dict[int, float]:
    """Return DDP's loss at the end of runs of each length; it never rises."""
    runs = [run for [run] in lengths(results, SIZE, seed).values()] + from_scratch(results, SIZE, seed)["DDP"]
    runs += [best(results, grids(results, some, replicas, "DDP")) for some in ddp_steps(SHOWN[-1])]
    found, least = {}, math.inf
    for run in sorted((replace(run, seed=seed, replicas=replicas) for run in runs), key=lambda run: run.steps):
        if math.isfinite(loss := results.loss(run)):
            found[run.steps] = least = min(least, loss)
    return found


def methods(results: Results, steps: int, replicas: int, seed: int) -> dict[str, Run]:
    """Return one replica alone, and DiLoCo with rounds of several lengths at the rate that is best with H=8."""
    alone, diloco = (best(results, grids(results, steps, replicas, name)) for name in ("alone", "diloco(32)"))
    found = {"alone": replace(alone, seed=seed)}
    for every in EVERY:
        usual = from_scratch(results, SIZE, seed)[f"diloco({every}) e3m0"][0]
        found[f"H={every}"] = replace(diloco, seed=seed, settings=usual.settings)
    return found


def efficiencies(results: Results, steps: int, replicas: int) -> dict[str, list[float]]:
    """Return by row and seed how many of DDP's steps end at the same loss, for each step."""
    found: dict[str, list[float]] = {}
    for seed in SEEDS:
        by_steps = {some: loss for some, loss in curve(results, seed, replicas).items() if some <= steps}
        for name, run in methods(results, steps, replicas, seed).items():
            if math.isfinite(loss := results.loss(run)):
                found.setdefault(name, []).append(steps_to(loss, by_steps) / steps)
    return found


def short_grids(results: Results, size: str) -> list[list[Run]]:
    """Return runs of two replicas and half the steps, with the first seed at two inner rates: alone, and DiLoCo."""
    grids = [scratch_grid(results, size, name) for name in ("alone", "diloco(32)")]
    return [[replace(run, steps=USUAL // 2, replicas=2) for run in grid] for grid in grids]


def short(results: Results, size: str, seed: int) -> dict[str, list[Run]]:
    """Return runs of two replicas and half the steps, each at the better rate of one replica alone, or of DiLoCo."""
    alone, diloco = (best(results, grid).lr for grid in short_grids(results, size))
    usual = {name: run for name, [run] in pairs(results, size, seed).items() if name in SHORT}
    return {
        name: [replace(run, steps=USUAL // 2, lr=alone if name == "alone" else diloco)] for name, run in usual.items()
    }


def misses(results: Results, power: float) -> float:
    """Return by how much the efficiency of half the steps is missed if rounds count as longer by this power of two.

    It is the root of the mean square.
    """
    found = pooled([by_method(results, size, {seed: short(results, size, seed) for seed in SEEDS}) for size in SIZES])
    by_replicas = {2: found}
    four = efficiencies(results, USUAL // 2, 4)
    by_replicas[4] = {"diloco e3m0": {every: mean_and_error(four[f"H={every}"]) for every in EVERY}}
    missed = [
        mean - efficiency(name, every * 2**power, replicas).mean
        for replicas, methods in by_replicas.items()
        for name, by_interval in methods.items()
        for every, (mean, _) in by_interval.items()
        if name != "alone"
    ]
    return math.sqrt(statistics.mean(one**2 for one in missed))


def table(results: Results) -> list[str]:
    lines = [f"| replicas | steps | `alone` | {' | '.join(f'H={every}' for every in EVERY)} |"]
    lines.append("|---" * (len(EVERY) + 3) + "|")
    for replicas, steps in product(REPLICAS, SHOWN):
        found = efficiencies(results, steps, replicas)
        cells = ["{:.2f}±{:.2f}".format(*mean_and_error(shares)) for shares in found.values()]
        assert all(len(shares) == len(SEEDS) for shares in found.values())
        lines.append(f"| {replicas} | {steps:,} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="*", default=REPLICAS)
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--steps", type=int, nargs="*", default=[steps for steps in SHOWN if steps != USUAL])
    parser.add_argument("--table", action="store_true", help="print the table, and do nothing")
    chosen = parser.parse_args()
    results = Results()
    if chosen.table:
        print("\n".join(table(results)))
        return
    torch.set_num_threads(1)
    for size in SIZES if USUAL // 2 in chosen.steps and 2 in chosen.replicas else ():
        do([run for grid in short_grids(results, size) for run in grid], results)
        do([run for seed in chosen.seeds for [run] in short(results, size, seed).values()], results)
    for replicas in chosen.replicas:
        for steps in chosen.steps:
            lengths_too = ddp_steps(steps)[-2:] if steps > USUAL else []
            tried = [run for name in ("alone", "diloco(32)") for run in grids(results, steps, replicas, name)]
            tried += [run for some in lengths_too for run in grids(results, some, replicas, "DDP")]
            do(tried, results)
            runs: list[Run] = []
            for seed in chosen.seeds:
                runs += methods(results, steps, replicas, seed).values()
            ddp = [best(results, grids(results, some, replicas, "DDP")) for some in lengths_too]
            do([*runs, *(replace(run, seed=seed) for run in ddp for seed in chosen.seeds)], results)


if __name__ == "__main__":
    main()
