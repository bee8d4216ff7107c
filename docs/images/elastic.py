# SPDX-License-Identifier: Apache-2.0
"""Draw `elastic.png`: who trains when, in the latest run that `benchmarks/timeline_elastic.py` kept (needs matplotlib).

Run it with `python docs/images/elastic.py`.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

TRAINS, ROUND, COMES, ENDS = "#9ECAE1", "#0072B2", "#009E73", "#D55E00"  # Okabe and Ito's: told apart with any eyesight
TARGET = Path(__file__).with_suffix(".png")
RUN = Path(__file__).parents[2] / "benchmarks" / "results" / "elastic_timeline.jsonl"
SIGNALS = {"SIGKILL": ("X", "killed"), "SIGSTOP": ("s", "stopped"), "SIGCONT": (">", "wakes")}
_HEIGHT, _AFTER_S = 0.32, 10.0  # of a row; shown after the last event


def stays(run: dict[str, Any]) -> dict[str, list[list[float]]]:
    """The times of the rounds that each replica was in, by its name, apart wherever others had one without it."""
    found = defaultdict(list)
    for member, name in run["names"].items():
        mine = None
        for one in sorted(run["rounds"], key=lambda one: one["at"]):
            if int(member) not in one["members"]:
                mine = None
            elif one["member"] == int(member):
                if mine is None:
                    mine = []
                    found[name].append(mine)
                mine.append(one["at"])
    return dict(found)


def draw(target: Path = TARGET) -> None:
    """Write the picture to `target`, as PNG."""
    run = json.loads(RUN.read_text(encoding="utf-8").splitlines()[-1])["figures"]
    by_name = stays(run)
    rows = {name: -row for row, name in enumerate(sorted(by_name, key=lambda name: (" of " in name, name)))}
    began = min(one["at"] for one in run["rounds"])
    figure = Figure(figsize=(11, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, parts in by_name.items():
        for part in parts:
            _draw_part(axes, rows[name], [at - began for at in part])
    for event in run["events"]:
        if "signal" in event:
            shape, word = SIGNALS[event["signal"]]
            at, row = event["at"] - began, rows[event["to"]]
            axes.plot(at, row, shape, color=ENDS, markersize=9, zorder=4)
            _say(axes, word, at, row, ENDS, "right")
    axes.set_yticks(list(rows.values()), [name.replace(" of ", "\nof ") for name in rows])
    axes.set_ylim(min(rows.values()) - 0.5, 0.6)
    axes.set_xlim(0, max(event["at"] for event in run["events"]) - began + _AFTER_S)
    axes.set_xlabel("seconds since the first round")
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(
        handles=[
            Patch(facecolor=TRAINS, label="trains with the others"),
            Line2D([], [], color=ROUND, marker="|", linestyle="", markersize=12, label="a round"),
            Line2D([], [], color=COMES, marker="o", linestyle="", markersize=8, label="joins"),
            Line2D([], [], color=ENDS, marker="X", linestyle="", markersize=8, label="a signal from outside"),
        ],
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    figure.savefig(target, format="png", metadata={"Software": None})


def _draw_part(axes: Axes, row: int, times: list[float]) -> None:
    """Draw one stay of a replica, from its first round to its last."""
    axes.barh(row, times[-1] - times[0], _HEIGHT, times[0], color=TRAINS, zorder=1)
    axes.vlines(times, row - _HEIGHT / 2, row + _HEIGHT / 2, color=ROUND, linewidth=0.7, zorder=2)
    if times[0] > 0.5:
        axes.plot(times[0], row, "o", color=COMES, markersize=8, zorder=4)
        _say(axes, "joins", times[0], row, COMES, "left")


def _say(axes: Axes, word: str, at: float, row: int, color: str, side: str) -> None:
    """Write a word over a mark."""
    x = 6 if side == "right" else -6
    axes.annotate(word, (at, row), (x, 13), textcoords="offset points", ha=side, va="bottom", color=color)


if __name__ == "__main__":
    draw()
