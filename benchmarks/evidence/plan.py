# SPDX-License-Identifier: Apache-2.0
"""Write the efficiencies by which `farflung plan` and `auto` choose, from results/evidence.jsonl.

From `benchmarks`: python -m evidence.plan
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from evidence.efficiency import efficiencies
from evidence.experiments import PAIRS, SCRATCH, STEPS, Results, rows
from evidence.runs import Run
from evidence.tables import SEEDS, mean_and_error

TARGET = Path(__file__).parents[2] / "src" / "farflung" / "cost" / "evidence.py"
RECIPES = ("local_sgd", "diloco", "streaming_diloco", "eager_diloco", "sparse_loco")
EVERY_STEP = {"DDP": "DDP", "DDP, bf16": "DDP bf16", "alone": "alone"}
NAME = re.compile(r"(?P<recipe>\w+)\((?P<every>\d+)(, 2)?\)(?P<codec> \w+)?(, delay (?P<delay>\d+))?")
WIDTH = 120
SIZES = ("100k", "385k")
HEAD = '''# SPDX-License-Identifier: Apache-2.0
"""The efficiency of each method in our tests: how many of DDP's steps end at the same loss, for each of its steps.

By the number of replicas, and by the steps between rounds: the mean of the sizes that were measured, and its standard
error, or half of what two sizes differ by if that is more. A replica that trains `alone` has one, too. Streaming was
measured with a delay of one step, and, as `late`, with one of a quarter of its interval. Written by
benchmarks/evidence/plan.py from benchmarks/results/evidence.jsonl; a test keeps them equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Measured: TypeAlias = Mapping[int, tuple[float, float]]

'''


Table: TypeAlias = dict[str, dict[int, tuple[float, float]]]


def table(results: Results, size: str, by_seed: Mapping[int, Mapping[str, list[Run]]]) -> Table:
    """Return the mean efficiency and its standard error, by method and interval, of runs from scratch."""
    found: Table = {}
    for name in by_seed[0]:
        runs = {seed: by_seed[seed][name] for seed in SEEDS}
        parts = NAME.fullmatch(name)
        if not (name in EVERY_STEP or (parts and parts["recipe"] in RECIPES)):
            continue
        if any(math.isinf(results.loss(run)) for [run] in runs.values()) or not (
            shares := efficiencies(results, size, runs)
        ):
            continue
        every, delay = (int(parts["every"]), int(parts["delay"] or 1)) if parts else (1, 1)
        if delay in (1, every // 4):
            kind = f"{parts['recipe']}{parts['codec'] or ''}{', late' * (delay > 1)}" if parts else EVERY_STEP[name]
            found.setdefault(kind, {})[every] = mean_and_error(shares)
    return {name: dict(sorted(by_interval.items())) for name, by_interval in found.items()}


def pooled(tables: Sequence[Table]) -> Table:
    """Return the mean of the sizes that have a row; its error is at least half of what they differ by."""
    found: Table = {}
    for name in dict.fromkeys(name for one in tables for name in one):
        for every in sorted({every for one in tables for every in one.get(name, {})}):
            means, errors = zip(*(one[name][every] for one in tables if every in one.get(name, {})), strict=True)
            error = max(math.hypot(*errors) / len(errors), (max(means) - min(means)) / 2)
            found.setdefault(name, {})[every] = round(statistics.mean(means), 3), round(error, 3)
    return found


def _lines(name: str, by_interval: Mapping[int, tuple[float, float]]) -> list[str]:
    """Return the entry of a method as the formatter has it."""
    if len(line := f"{name}{by_interval},") <= WIDTH:
        return [line]
    return [f"{name}{{", *(f"            {every}: {found}," for every, found in by_interval.items()), "        },"]


def source(results: Results) -> str:
    """Return the text of the package's file."""
    parameters = max(int(size.removesuffix("k")) * 1000 for size in SIZES)
    lines = [f"STEPS = {STEPS[SIZES[0]]:_}  # of each run"]
    lines += [f"PARAMETERS = {parameters:_}  # of the largest model"]
    lines += ["EFFICIENCY: Mapping[int, Mapping[str, Measured]] = {"]
    for replicas, experiment in ((2, PAIRS), (4, SCRATCH)):
        by_size = {size: {seed: rows(results, experiment, size, seed) for seed in SEEDS} for size in SIZES}
        found = pooled([table(results, size, by_seed) for size, by_seed in by_size.items()])
        kinds = [line for name, by_interval in found.items() for line in _lines(f'        "{name}": ', by_interval)]
        lines += [f"    {replicas}: {{", *kinds, "    },"]
    return HEAD + "\n".join([*lines, "}"]) + "\n"


if __name__ == "__main__":
    TARGET.write_text(source(Results()), encoding="utf-8")
