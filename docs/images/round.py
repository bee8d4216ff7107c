# SPDX-License-Identifier: Apache-2.0
"""Draw `round.png`: the sets of ranks that meet in a round, of four replicas of two ranks each (needs matplotlib).

Run it with `python docs/images/round.py`.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch

COLUMN, ROW, GONE = "#D55E00", "#0072B2", "#999999"  # Okabe and Ito's: told apart with any eyesight
HELD = "#9ECAE1"
TARGET = Path(__file__).with_suffix(".png")
_RADIUS, _APART = 0.26, 4.1
Place = tuple[int, int]  # replica, rank in it


def draw(target: Path = TARGET) -> None:
    """Write the picture to `target`, as PNG."""
    figure = Figure(figsize=(11, 4.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    columns = [[(replica, rank) for replica in range(4)] for rank in range(2)]
    rows = [[(replica, rank) for rank in range(2)] for replica in range(4)]
    _draw_panel(axes, 0, "vote and exchange", "ranks with the same values:\nGeneration.group", columns, COLUMN)
    _draw_panel(axes, 1, "agree within a replica", "its island:\nGeneration.in_round", rows, ROW)
    _draw_panel(
        axes, 2, "a level of hierarchical()", "blocks of neighbours:\nGeneration.levels[1]", [*_blocks(columns)], COLUMN
    )
    left = [[place for place in column if place[0] != 1] for column in columns]
    _draw_panel(axes, 3, "after a loss", "the next generation, in which\nthe round goes on", left, COLUMN, lost=1)
    axes.set_xlim(-1.3, 3 * _APART + 2.0)
    axes.set_ylim(-4.6, 1.3)
    axes.set_aspect("equal")
    axes.axis("off")
    figure.savefig(target, format="png", metadata={"Software": None})


def _blocks(columns: Sequence[Sequence[Place]]) -> list[Sequence[Place]]:
    """Split each column into blocks of two."""
    return [column[begin : begin + 2] for column in columns for begin in (0, 2)]


def _draw_panel(
    axes: Axes,
    number: int,
    title: str,
    below: str,
    sets: Sequence[Sequence[Place]],
    color: str,
    lost: int | None = None,
) -> None:
    """Draw the ranks, and around each set of them a line."""
    left = number * _APART
    axes.text(left + 0.5, 0.75, title, ha="center", va="bottom", weight="bold")
    axes.text(left + 0.5, -3.75, below, ha="center", va="top")
    for replica in range(4):
        axes.text(left - 0.62, -replica, f"replica {replica}", ha="right", va="center", fontsize=7, color=GONE)
        for rank in range(2):
            is_lost = replica == lost
            filled = "white" if is_lost else HELD
            axes.add_patch(Circle((left + rank, -replica), _RADIUS, facecolor=filled, edgecolor=GONE, zorder=2))
            said = "x" if is_lost else str(2 * replica + rank)
            axes.text(left + rank, -replica, said, ha="center", va="center", zorder=3)
    for places in sets:
        xs, ys = [left + rank for _, rank in places], [-replica for replica, _ in places]
        corner = (min(xs) - 0.2, min(ys) - 0.2)
        shape = FancyBboxPatch(corner, max(xs) - min(xs) + 0.4, max(ys) - min(ys) + 0.4, boxstyle="round,pad=0.18")
        shape.set(fill=False, edgecolor=color, linewidth=2, zorder=1)
        axes.add_patch(shape)


if __name__ == "__main__":
    draw()
