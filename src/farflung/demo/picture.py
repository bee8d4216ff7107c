# SPDX-License-Identifier: Apache-2.0
"""The demo's picture: how the validation loss falls with the bytes sent, one curve for each way (needs matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from farflung.cost.units import in_bytes
from farflung.demo.settings import Result

MARKERS = "osD"
COLOURS = ("#0072B2", "#D55E00", "#009E73")  # Okabe and Ito's: told apart with any eyesight


def draw(results: Sequence[Result], target: Path, title: str) -> None:
    """Write the picture of `results` to `target`, as PNG."""
    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for result, marker, colour in zip(results, MARKERS, COLOURS, strict=False):
        sent = [point.bytes_sent for point in result.curve]
        losses = [point.loss for point in result.curve]
        label = f"{result.way}: {losses[-1]:.3f} for {in_bytes(sent[-1])}"
        axes.plot(sent, losses, marker=marker, markersize=5, color=colour, label=label, alpha=0.85)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: in_bytes(count)))
    axes.set_xlabel("bytes sent by each process (log scale)")
    axes.set_ylabel("validation loss (nats a byte)")
    axes.set_title(title)
    axes.grid(which="major", alpha=0.3)
    axes.legend(title="loss at the end")
    figure.savefig(target, format="png")
