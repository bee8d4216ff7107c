# SPDX-License-Identifier: Apache-2.0
"""Write the table of `farflung plan` from results/evidence.jsonl. From `benchmarks`: python -m evidence.kept"""

from __future__ import annotations

import re
import statistics
from pathlib import Path

from evidence.experiments import SCRATCH, STEPS, Results
from evidence.tables import SEEDS, collect

TARGET = Path(__file__).parents[2] / "src" / "farflung" / "cost" / "evidence.py"
SIZE = "100k"
COMPARED = ("local_sgd", "diloco", "streaming_diloco", "eager_diloco", "sparse_loco")
NAME = re.compile(r"(?P<recipe>\w+)\((?P<every>\d+)(, 2)?\)(?P<codec> \w+)?(, delay (?P<delay>\d+))?")
HEAD = '''# SPDX-License-Identifier: Apache-2.0
"""What each method kept of DDP's gain over a replica that trains alone, by the steps between rounds, in our tests.

Written by benchmarks/evidence/kept.py from benchmarks/results/evidence.jsonl; a test keeps them equal. Streaming was
measured with a delay of one step, and, as `late`, with one of a quarter of its interval.
"""

from __future__ import annotations

from collections.abc import Mapping

'''


def table(results: Results) -> dict[str, dict[int, float]]:
    """Return the mean share over seeds, by method and interval, of runs from scratch."""
    rows = collect(results, SCRATCH, SIZE)
    shares = {
        name: round(statistics.mean(row.shares), 3) for name, row in rows.items() if len(row.shares) == len(SEEDS)
    }
    found = {"DDP": {1: shares["DDP"]}, "DDP bf16": {1: shares["DDP, bf16"]}}
    for name, share in shares.items():
        if (parts := NAME.fullmatch(name)) and parts["recipe"] in COMPARED:
            every, delay = int(parts["every"]), int(parts["delay"] or 1)
            if delay in (1, every // 4):
                late = ", late" if delay > 1 else ""
                found.setdefault(f"{parts['recipe']}{parts['codec'] or ''}{late}", {})[every] = share
    return {name: dict(sorted(by_interval.items())) for name, by_interval in found.items()}


def source(results: Results) -> str:
    """Return the text of the package's file."""
    tests = f"with four replicas of {SIZE} parameters, {STEPS[SIZE]:,} steps, three seeds"
    lines = [f'TESTS = "{tests}"', "GAIN_KEPT: Mapping[str, Mapping[int, float]] = {"]
    lines += [f'    "{name}": {by_interval},' for name, by_interval in table(results).items()]
    return HEAD + "\n".join([*lines, "}"]) + "\n"


if __name__ == "__main__":
    TARGET.write_text(source(Results()), encoding="utf-8")
