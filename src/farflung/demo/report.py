# SPDX-License-Identifier: Apache-2.0
"""What the demo says at the end: a table of the three ways."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from farflung.base.words import counted
from farflung.cost.units import in_bytes
from farflung.demo.settings import Result


def table_of(results: Sequence[Result], steps: int) -> Table:
    """Lay out one row for each way that took `steps` steps."""
    table = Table("way", title=f"{counted(steps, 'step')} on the same data, from the same weights")
    for heading in ("validation loss", "tokens/s", "sent per step", "time waited"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            result.way,
            f"{result.loss:.3f}",
            f"{result.tokens / result.seconds:,.0f}",
            in_bytes(result.bytes_sent / steps),
            f"{result.waited_s:.2f} s ({result.waited_s / result.seconds:.1%})",
        )
    table.caption = "loss in nats a byte; each process sends; it waits for the others and the network"
    return table
