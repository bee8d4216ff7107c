# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of docs/evidence.md from results/evidence.jsonl alone (needs matplotlib).

From `benchmarks`: python -m evidence.plots
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from evidence.experiments import STEPS, Results
from evidence.runs import SHAPES
from evidence.tables import Row, collect, mean_and_error, methods

TARGET = Path(__file__).parents[2] / "docs" / "images"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's


def draw(name: str, width: float, fill: Callable[[Axes, Results], None], results: Results) -> None:
    figure = Figure(figsize=(width, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    fill(axes, results)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    figure.savefig(TARGET / f"evidence_{name}.png", dpi=110)


def percent(row: Row) -> tuple[float, float]:
    mean, error = mean_and_error([100 * share for share in row.shares])
    return mean, 0.0 if math.isnan(error) else error


def finals(row: Row) -> list[float]:
    return [losses[2] for losses in row.losses]


def shares_against_bytes(axes: Axes, results: Results) -> None:
    """Every method that kept anything, on the smallest size."""
    rows = methods(results, "34k")
    kinds = ("DDP", "diloco", "local_sgd", "streaming", "sparse", "other")
    for row in rows.values():
        if math.isnan(row.fewer_bytes):
            continue
        mean, error = percent(row)
        kind = next((number for number, kind in enumerate(kinds) if row.name.startswith(kind)), 5)
        axes.errorbar(row.fewer_bytes, mean, error, fmt="o", color=COLOURS[kind], capsize=3)
        axes.annotate(row.name, (row.fewer_bytes, mean), (4, 4), textcoords="offset points", fontsize=7)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="times fewer bytes than DDP", ylabel="% of DDP's gain over one replica alone")
    axes.set_title(f"What each method keeps: {SHAPES['34k'].width} wide, {STEPS['34k']} steps, 4 replicas", fontsize=10)


def shares_against_interval(axes: Axes, results: Results) -> None:
    for number, size in enumerate(SHAPES):
        rows = collect(results, "1", size)
        for method, style in (("diloco", "-o"), ("local_sgd", "--s")):
            there = [(every, rows[f"{method}({every})"]) for every in (8, 32, 128) if f"{method}({every})" in rows]
            if len(there) > 1:
                means, errors = zip(*(percent(row) for _, row in there), strict=True)
                label, every = f"{method}, {size}", [every for every, _ in there]
                axes.errorbar(every, means, errors, fmt=style, color=COLOURS[number], capsize=3, label=label)
    axes.set(xscale="log", xlabel="H, steps in a round", ylabel="% of DDP's gain over one replica alone")
    axes.set_xticks([8, 32, 128], ["8", "32", "128"])
    axes.legend(fontsize=8)


def losses_against_bytes(axes: Axes, results: Results) -> None:
    rows = methods(results, "34k")
    for number, codec in enumerate(("", " int8", " e3m0")):
        there = [rows[name] for every in (8, 32, 128) if (name := f"diloco({every}){codec}") in rows]
        if there:
            means, errors = zip(*(mean_and_error(finals(row)) for row in there), strict=True)
            label = f"diloco{codec or ' fp32'}, H 8, 32 and 128"
            x = [row.fewer_bytes for row in there]
            axes.errorbar(x, means, errors, fmt="-o", color=COLOURS[number], capsize=3, label=label)
    for number, name in enumerate(("streaming_diloco(32, 2) 4 bits", "sparse_loco(32)", "DDP, PowerSGD rank 2")):
        if name in rows:
            mean, error = mean_and_error(finals(rows[name]))
            axes.errorbar(
                rows[name].fewer_bytes, mean, error, fmt="s", color=COLOURS[3 + number], capsize=3, label=name
            )
    for name in ("DDP", "alone"):
        axes.axhline(statistics.mean(finals(rows[name])), color="grey", linewidth=0.8, linestyle="--")
        axes.annotate(name, (1, statistics.mean(finals(rows[name]))), (2, 3), textcoords="offset points")
    axes.set(xscale="log", xlabel="times fewer bytes than DDP", ylabel="held-out loss, nats a byte")
    axes.legend(fontsize=8)


def shares_by_change(axes: Axes, results: Results) -> None:
    rows = list(reversed(collect(results, "3", "34k").values()))
    means, errors = zip(*(percent(row) for row in rows), strict=True)
    colours = [COLOURS[1] if row.name == "as it is" else COLOURS[0] for row in rows]
    axes.barh(range(len(rows)), means, xerr=errors, color=colours, capsize=3)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_xlabel("% of DDP's gain over one replica alone that diloco(32) keeps")


def shares_against_size(axes: Axes, results: Results) -> None:
    names = ("diloco(8)", "diloco(32)", "diloco(128)", "streaming_diloco(32, 2) 4 bits", "local_sgd(32)")
    by_size = {size: collect(results, "1", size) for size in SHAPES}
    for number, name in enumerate(names):
        there = [(place, rows[name]) for place, rows in enumerate(by_size.values()) if name in rows]
        if there:
            means, errors = zip(*(percent(row) for _, row in there), strict=True)
            x = [place + 0.04 * number for place, _ in there]
            axes.errorbar(x, means, errors, fmt="-o", color=COLOURS[number], capsize=3, label=name)
    there = [size for size, rows in by_size.items() if rows]
    axes.set_xticks(range(len(there)), there)
    axes.set(xlabel="parameters", ylabel="% of DDP's gain over one replica alone")
    axes.legend(fontsize=8)


def main() -> None:
    results = Results()
    draw("methods", 9, shares_against_bytes, results)
    draw("interval", 6.5, shares_against_interval, results)
    draw("codecs", 7.5, losses_against_bytes, results)
    draw("changes", 8, shares_by_change, results)
    draw("sizes", 6.5, shares_against_size, results)


if __name__ == "__main__":
    main()
