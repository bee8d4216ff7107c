# SPDX-License-Identifier: Apache-2.0
"""The demo's picture: how the validation loss falls with time on a slow line, and with bytes (needs matplotlib)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from farflung.base.words import in_bytes, in_seconds
from farflung.demo.settings import Result

MARKERS = "os^D"
COLOURS = ("#0072B2", "#D55E00", "#CC79A7", "#009E73")  # Okabe and Ito's: told apart with any eyesight


def draw(results: Sequence[Result], target: Path, title: str, rate: str) -> None:
    """Write the picture of `results` to `target`, as PNG; `rate` is that of the slow line."""
    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_axis(left, results, lambda result: result.curve_seconds, in_seconds, "after")
    left.set_xlabel(f"time on a line of {rate} (computed, log scale)")
    left.set_ylabel("validation loss (nats a byte)")
    _draw_axis(right, results, lambda result: [point.bytes_sent for point in result.curve], in_bytes, "for")
    right.set_xlabel("bytes sent by each process (measured, log scale)")
    figure.suptitle(title)
    figure.savefig(target, format="png")


def _draw_axis(
    axes: Axes,
    results: Sequence[Result],
    reach: Callable[[Result], Sequence[float]],
    write: Callable[[float], str],
    after: str,
) -> None:
    for result, marker, colour in zip(results, MARKERS, COLOURS, strict=False):
        xs, losses = reach(result), [point.loss for point in result.curve]
        label = f"{result.way}: {losses[-1]:.3f} {after} {write(xs[-1])}"
        axes.plot(xs, losses, marker=marker, markersize=5, color=colour, label=label, alpha=0.85)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda amount, _: write(amount)))
    axes.grid(which="major", alpha=0.3)
    axes.legend(title="loss at the end", fontsize="small")
