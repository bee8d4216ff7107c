# SPDX-License-Identifier: Apache-2.0
"""What the demo says at the end: a table of the ways, a sentence each on how they compare with DDP, and a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from farflung.base.words import in_bytes, in_seconds
from farflung.demo.settings import ALONE, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "os^DPv"
# Okabe and Ito's: told apart with any eyesight.
COLOURS = ("#0072B2", "#D55E00", "#CC79A7", "#009E73", "#56B4E9", "#555555")


def table_of(results: Sequence[Result], rate: str) -> Table:
    """Lay out one row for each way, within 80 columns; `rate` is that of the slow line."""
    table = Table("way", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("loss", "gain kept", "bytes sent", "time here", f"time on {rate}"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        sent, here, there = in_bytes(result.bytes_sent), in_seconds(result.seconds), in_seconds(result.line_seconds)
        table.add_row(result.way, f"{result.loss:.3f}", gain_kept(result, results), sent, here, there)
    table.caption = (
        "Validation loss in nats a byte; gain kept is the share of DDP's gain over one replica alone; bytes of each "
        f"process. The time on a line of {rate} is computed, not "
        "measured: it is the CPU time here, and what the bytes sent take on that line beyond the computing done "
        "on meanwhile (by the model of `farflung plan`)."
    )
    return table


def gain_kept(result: Result, results: Sequence[Result]) -> str:
    """Return the share of the first way's gain over one replica alone that a way keeps; a dash if there is none."""
    alone = next((one.loss for one in results if one.way == ALONE), -math.inf)
    if alone <= results[0].loss:
        return "-"
    return f"{(alone - result.loss) / (alone - results[0].loss):.0%}".replace("%", " %")


def verdicts(results: Sequence[Result], rate: str) -> list[str]:
    """Say of each way but the first how soon, and with how many bytes, it and the first reach the same loss.

    Notes on the ways come last.
    """
    base, *others = results
    width = max(len(other.way) for other in others)
    return [
        f"Compared with {base.way} at equal loss, on a line of {rate}:",
        *(f"  {other.way:{width}}  {_verdict(other, base)}" for other in others),
        f"{base.way} ends at {base.loss:.3f}, after {in_seconds(base.line_seconds)}.",
        *(f"{other.way}: {other.note}" for other in others if other.note),
    ]


def _verdict(way: Result, base: Result) -> str:
    """Compare two ways at the loss at which the worse of them ends."""
    loss = max(way.loss, base.loss)
    sent, seconds = way.reaches(loss)
    base_sent, base_seconds = base.reaches(loss)
    goes_on = f"; then continues to {way.loss:.3f}" if way.loss < base.loss else ""
    return (
        f"reaches {loss:.3f} in {in_seconds(seconds)} with {in_bytes(sent)}{goes_on}; {base.way} needs "
        f"{in_seconds(base_seconds)} and {in_bytes(base_sent)}, {_times(base_seconds / seconds)}"
    )


def _times(ratio: float) -> str:
    """Write a ratio of two times in words."""
    number = max(ratio, 1 / ratio)
    written = f"{number:.0f}" if number >= 9.95 else f"{number:.1f}"
    return f"{written} times as long" if ratio >= 1 else f"{written} times less"


def later(results: Sequence[Result]) -> list[Result]:
    """Return results whose curves begin where they differ; their first losses are alike, and would fill a picture.

    That is three times as far above the worst end as the best one is below it.
    """
    ends = [result.loss for result in results]
    top = 4 * max(ends) - 3 * min(ends)
    curves = [[point for point in one.curve if point.loss <= top] or one.curve for one in results]
    return [replace(one, curve=curve) for one, curve in zip(results, curves, strict=True)]


def draw(results: Sequence[Result], target: Path, title: str, rate: str) -> None:
    """Write a picture of the loss against time on a line of `rate`, and against bytes, as PNG; it needs matplotlib."""
    from matplotlib.figure import Figure

    results = later(results)
    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
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
        if not xs[-1]:  # which a logarithm can't show
            axes.axhline(
                losses[-1], color=colour, linestyle="--", label=f"{result.way}: {losses[-1]:.3f}, sends nothing"
            )
            continue
        axes.plot(xs, losses, marker=marker, markersize=5, color=colour, label=label, alpha=0.85)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda amount, _: write(amount))
    axes.grid(which="major", alpha=0.3)
    axes.legend(title="loss at the end", fontsize="small", loc="lower left")


def shown(result: Result, rate: str) -> dict[str, Any]:
    """Return what the page about the ways shows of one: its curve on the slow line."""
    points, loss = result.curve, "validation loss"
    curve = {
        "seconds": result.curve_seconds,
        "step": [point.step for point in points],
        "bytes": [point.bytes_sent for point in points],
        "values": [point.loss for point in points],
    }
    cost = f"{in_seconds(result.line_seconds)} at {rate}, {in_bytes(result.bytes_sent)} sent by each"
    nothing: dict[str, Any] = {"facts": {}, "rounds": {}, "grid": {}, "events": []}
    summary = "; ".join(filter(None, [f"loss {result.loss:.3f}", cost, result.note]))
    named = {"name": result.way, "state": "finished", "summary": summary}
    return named | {"curves": {loss: curve}, "loss": loss} | nothing
