# SPDX-License-Identifier: Apache-2.0
"""The command `farflung plan`: what each way of training together would cost on a network, before it is rented."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from farflung.base.errors import ConfigError
from farflung.base.sizes import FEW_ROUNDS, num_bytes
from farflung.base.words import counted, in_bytes, in_rate, in_seconds
from farflung.config.setting import BOTH_SPELLINGS
from farflung.cost.evidence import PARAMETERS, STEPS
from farflung.cost.meeting import MeetingPlace, Prices
from farflung.cost.methods import Row, Rows, efficiency
from farflung.cost.model import Workload, needed_bandwidth
from farflung.cost.units import parse_count, parse_rate, parse_seconds

if TYPE_CHECKING:
    from rich.table import Table

_EXAMPLE = "farflung plan --parameters 124M --step_seconds 0.5 --bandwidth 1Gbit --steps 20k"


class Forecast:
    """The costs of the methods in one run, best first."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        steps: int,
        bucket_bytes: int | None = None,
        utilization: float = 0.9,
        meeting: MeetingPlace | None = None,
    ) -> None:
        """Forecast `steps` steps of `Workload(**settings)`; buckets are each method's own by default."""
        self.run = Workload(**settings)
        self.meeting = meeting  # where replicas meet, if not with each other
        rows = Rows(self.run, steps, bucket_bytes)
        self.rows = rows.chosen
        self.alone = efficiency("alone", 1, self.run.replicas)
        self.utilization = utilization  # for which the bandwidth is given that a method needs
        self.steps = steps  # of the whole run
        if not rows.chosen:
            raise ConfigError(
                f"{counted(steps, 'step')} are too few for rounds at --meet. Train for more, or without it."
            )
        self.left_out = rows.left_out  # methods with which so many steps would be too few rounds

    def show(self, as_json: bool) -> None:
        """Write the table, the flags and the advice, or one JSON object, to the standard output."""
        if as_json:
            click.echo(json.dumps(self.as_dict(), indent=2))
            return
        from rich.console import Console

        Console().print(self.table())
        if self.meeting is not None:
            Console().print(self.address_table(self.meeting))
        width = max(len(row.method.name) for row in self.rows)
        click.echo("\nFlags of `farflung launch`:")
        for row in self.rows:
            script = f", and in the script {row.script}" if row.script else ""
            click.echo(f" {row.method.name:<{width}}  {row.flags or f'none{script}'}")
        if self.left_out:
            steps = f"{counted(self.steps, 'step')} would be fewer than {FEW_ROUNDS} rounds"
            click.echo(f"\nLeft out, as {steps} of the shortest interval in our tests: {', '.join(self.left_out)}.")
        click.echo(f"\n{self.advice()}")
        row = self.rows[0]
        if row.script:
            click.echo(f"In the script: {row.script}")
        flags = f"{row.flags} " if row.flags else ""
        start = f"--num_processes {self.run.replicas}"
        if self.meeting is not None:
            start = f"--elastic 1:{self.run.replicas} {self.meeting.flag}"
        click.echo(f"farflung launch {start} {flags}train.py")

    def lines(self) -> list[str]:
        """Return a heading and the rows for scripts, with tabs between the cells: in bytes, bits and seconds."""
        rows = [{**row, "memory": row["memory"]["total"]} for row in self.as_dict()["methods"]]
        for row in rows:
            row |= row.pop("meet") or {}
        cells = [["" if cell is None else str(cell) for cell in row.values()] for row in rows]
        return ["\t".join(rows[0]), *map("\t".join, cells)]

    def advice(self) -> str:
        """Say in one line which row to take: the first one."""
        row = self.rows[0]
        said = f"{row.efficiency.said(row.cost.utilization)}, by {_tests(row)}"
        if row.goodput <= self.alone.mean:
            needed = needed_bandwidth(self.run, row.method, self.utilization)
            rate = f"it needs {in_rate(needed)}" if needed < math.inf else "no bandwidth is enough at this latency"
            most = f"a replica that trains alone has {self.alone.mean:.2f}"
            return f"No method gets far on this line: {most}; the closest is {row.method.name}, with {said} ({rate})."
        here, free = in_seconds(self.seconds(row)), in_seconds(self.steps * self.run.step_s)
        return f"Use {row.method.name}: {said}. It gets as far in {here} as DDP would in {free}."

    def seconds(self, row: Row) -> float:
        """Return how long a row takes to the loss at which DDP ends after all steps."""
        return self.steps * self.run.step_s / row.goodput

    def as_dict(self) -> dict[str, Any]:
        """Return all that is known, in bytes, bits and seconds; a bandwidth that no line has is None."""
        rows = []
        for row in self.rows:
            cost, needed = row.cost, needed_bandwidth(self.run, row.method, self.utilization)
            rows.append(
                {
                    "method": cost.method.name,
                    "flags": row.flags,
                    "script": row.script,
                    "every": cost.method.every,
                    "bits": cost.method.bits,
                    "goodput": row.goodput,
                    "seconds_to_loss_of_ddp": self.seconds(row),
                    "efficiency": row.efficiency.mean,
                    "efficiency_error": row.efficiency.error,
                    "efficiency_is_extrapolated": row.efficiency.is_extrapolated,
                    "efficiency_parameters": PARAMETERS,
                    "efficiency_replicas": row.efficiency.replicas,
                    "seconds_per_step": cost.seconds_per_step,
                    "utilization": cost.utilization,
                    "exposed_share": 1 - cost.utilization,
                    "bandwidth_needed_bps": needed if needed < math.inf else None,
                    "bytes_sent_per_step": cost.bytes_sent_per_step,
                    "bytes_sent_per_round": cost.bytes_sent_per_round,
                    "bytes_received_per_round": cost.bytes_received_per_round,
                    "memory": asdict(cost.memory) | {"total": cost.memory.total},
                    "meet": self.meeting and asdict(self.meeting.traffic(self.run, cost, self.steps)),
                }
            )
        best = self.rows[0].method.name if self.rows[0].goodput > self.alone.mean else None
        return {
            "run": asdict(self.run),
            "steps": self.steps,
            "utilization": self.utilization,
            "methods": rows,
            "left_out": list(self.left_out),
            "take": best,
        }

    def table(self) -> Table:
        """Lay out one row for each method, within 80 columns."""
        run = self.run
        who = f"{counted(run.replicas, 'replica')}, {run.parameters:,} parameters"
        wait = (
            f"{in_seconds(run.latency_s)} one way" if run.is_direct else f"{in_seconds(run.request_s or 0)} a request"
        )
        title = f"{who}, {in_seconds(run.step_s)} per step; {in_rate(run.bandwidth_bps)}, {wait}"
        table = _table(title, "bits", "goodput", "sent/step", "step", "computing", "memory")
        for row in self.rows:
            cost, found = row.cost, row.efficiency
            table.add_row(
                cost.method.name,
                f"{cost.method.bits:.3g}",
                f"{'~' * found.is_extrapolated}{row.goodput:.2f}±{found.error * cost.utilization:.2f}",
                in_bytes(cost.bytes_sent_per_step),
                in_seconds(cost.seconds_per_step),
                f"{cost.utilization:.1%}",
                in_bytes(cost.memory.total),
                style="green" if row.goodput > self.alone.mean else None,
            )
        table.caption = (
            "Goodput: how far it gets in a time, next to DDP on a free line: the share of the time spent computing, "
            "times how many of DDP's steps end at the same loss, for each of its steps; a replica alone has "
            f"{self.alone.mean:.2f} ± {self.alone.error:.2f}. By {_tests(*self.rows)}; yours will differ. The number "
            "of steps between rounds, in brackets, is chosen for this line. Bytes are per replica; memory is what the "
            "method needs on top of training itself."
        )
        if any(row.efficiency.is_extrapolated for row in self.rows):
            table.caption += " ~: extrapolated, from shorter rounds or other numbers of replicas."
        if run.parameters > _FAR_LARGER:
            table.caption += (
                " Far larger models may lose less: a paper (arXiv:2501.18512) reports data parallelism's loss at 1B."
            )
        return table

    def address_table(self, meeting: MeetingPlace) -> Table:
        """Lay out what each method asks of the address where replicas meet."""
        table = _table(f"at {meeting.address}", "writes", "reads", "written", "read", "state", "stored", "USD")
        for cost in (row.cost for row in self.rows):
            one = meeting.traffic(self.run, cost, self.steps)
            amounts = (one.bytes_written_per_round, one.bytes_read_per_round, one.state_bytes, one.bytes_stored)
            usd = "" if one.usd is None else f"{one.usd:,.2f}"
            writes = f"{one.writes_per_round + one.records_per_round + one.lists_per_round:,.4g}"
            table.add_row(cost.method.name, writes, f"{one.reads_per_round:,.4g}", *map(in_bytes, amounts), usd)
        table.caption = (
            "Writes (with listings), reads and bytes are those of a replica in a round. The first one also writes the "
            "state every few rounds. Stored is what all have there at most, and USD is for all of them in "
            f"{counted(self.steps, 'step')}, if --prices are given. Looks for values of slower replicas come on top."
        )
        return table


