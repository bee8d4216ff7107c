# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/evidence.md, from results/evidence.jsonl alone. From `benchmarks`: python -m evidence.tables"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from evidence.experiments import METHODS, TUNED_AT, Results, inner_grids, outer_grids, rows, tuned
from evidence.runs import SHAPES, Run

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Row:
    """What a row comes to over its seeds.

    Args:
        losses: by seed.
        shares: of DDP's gain over one replica alone, by seed.
        fewer_bytes: how many times fewer than DDP a replica sends, after the common start.
        differences: by seed, the loss above that of the row's reference.
    """

    name: str
    losses: dict[int, float]
    shares: list[float]
    fewer_bytes: float
    differences: list[float]

    @property
    def differs(self) -> bool:
        """Whether the mean difference from the reference is twice its standard error or more."""
        if len(self.differences) < 2:
            return False
        mean, error = mean_and_error(self.differences)
        return abs(mean) >= 2 * error


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return the mean and its standard error; without a second value that is not a number."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def with_error(values: list[float], form: str, scale: float = 1.0) -> str:
    mean, error = mean_and_error([scale * value for value in values])
    return f"{mean:{form}}" + ("" if math.isnan(error) else f" ± {error:{form}}")


def collect(results: Results, experiment: str, size: str, reference: str = "diloco(32)") -> dict[str, Row]:
    """Return an experiment's rows that have results, of seeds that have alone and DDP too."""
    found: dict[str, Row] = {}
    by_seed = {seed: rows(results, experiment, size, seed) for seed in SEEDS}
    for name in by_seed[0]:
        losses, shares, differences, bytes_sent = {}, [], [], math.nan
        for seed in SEEDS:
            usual = [usual_run(results, size, seed, one) for one in ("alone", "DDP", reference)]
            runs = by_seed[seed][name]
            if experiment == "3":
                usual = by_seed[seed]["as it is"]
            alone, ddp, run = runs if len(runs) == 3 else (*usual[:2], runs[0])
            values = [results.loss(one) for one in (alone, ddp, run)]
            if not all(map(math.isfinite, values)):
                continue
            losses[seed] = values[2]
            shares.append((values[0] - values[2]) / (values[0] - values[1]))
            if math.isfinite(results.loss(usual[2])):
                differences.append(values[2] - results.loss(usual[2]))
            sent = results.figures[run]["bytes_sent"] / (run.steps - run.split)
            bytes_sent = results.figures[ddp]["bytes_sent"] / (ddp.steps - ddp.split) / sent if sent else math.inf
        if losses:
            found[name] = Row(name, losses, shares, bytes_sent, differences)
    return found


def usual_run(results: Results, size: str, seed: int, name: str) -> Run:
    method, settings = METHODS[name]
    return tuned(results, size, seed, method, **settings)


def methods_table(results: Results, size: str) -> list[str]:
    """Experiments 1 and 2."""
    lines = ["| method | held-out loss | DDP's gain kept | fewer bytes than DDP | seeds |", "|---|---|---|---|---|"]
    found = collect(results, "1", size) | collect(results, "2", size)
    for row in sorted(found.values(), key=lambda row: -statistics.mean(row.shares)):
        mark = "" if row.differs or row.name == "diloco(32)" else " (=)"
        fewer = "sends nothing" if math.isinf(row.fewer_bytes) else f"{row.fewer_bytes:.3g}"
        loss = with_error(list(row.losses.values()), ".4f")
        lines.append(f"| `{row.name}` | {loss}{mark} | {share_of(row)} | {fewer} | {len(row.losses)} |")
    return lines


def share_of(row: Row) -> str:
    return f"{with_error(row.shares, '.0f', 100)} %"


def changes_table(results: Results, size: str) -> list[str]:
    """Experiment 3."""
    lines = [
        "| one change | alone | DDP | `diloco(32)` | DDP's gain kept | fewer bytes than DDP | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    by_seed = {seed: rows(results, "3", size, seed) for seed in SEEDS}
    for name, row in collect(results, "3", size).items():
        losses = []
        for index in range(3):
            runs = {seed: by_seed[seed][name] for seed in row.losses}
            if len(runs[min(runs)]) == 3:
                losses.append(with_error([results.loss(run[index]) for run in runs.values()], ".4f"))
            else:
                losses.append(with_error(list(row.losses.values()), ".4f") if index == 2 else "as it is")
        lines.append(f"| {name} | {' | '.join(losses)} | {share_of(row)} | {row.fewer_bytes:.3g} | {len(row.losses)} |")
    return lines


def tuning_table(results: Results) -> list[str]:
    """What was best at a quarter of the length; for outer settings, next to the recipe's own defaults."""
    lines = ["| method | size | best | loss | loss with defaults |", "|---|---|---|---|---|"]
    grids = [(name, size, grid) for size in SHAPES for name, grid in inner_grids(size).items()]
    grids += [(name, TUNED_AT, grid) for name, grid in outer_grids(results).items()]
    for name, size, grid in grids:
        there = [run for run in grid if math.isfinite(results.loss(run))]
        if len(there) < len(grid):
            continue
        chosen = min(there, key=results.loss)
        outer = ", ".join(
            f"{key} {value}" for key, value in chosen.options.items() if key in ("lr", "momentum", "beta")
        )
        is_inner = len({run.lr for run in grid}) > 1
        said = f"inner rate {chosen.lr:.2g}" if is_inner else outer or "defaults"
        usual = "-" if is_inner else f"{results.loss(grid[0]):.4f}"
        lines.append(f"| `{name}` | {size} | {said} | {results.loss(chosen):.4f} | {usual} |")
    return lines


def headline(results: Results, size: str, name: str) -> str:
    """Return `x ± e % of DDP's gain for 1/y of its bytes`."""
    row = (collect(results, "1", size) | collect(results, "2", size))[name]
    return f"{share_of(row)} of DDP's gain for 1/{row.fewer_bytes:.0f} of its bytes"


def all_tables(results: Results) -> dict[str, list[str]]:
    """Return every table that has rows, by its title."""
    tables = {"tuning": tuning_table(results)}
    for size in SHAPES:
        tables[f"methods, {size}"] = methods_table(results, size)
        tables[f"changes, {size}"] = changes_table(results, size)
    return {title: lines for title, lines in tables.items() if len(lines) > 2}


if __name__ == "__main__":
    for title, lines in all_tables(Results()).items():
        print(f"\n{title}\n\n" + "\n".join(lines))
