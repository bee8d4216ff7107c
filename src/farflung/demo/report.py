# SPDX-License-Identifier: Apache-2.0
"""What the demo says at the end: a table of the ways, and in a sentence each how they compare with DDP."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.table import Table

from farflung.cost.units import in_bytes, in_seconds
from farflung.demo.settings import Result

SAME_LOSS = 0.05  # two losses are called the same if they differ by no more; `benchmarks/bench_slow_network.py` does so


def table_of(results: Sequence[Result], rate: str) -> Table:
    """Lay out one row for each way, within 80 columns.

    Args:
        rate: of the slow line, as text.
    """
    table = Table("way", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("loss", "bytes sent", "time here", f"time on {rate}"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        sent, here, there = in_bytes(result.bytes_sent), in_seconds(result.seconds), in_seconds(result.line_seconds)
        table.add_row(result.way, f"{result.loss:.3f}", sent, here, there)
    table.caption = (
        f"Validation loss in nats a byte; bytes of each process. The time on a line of {rate} is computed, not "
        "measured: it is the CPU time here, and what the bytes sent take on that line beyond the computing that goes "
        "on meanwhile (by the model of `farflung plan`)."
    )
    return table


def verdicts(results: Sequence[Result], rate: str) -> list[str]:
    """Say of each way but the first how it compares with the first."""
    base, *others = results
    width = max(len(other.way) for other in others)
    return [
        f"Compared with {base.way}, on a line of {rate}:",
        *(
            f"  {other.way:{width}}  {_loss(other.loss / base.loss)}, "
            f"{_times(base.bytes_sent / other.bytes_sent, 'fewer', 'more')} bytes, "
            f"{_times(base.line_seconds / other.line_seconds, 'sooner', 'later')}"
            for other in others
        ),
    ]


def _loss(ratio: float) -> str:
    percent = math.ceil(abs(ratio - 1) * 100)
    if abs(ratio - 1) <= SAME_LOSS:
        return f"same loss within {percent} %"
    return f"loss {percent} % {'higher' if ratio > 1 else 'lower'}"


def _times(ratio: float, better: str, worse: str) -> str:
    """Write how many times less the second of two numbers is, or more, from their ratio."""
    number = max(ratio, 1 / ratio)
    written = f"{number:.0f}" if number >= 9.95 else f"{number:.1f}"
    return f"{written} times {better if ratio >= 1 else worse}"
