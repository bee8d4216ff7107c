# SPDX-License-Identifier: Apache-2.0
"""Draw `layouts.png`: four ranks in each layout, what each holds, and who talks to whom how often (needs matplotlib).

Run it with `python docs/images/layouts.py`.
"""

from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

EVERY_STEP, EVERY_H_STEPS = "#0072B2", "#D55E00"  # Okabe and Ito's: told apart with any eyesight
HELD, ISLAND = "#9ECAE1", "#E8E8E8"
TARGET = Path(__file__).with_suffix(".png")
_BOX, _MARGIN, _GAP = 0.58, 0.08, 0.6  # where the distance between two ranks is 1
_DASHES = (0, (2, 1.5))


@dataclass(frozen=True)
class Drawing:
    """A layout of `rows` x `columns` ranks."""

    title: str
    rows: int
    columns: int
    sharded: bool = False
    outer: bool = False


LAYOUTS = (
    Drawing("DDP", 4, 1),
    Drawing("outer loop", 4, 1, outer=True),
    Drawing("FSDP", 1, 4, sharded=True),
    Drawing("HSDP", 2, 2, sharded=True),
    Drawing("FSDP islands,\nouter loop", 2, 2, sharded=True, outer=True),
    Drawing("DDP islands,\nouter loop", 2, 2, outer=True),
)


def draw(target: Path = TARGET) -> None:
    """Write the picture to `target`, as PNG."""
    figure = Figure(figsize=(11, 4.3), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    left = 0.0
    for drawing in LAYOUTS:
        _draw_layout(axes, drawing, left)
        left += drawing.columns + _GAP
    axes.set_xlim(-0.75, left - _GAP - 0.4)
    axes.set_ylim(-1.95, 2.95)
    axes.set_aspect("equal")
    axes.axis("off")
    figure.legend(
        handles=[
            Line2D([], [], color=EVERY_STEP, linewidth=3, label="every step"),
            Line2D([], [], color=EVERY_H_STEPS, linewidth=2, linestyle=_DASHES, label="every H steps"),
            Patch(facecolor=HELD, edgecolor="black", label="the part of the model that a rank holds"),
            Patch(facecolor=ISLAND, label="an island"),
        ],
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    figure.savefig(target, format="png", metadata={"Software": None})


def _draw_layout(axes: Axes, drawing: Drawing, left: float) -> None:
    """Draw one grid, its first column at `left`: ranks, numbered along the rows, and the lines between them."""
    top = (drawing.rows - 1) / 2
    middle = left + (drawing.columns - 1) / 2
    axes.text(middle, 2.05, f"{drawing.title}\n{drawing.rows} x {drawing.columns}", ha="center", va="bottom")
    for row in range(drawing.rows):
        y = top - row
        if drawing.outer:
            side = _BOX + 2 * _MARGIN
            corner = (left - side / 2, y - side / 2)
            axes.add_patch(Rectangle(corner, drawing.columns - 1 + side, side, facecolor=ISLAND, zorder=0))
        for column in range(drawing.columns):
            x = left + column
            if column:
                axes.plot([x - 1, x], [y, y], color=EVERY_STEP, linewidth=3, zorder=1)
            if row and drawing.outer:
                axes.plot([x, x], [y + 1, y], color=EVERY_H_STEPS, linewidth=2, linestyle=_DASHES, zorder=1)
            elif row:
                axes.plot([x, x], [y + 1, y], color=EVERY_STEP, linewidth=3, zorder=1)
            _draw_rank(axes, x, y, row * drawing.columns + column, drawing)


def _draw_rank(axes: Axes, x: float, y: float, rank: int, drawing: Drawing) -> None:
    """Draw a rank as a box in which the part that it holds is filled."""
    parts = drawing.columns if drawing.sharded else 1
    height = _BOX / parts
    left, bottom = x - _BOX / 2, y - _BOX / 2
    part = bottom + _BOX - height * (rank % parts + 1)
    axes.add_patch(Rectangle((left, bottom), _BOX, _BOX, facecolor="white", zorder=2))
    axes.add_patch(Rectangle((left, part), _BOX, height, facecolor=HELD, zorder=3))
    axes.add_patch(Rectangle((left, bottom), _BOX, _BOX, fill=False, edgecolor="black", linewidth=1, zorder=4))
    axes.text(x, y, str(rank), ha="center", va="center", zorder=5)


if __name__ == "__main__":
    draw()
