# SPDX-License-Identifier: Apache-2.0
"""Which changes to `diloco` in four bits end lower from scratch, for about as many bytes?

From `benchmarks`: python -m evidence.frontier [--sizes 34k 100k] [--seeds 0 1 2] [--tables]

Four replicas exchange in two hops. Runs are lines of results/evidence.jsonl, as those of `experiments.py`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from evidence.experiments import MEASURED, Results, do, from_scratch, spelled
from evidence.runs import Run
from evidence.tables import SEEDS, mean_and_error, with_error
from farflung.methods.momentum import LARGEST, rate_of

SIZES = ("34k", "100k")
CODED = {"codec": "e3m0", "exchange": "reduce_scatter"}
OUTER = {  # by H: pairs of the outer learning rate and what its momentum grows to
    4: (
        (0.35, 0.7),
        (0.35, 0.8),
        (0.5, 0.7),
        (0.7, 0.5),
        (0.35, 0.95),
        (0.5, 0.8),
        (0.5, 0.9),
        (0.5, 0.95),
        (0.7, 0.7),
        (0.7, 0.8),
        (0.7, 0.9),
    ),
    8: ((0.5, 0.9), (0.5, 0.95), (0.7, 0.7), (0.7, 0.8), (0.7, 0.95), (0.85, 0.7), (0.85, 0.8)),
    16: ((0.7, 0.8), (0.85, 0.8), (0.85, 0.9), (1.0, 0.8)),
    32: ((0.85, 0.8), (1.0, 0.8), (1.0, 0.9)),
}
MORE: dict[str, dict[str, Any]] = {  # what else is changed of H=8
    "momentum grows twice as fast": {"sooner": 2.0},
    "momentum grows half as fast": {"sooner": 0.5},
    "AdamW's moments averaged": {"average_state": True},
    "the mean has the replicas' norms": {"radial": True, "exchange": None},
    "plain averages each 2 steps in the first tenth": {"first": 2},
    "plain averages each 4 steps in the first tenth": {"first": 4},
}
FACTORS = (0.5, 0.7, 1.4)  # of the inner rate
HELPS = "H=4, outer rate 0.35, momentum to 0.8"  # at both sizes, and no other change
SHOWN = (  # on the page
    HELPS,
    "H=8, outer rate 0.7, momentum to 0.8",
    *(f"H=8, {name}" for name in MORE if "half as fast" not in name),
)


def usual(results: Results, size: str, seed: int, every: int = 8) -> Run:
    """Return the recipe with its defaults."""
    run = from_scratch(results, size, seed)[MEASURED][0]
    return replace(run, settings=spelled(every=every, lr=rate_of(every), **CODED))


def rows(results: Results, size: str, seed: int) -> dict[str, Run]:
    """Return the runs by what is changed."""
    found = {}
    for every, pairs in OUTER.items():
        base = found[f"H={every}"] = usual(results, size, seed, every)
        for lr, largest in pairs:
            more = {} if largest == LARGEST else {"largest": largest}
            settings = spelled(**{**base.options, "lr": lr, **more})
            found[f"H={every}, outer rate {lr}, momentum to {largest}"] = replace(base, settings=settings)
    base = usual(results, size, seed)
    for name, changes in MORE.items():
        settings = {name: value for name, value in {**base.options, **changes}.items() if value is not None}
        found[f"H=8, {name}"] = replace(base, settings=spelled(**settings))
    for factor in FACTORS:
        found[f"H=8, {factor} times the inner rate"] = replace(base, lr=round(factor * base.lr, 6))
    return found


def compared(results: Results) -> dict[str, list[list[float]]]:
    """Return by what is changed, for each size that has results, by how much each seed ends below the default of its H;
    at last the share of that one's bytes."""
    found: dict[str, list[list[float]]] = {}
    for size in SIZES:
        by_seed = [rows(results, size, seed) for seed in SEEDS]
        for name in by_seed[0]:
            pairs = [(one[name.partition(",")[0]], one[name]) for one in by_seed]
            saved = [results.loss(base) - results.loss(run) for base, run in pairs]
            sent = [results.figures.get(one, {}).get("bytes_sent", math.nan) for one in pairs[0]]
            found.setdefault(name, []).append(saved)
            if size == SIZES[-1]:
                found[name].append([sent[1] / sent[0]])
    return found


def said(saved: list[float]) -> str:
    """Return by how much a change ends lower, with `+` behind more than twice the standard error."""
    if not all(map(math.isfinite, saved)):
        return "-"
    mean, error = mean_and_error(saved)
    return with_error(saved, ".4f") + " +" * (mean > 2 * error)


def table(results: Results, shown: Sequence[str] = ()) -> list[str]:
    """Return by how much each change ends below the default of its H; `+`: by more than twice the standard error."""
    lines = [f"| `diloco` e3m0 | {' | '.join(f'{size}: lower by' for size in SIZES)} | bytes |", "|---|---|---|---|"]
    for name, (*by_size, [share]) in compared(results).items():
        if name in (shown or [name]) and "," in name:
            lines.append(f"| {name} | {' | '.join(map(said, by_size))} | {share:.2f} |")
    return lines


def helpful(results: Results) -> list[str]:
    """Return what ends lower at each size."""
    return [
        name
        for name, (*by_size, _) in compared(results).items()
        if "," in name and all(said(saved).endswith("+") for saved in by_size)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=SIZES)
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--tables", action="store_true", help="print the table of what is there, and train nothing")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results = Results()
    if chosen.tables:
        print("\n".join(table(results)))
        return
    for seed in chosen.seeds:
        for size in chosen.sizes:
            do(rows(results, size, seed).values(), results)


if __name__ == "__main__":
    main()
