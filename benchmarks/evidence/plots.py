# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of docs/evidence.md from what lies in results (needs matplotlib).

From `benchmarks`: python -m evidence.plots
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

from _measure import RESULTS
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from evidence.experiments import SCRATCH, STEPS, Results
from evidence.runs import SHAPES
from evidence.tables import Row, collect, mean_and_error, methods

TARGET = Path(__file__).parents[2] / "docs" / "images"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's

LENGTHS = {"half the steps": 500, "as it is": 1000, "twice the steps": 2000, "four times the steps": 4000}


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
    """Every method on the smallest size, without variants that would hide it."""
    hidden = ("(8) int8", " diloco(32) int8", "(8) e3m0", "no pull", ", defaults", ") rank 2", ") rank 4")
    rows = [row for row in methods(results, "34k").values() if not f" {row.name}".endswith(hidden)]
    _shares_against_bytes(axes, rows, "34k", "after a common start")


def shares_from_scratch(axes: Axes, results: Results) -> None:
    hidden = ("delay 2", "delay 4", "delay 8", "delay 32", "noloco(32)", "gossip(32)", " diloco(32)", " diloco(128)")
    rows = [row for row in collect(results, SCRATCH, "100k").values() if not f" {row.name}".endswith(hidden)]
    _shares_against_bytes(axes, rows, "100k", "from scratch, all bytes counted")


def _shares_against_bytes(axes: Axes, rows: list[Row], size: str, start: str) -> None:
    rows = [row for row in rows if not math.isnan(row.fewer_bytes)]
    kinds = ("DDP", "diloco", "local_sgd", "streaming", "sparse", "other")
    for number, row in enumerate(sorted(rows, key=percent)):
        mean, error = percent(row)
        kind = next((place for place, kind in enumerate(kinds) if row.name.startswith(kind)), 5)
        filled = "full" if len(row.shares) > 1 else "none"
        axes.errorbar(row.fewer_bytes, mean, error, fmt="o", fillstyle=filled, color=COLOURS[kind], capsize=3)
        place = {"ha": "left", "xytext": (5, -3)} if number % 2 else {"ha": "right", "xytext": (-5, -3)}
        axes.annotate(row.name, (row.fewer_bytes, mean), textcoords="offset points", fontsize=7, **place)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="times fewer bytes than DDP", ylabel="% of DDP's gain over one replica alone")
    axes.set_title(f"What each method keeps {start}: {size} parameters, {STEPS[size]} steps, 4 replicas", fontsize=10)


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
    axes.minorticks_off()
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
        axes.text(0.01, statistics.mean(finals(rows[name])), name, transform=axes.get_yaxis_transform(), va="bottom")
    axes.set(xscale="log", xlabel="times fewer bytes than DDP", ylabel="held-out loss, nats a byte")
    axes.legend(fontsize=8)


def shares_by_change(axes: Axes, results: Results) -> None:
    rows = list(reversed(collect(results, "3", "34k").values()))
    means, errors = zip(*(percent(row) for row in rows), strict=True)
    colours = ["#9ECAE1" if len(row.shares) == 1 else COLOURS[row.name == "as it is"] for row in rows]
    axes.barh(range(len(rows)), means, xerr=errors, color=colours, capsize=3)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_xlabel("% of DDP's gain over one replica alone that diloco(32) keeps")


def shares_against_length(axes: Axes, results: Results) -> None:
    changed = collect(results, "3", "34k")
    lines = {"34k": [(steps, changed.get(name)) for name, steps in LENGTHS.items()]}
    lines |= {size: [(STEPS[size], collect(results, "1", size).get("diloco(32)"))] for size in SHAPES if size != "34k"}
    for number, (size, line) in enumerate(lines.items()):
        there = [(steps, row) for steps, row in line if row is not None]
        if there:
            means, errors = zip(*(percent(row) for _, row in there), strict=True)
            steps = [steps for steps, _ in there]
            axes.errorbar(steps, means, errors, fmt="-o", color=COLOURS[number], capsize=3, label=f"{size} parameters")
    axes.set(xscale="log", xlabel="steps", ylabel="% of DDP's gain that diloco(32) keeps", ylim=(0, 105))
    axes.set_xticks([500, 1000, 2000, 4000], ["500", "1,000", "2,000", "4,000"])
    axes.minorticks_off()
    axes.legend(fontsize=8)


def losses_against_time(axes: Axes, _: Results) -> None:
    """The demo's model over a line of 20 Mbit/s, as bench_slow_network measured it last."""
    lines = map(json.loads, (RESULTS / "slow_network.jsonl").read_text(encoding="utf-8").splitlines())
    last = [line for line in lines if line["megabits"] == 20 and "(small)" in line["model"]][-1]
    shown = ("ddp", "accelerate local_sgd(8)", "torchft diloco(32)", "diloco(32)", "streaming_diloco(24, 3)", "alone")
    for colour, name in zip(COLOURS, shown, strict=True):
        if name in last["figures"]:
            one = last["figures"][name]
            label = f"{name}: {one['seconds_to_loss']:.1f} s"
            axes.plot(one["seconds"][1:], one["losses"][1:], color=colour, label=label)
    axes.axhline(last["figures"]["ddp"]["losses"][-1], color="grey", linewidth=0.8, linestyle="--")
    axes.set(xscale="log", ylim=(1.9, 3.6), xlabel="seconds on a line of 20 Mbit/s, measured (log scale)")
    axes.set(ylabel="validation loss, nats a byte")
    axes.legend(loc="upper right", fontsize=8, title="time to the loss that DDP ends with (dashed)", title_fontsize=8)


def main() -> None:
    results = Results()
    draw("scratch", 9, shares_from_scratch, results)
    draw("methods", 9, shares_against_bytes, results)
    draw("interval", 6.5, shares_against_interval, results)
    draw("codecs", 7.5, losses_against_bytes, results)
    draw("changes", 8, shares_by_change, results)
    draw("length", 6.5, shares_against_length, results)
    draw("line", 7.5, losses_against_time, results)


if __name__ == "__main__":
    main()