def _table(title: str, *headings: str) -> Table:
    from rich import box  # if a help text or a question is all, it isn't needed
    from rich.table import Table

    table = Table("method", title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right")
    for column in table.columns:
        column.no_wrap = True
    return table


def _tests(*rows: Row) -> str:
    tests = dict.fromkeys(row.efficiency.tests for row in rows)
    return f"our tests of {' and '.join(tests)} ({STEPS:,} steps, three seeds)"


_FAR_LARGER = 10_000_000  # parameters
_FROM_ONE = click.IntRange(1, 1_000_000)


class _NamesAllMissing(click.Command):
    """Names all missing options at once; click would name the first alone."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, list(args))
        except click.MissingParameter:
            given, _, _ = self.make_parser(ctx).parse_args(list(args))
            there = given.keys() | (ctx.default_map or {}).keys()
            needed = [param for param in self.params if param.required and param.name not in there]
            names = ", ".join(one.opts[0] for one in needed)
            raise click.UsageError(f"Missing {names}. For example: {_EXAMPLE}", ctx) from None


@click.command(cls=_NamesAllMissing, context_settings=BOTH_SPELLINGS | {"show_default": True})
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
@click.option(
    "--buffers", metavar="SIZE", help="Size of the model's buffers, which DDP broadcasts in each step: 50MB. [0]"
)
@click.option(
    "--meet", metavar="FORM", help="Replicas meet at an address (`launch --meet`): folder, s3, gs, az, or the address."
)
@click.option("--request", metavar="TIME", help="With --meet: duration of a request. [50ms; folder: 5ms]")
@click.option(
    "--prices",
    nargs=4,
    type=float,
    metavar="WRITES READS MOVED STORED",
    help="With --meet, in USD: for 1,000 writes, 1,000 reads, a GB that is read, and a GB stored for a month.",
)
@click.option(
    "--utilization", default=0.9, help="Share of the time spent computing, for the bandwidth that --json gives."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table, in bytes, bits and seconds.")
@click.option("--table", "as_lines", is_flag=True, help="Print a heading and the rows alone, with tabs, for scripts.")
def plan(
    parameters: str,
    step_seconds: str,
    bandwidth: str,
    steps: str,
    latency: str,
    replicas: int,
    layers: int,
    bucket: str | None,
    buffers: str | None,
    meet: str | None,
    request: str | None,
    prices: tuple[float, float, float, float] | None,
    utilization: float,
    as_json: bool,
    as_lines: bool,
) -> None:
    """Forecast what DDP, Local SGD and DiLoCo cost on a network: bytes, seconds, memory, and how far each gets."""
    if as_json and as_lines:
        raise ConfigError("--json and --table exclude each other: give one of them.")
    if not (0 < utilization < 1):
        raise ConfigError(f"--utilization is {utilization}; it must be between 0 and 1 (exclusive), such as 0.9.")
    settings = {
        "parameters": parse_count(parameters, "--parameters"),
        "layers": layers,
        "step_s": parse_seconds(step_seconds, "--step_seconds", bare=True),
        "replicas": replicas,
        "bandwidth_bps": parse_rate(bandwidth, "--bandwidth"),
        "latency_s": parse_seconds(latency, "--latency"),
        "buffer_bytes": 0 if buffers is None else num_bytes(buffers, "--buffers"),
    }
    for name, value, instead in (("latency", latency, "give --request"), ("buffers", buffers, "leave it out")):
        is_given = click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE
        if meet is not None and is_given:  # a latency of `--from` is of the line that the run had
            raise ConfigError(f"--{name} is {value}, which has no effect with --meet {meet}: {instead}.")
    if meet is None and (request is not None or prices is not None):
        raise ConfigError("--request and --prices are of an address where replicas meet: give --meet too.")
    meeting = None if meet is None else MeetingPlace(meet, None if prices is None else Prices(*prices))
    if meeting is not None:
        settings["lists_at_once"] = meeting.lists_at_once
        settings["request_s"] = meeting.request_s if request is None else parse_seconds(request, "--request")
    bucket_bytes = None if bucket is None else num_bytes(bucket, "--bucket")
    forecast = Forecast(settings, parse_count(steps, "--steps"), bucket_bytes, utilization, meeting)
    if as_lines:
        click.echo("\n".join(forecast.lines()))
    else:
        forecast.show(as_json)
