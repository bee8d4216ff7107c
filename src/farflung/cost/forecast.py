# SPDX-License-Identifier: Apache-2.0
"""The command `farflung plan`: what each way of training together would cost on a network, before it is rented."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from farflung.base.errors import ConfigError
from farflung.base.optional import is_available
from farflung.base.sizes import num_bytes
from farflung.base.words import counted, in_bytes, in_rate, in_seconds
from farflung.config.outer import FEW_ROUNDS
from farflung.config.setting import BOTH_SPELLINGS
from farflung.cost.methods import Row, rows_for
from farflung.cost.model import Cost, Run, cost_of, needed_bandwidth
from farflung.cost.units import parse_count, parse_rate, parse_seconds

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
        return cost.utilization >= self.utilization

    @property
    def nearest(self) -> Row:
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
                    "exposed_share": 1 - cost.utilization,
                    "is_fast_enough": self.suffices(cost),
                    "bandwidth_needed_bps": needed if needed < math.inf else None,
                    "bytes_sent_per_step": cost.bytes_sent_per_step,
                    "bytes_sent_per_round": cost.bytes_sent_per_round,
                    "bytes_received_per_round": cost.bytes_sent_per_round,
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


_FROM_ONE = click.IntRange(1, 1_000_000)


@click.command(context_settings=BOTH_SPELLINGS | {"show_default": True})
@click.option("--parameters", required=True, metavar="COUNT", help="Number of trainable parameters: 366k, 124M, 1.1B.")
@click.option(
    "--step_seconds", required=True, metavar="TIME", help="Duration of one optimizer step without communication: 0.5."
)
@click.option(
    "--bandwidth", required=True, metavar="RATE", help="Bandwidth of each replica's link: 100Mbit, 1Gbit/s, 12.5MB/s."
)
@click.option("--steps", required=True, metavar="COUNT", help="Number of optimizer steps of the whole run: 500, 20k.")
@click.option("--latency", default="0ms", metavar="TIME", help="One-way latency, half of a ping's round trip: 25ms.")
@click.option("--replicas", default=2, type=_FROM_ONE, help="Number of replicas.")
@click.option("--layers", default=24, type=_FROM_ONE, help="Number of the model's layers.")
@click.option("--bucket", metavar="SIZE", help="Bucket size, counted in fp32: 64MiB. [each method's own default]")
@click.option("--utilization", default=0.9, help="Share of the time spent computing that counts as fast enough.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table, in bytes, bits and seconds.")
@click.option("--picture", metavar="FILE", help="Plot utilization against bandwidth to this PNG file.")
def plan(
    parameters: str,
    step_seconds: str,
    bandwidth: str,
    steps: str,
    latency: str,
    replicas: int,
    layers: int,
    bucket: str | None,
    utilization: float,
    as_json: bool,
    picture: str | None,
) -> None:
    """Forecast what DDP, Local SGD and DiLoCo cost on a network: bytes, seconds, memory, and which is fast enough."""
    if picture is not None and not is_available("matplotlib"):
        raise ConfigError("--picture needs matplotlib. Install it with `pip install 'farflung[plot]'`.")
    if not (0 < utilization < 1):
        raise ConfigError(f"--utilization is {utilization}; it must be between 0 and 1 (exclusive), such as 0.9.")
    settings = {
        "parameters": parse_count(parameters, "--parameters"),
        "layers": layers,
        "step_s": parse_seconds(step_seconds, "--step_seconds", bare=True),
        "replicas": replicas,
        "bandwidth_bps": parse_rate(bandwidth, "--bandwidth"),
        "latency_s": parse_seconds(latency, "--latency"),
    }
    bucket_bytes = None if bucket is None else num_bytes(bucket, "--bucket")
    forecast = Forecast.of(settings, parse_count(steps, "--steps"), bucket_bytes, utilization)
    forecast.show(as_json)
    if picture is not None:
        forecast.draw(Path(picture))
        click.echo(f"picture: {picture}", err=as_json)
