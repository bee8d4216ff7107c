# SPDX-License-Identifier: Apache-2.0
"""What `farflung plan` shows: one row for each method, as a table, as JSON, as a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from farflung.base.errors import ConfigError
from farflung.base.words import counted, in_bytes, in_rate, in_seconds
from farflung.config.outer import FEW_ROUNDS
from farflung.cost.methods import Row, rows_for
from farflung.cost.model import Cost, Run, cost_of, needed_bandwidth

if TYPE_CHECKING:
    from rich.table import Table

_POINTS_PER_DECADE = 12


@dataclass(frozen=True)
class Forecast:
    """The costs of the methods in one run."""

    run: Run
    rows: tuple[Row, ...]
    costs: tuple[Cost, ...]  # of the rows, in the same order
    utilization: float  # from which on a method counts as fast enough
    steps: int  # of the whole run
    left_out: tuple[Row, ...]  # methods with which so many steps would be too few rounds

    @classmethod
    def of(cls, settings: Mapping[str, Any], steps: int, bucket_bytes: int | None, utilization: float) -> Forecast:
        """Return the forecast of `steps` steps of `Run(**settings)`; buckets are each method's own by default."""
        run = Run(**settings)
        every_row = rows_for(run, bucket_bytes, steps)
        rows = tuple(row for row in every_row if row.outer is None or steps >= FEW_ROUNDS * row.method.every)
        left_out = tuple(row for row in every_row if row not in rows)
        return cls(run, rows, tuple(cost_of(run, row.method) for row in rows), utilization, steps, left_out)

    def show(self, as_json: bool) -> None:
        """Write the table, the flags and the advice, or one JSON object, to the standard output."""
        if as_json:
            click.echo(json.dumps(self.as_dict(), indent=2))
            return
        from rich.console import Console  # where a help text or a question is all, it isn't needed

        Console().print(self.table())
        width = max(len(row.method.name) for row in self.rows)
        click.echo("\nFlags of `farflung launch`:")
        for row in self.rows:
            script = f", and in the script {row.script}" if row.script else ""
            click.echo(f" {row.method.name:<{width}}  {row.flags or f'none{script}'}")
        if self.left_out:
            names = ", ".join(row.method.name for row in self.left_out)
            steps = counted(self.steps, "step")
            click.echo(f"\nLeft out, as {steps} would be fewer than {FEW_ROUNDS} rounds: {names}.")
        click.echo(f"\n{self.advice()}")
        row = self.best or self.nearest
        flags = f"{row.flags} " if row.flags else ""
        click.echo(f"farflung launch --num_processes {self.run.replicas} {flags}train.py")

    @property
    def best(self) -> Row | None:
        """The first row that is fast enough, None where none is: rows that change training less stand before others."""
        return next((row for row, cost in zip(self.rows, self.costs, strict=True) if self.suffices(cost)), None)

    def suffices(self, cost: Cost) -> bool:
        """Say whether a method is fast enough."""
        return cost.utilization >= self.utilization

    @property
    def nearest(self) -> Row:
        """The row that computes most of the time."""
        return max(zip(self.rows, self.costs, strict=True), key=lambda pair: pair[1].utilization)[0]

    def advice(self) -> str:
        """Say in one line which row to take."""
        if self.best is not None:
            return f"Use {self.best.method.name}: of the methods that are fast enough, it changes training least."
        share = f"{cost_of(self.run, self.nearest.method).utilization:.1%} of the time spent computing"
        return f"No method is fast enough; the closest is {self.nearest.method.name}, with {share}."

    def needed(self, cost: Cost) -> float:
        """Return the bits a second from which the method of `cost` is fast enough; `math.inf` where none are."""
        return needed_bandwidth(self.run, cost.method, self.utilization)

    def as_dict(self) -> dict[str, Any]:
        """Return all that is known, in bytes, bits and seconds; a bandwidth that no line has is None."""
        rows = []
        for row, cost in zip(self.rows, self.costs, strict=True):
            needed = self.needed(cost)
            rows.append(
                {
                    "method": cost.method.name,
                    "flags": row.flags,
                    "script": row.script,
                    "every": cost.method.every,
                    "seconds_per_step": cost.seconds_per_step,
                    "utilization": cost.utilization,
                    "exposed_share": cost.exposed_share,
                    "is_fast_enough": self.suffices(cost),
                    "bandwidth_needed_bps": needed if needed < math.inf else None,
                    "bytes_sent_per_step": cost.bytes_sent_per_step,
                    "bytes_sent_per_round": cost.bytes_sent_per_round,
                    "bytes_received_per_round": cost.bytes_received_per_round,
                    "memory": asdict(cost.memory) | {"total": cost.memory.total},
                }
            )
        best = None if self.best is None else self.best.method.name
        return {
            "run": asdict(self.run),
            "steps": self.steps,
            "utilization": self.utilization,
            "methods": rows,
            "left_out": [row.method.name for row in self.left_out],
            "take": best,
        }

    def table(self) -> Table:
        """Lay out one row for each method, within 80 columns; those that are fast enough have a star."""
        from rich import box
        from rich.table import Table

        run = self.run
        who = f"{counted(run.replicas, 'replica')}, {run.parameters:,} parameters"
        table = Table(
            "method",
            title=f"{who}, {in_seconds(run.step_s)} per step; "
            f"{in_rate(run.bandwidth_bps)}, {in_seconds(run.latency_s)} one way",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for heading in ("sent/step", "step", "computing", "memory", f"for {self.utilization:.2g}"):
            table.add_column(heading, justify="right", no_wrap=True)
        for cost in self.costs:
            enough = self.suffices(cost)
            needed = self.needed(cost)
            table.add_row(
                cost.method.name,
                in_bytes(cost.bytes_sent_per_step),
                in_seconds(cost.seconds_per_step),
                f"{cost.utilization:.1%} {'*' if enough else ' '}",
                in_bytes(cost.memory.total),
                in_rate(needed) if needed < math.inf else "-",
                style="green" if enough else None,
            )
        table.caption = (
            f"* fast enough: at least {self.utilization:.2g} of the time is spent computing. The last column is the "
            "bandwidth needed for that (-: none is enough at this latency). Bytes are per replica; memory is what the "
            "method needs on top of training itself. The effect on the loss is not forecast."
        )
        return table

    def draw(self, target: Path) -> None:
        """Write a picture of each method's utilization over the bandwidth, as PNG (needs matplotlib)."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, PercentFormatter

        figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        rates = self._rates()
        for cost in self.costs:
            shares = [cost_of(replace(self.run, bandwidth_bps=rate), cost.method).utilization for rate in rates]
            axes.plot(rates, shares, label=cost.method.name)
        axes.axvline(self.run.bandwidth_bps, color="grey", linestyle=":")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: in_rate(rate)))
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set_xlabel("bandwidth of each replica's link (log scale)")
        axes.set_ylabel("share of the time spent computing")
        axes.set_title(f"{counted(self.run.replicas, 'replica')}, {self.run.parameters:,} parameters")
        axes.grid(which="major", alpha=0.3)
        axes.legend(fontsize="small")
        try:
            figure.savefig(target, format="png")
        except OSError as error:
            raise ConfigError(f"--picture {target} can't be written to: {error.strerror}.") from error

    def _rates(self) -> list[float]:
        """Bits a second, evenly on a log scale, around what the methods need and what there is."""
        known = [self.run.bandwidth_bps, *map(self.needed, self.costs)]
        finite = [rate for rate in known if 0 < rate < math.inf]
        low, high = math.floor(math.log10(min(finite))) - 1, math.ceil(math.log10(max(finite))) + 1
        return [10 ** (low + step / _POINTS_PER_DECADE) for step in range((high - low) * _POINTS_PER_DECADE + 1)]
