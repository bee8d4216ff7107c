# SPDX-License-Identifier: Apache-2.0
"""Write the efficiencies by which `farflung plan` and `auto` choose, from results/evidence.jsonl.

From `benchmarks`: python -m evidence.plan
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path

from evidence.efficiency import efficiencies
from evidence.experiments import PAIRS, SCRATCH, STEPS, Results, rows
from evidence.tables import SEEDS, mean_and_error

TARGET = Path(__file__).parents[2] / "src" / "farflung" / "cost" / "evidence.py"
RECIPES = ("local_sgd", "diloco", "streaming_diloco", "eager_diloco", "sparse_loco")
NEEDED = {"diloco e3m0", "streaming_diloco e3m0"}  # of a size: those that come first somewhere
EVERY_STEP = {"DDP": "DDP", "DDP, bf16": "DDP bf16", "alone": "alone"}
NAME = re.compile(r"(?P<recipe>\w+)\((?P<every>\d+)(, 2)?\)(?P<codec> \w+)?(, delay (?P<delay>\d+))?")
WIDTH = 120
SIZES = ("100k",)  # of which each method was measured with two replicas and with four
HEAD = '''# SPDX-License-Identifier: Apache-2.0
"""The efficiency of each method in our tests: how many of DDP's steps end at the same loss, for each of its steps.

By the numbers of parameters and replicas, and by the steps between rounds: the mean, and its standard error. A replica
that trains `alone` has one, too. Streaming was measured with a delay of one step, and, as `late`, with one of a quarter
of its interval. Written by benchmarks/evidence/plan.py from benchmarks/results/evidence.jsonl; a test keeps them equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Measured: TypeAlias = Mapping[int, tuple[float, float]]

'''


def table(results: Results, experiment: str, size: str) -> dict[str, dict[int, tuple[float, float]]]:
    """Return the mean efficiency and its standard error, by method and interval, of runs from scratch."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    by_seed = {seed: rows(results, experiment, size, seed) for seed in SEEDS}
    for name in by_seed[0]:
        runs = {seed: by_seed[seed][name] for seed in SEEDS}
        parts = NAME.fullmatch(name)
        if not (name in EVERY_STEP or (parts and parts["recipe"] in RECIPES)):
            continue
        if any(math.isinf(results.loss(run)) for [run] in runs.values()) or not (
            shares := efficiencies(results, size, runs)
        ):
            continue
        mean, error = (round(one, 3) for one in mean_and_error(shares))
        every, delay = (int(parts["every"]), int(parts["delay"] or 1)) if parts else (1, 1)
        if delay in (1, every // 4):
            kind = f"{parts['recipe']}{parts['codec'] or ''}{', late' * (delay > 1)}" if parts else EVERY_STEP[name]
            found.setdefault(kind, {})[every] = (mean, error)
    return {name: dict(sorted(by_interval.items())) for name, by_interval in found.items()}


def _lines(name: str, by_interval: Mapping[int, tuple[float, float]]) -> list[str]:
    """Return the entry of a method as the formatter has it."""
    if len(line := f"{name}{by_interval},") <= WIDTH:
        return [line]
    return [f"{name}{{", *(f"            {every}: {found}," for every, found in by_interval.items()), "        },"]


def source(results: Results) -> str:
    """Return the text of the package's file."""
    lines = [f"STEPS = {STEPS[SIZES[0]]:_}  # of each run"]
    lines += ["EFFICIENCY: Mapping[tuple[int, int], Mapping[str, Measured]] = {"]
    for size, experiment in product(SIZES, (PAIRS, SCRATCH)):
        found = table(results, experiment, size)
        if found.keys() >= NEEDED:
            numbers = int(size.removesuffix("k")) * 1000, 2 if experiment == PAIRS else 4
            kinds = [line for name, by_interval in found.items() for line in _lines(f'        "{name}": ', by_interval)]
            lines += [f"    ({numbers[0]:_}, {numbers[1]}): {{", *kinds, "    },"]
    return HEAD + "\n".join([*lines, "}"]) + "\n"


if __name__ == "__main__":
    TARGET.write_text(source(Results()), encoding="utf-8")
