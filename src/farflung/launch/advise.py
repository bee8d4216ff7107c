# SPDX-License-Identifier: Apache-2.0
"""What `farflung config` asks about the outer loop: from the speed of a line to a recipe, by the cost model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from farflung.base.errors import ConfigError
from farflung.config.grid import HOST
from farflung.config.setting import Value
from farflung.cost.forecast import Forecast
from farflung.cost.units import parse_count, parse_rate, parse_seconds

_LAYERS = 24
_UTILIZATION = 0.9  # of the time spent computing is fast enough


def ask_outer(answers: Mapping[str, Value]) -> dict[str, Value]:
    """Ask whether replicas shall agree only now and then, and over which line; return the settings of what is advised.

    `answers` are those to the questions before. One replica is asked nothing; plain data parallelism needs no settings.
    """
    machines = int(answers["num_machines"] or 1)
    count = answers["num_processes"] or (machines if answers["use_cpu"] else max(2, machines))
    shards = 1
    if answers["use_fsdp"]:  # the rows of the grid are the replicas; each rank sends its shards alone
        count = answers["parallelism_config_dp_replicate_size"] or 1
        shards = int(answers["parallelism_config_dp_shard_size"] or 1)
    if int(count) == 1:
        return {}
    if not click.confirm("Is the network so slow that they should synchronize less often than in every step?"):
        return {}
    islands: dict[str, Value] = {}
    if 1 < machines < int(count) and not answers["use_fsdp"]:
        question = (
            "Shall the processes of one machine average gradients in every step, so that each machine is one replica?"
        )
        if click.confirm(question):
            count, islands = machines, {"island_size": HOST}
    found = found_rate() if machines > 1 else None
    rate = _number("What is the bandwidth of each process's network link, such as 1Gbit?", parse_rate, found)
    latency = _number("What is the one-way latency (half of a ping's round trip)?", parse_seconds, "1ms")
    parameters = _number("How many trainable parameters does the model have, such as 124M?", parse_count)
    step = _number("How long does one optimizer step take without communication, such as 500ms?", parse_seconds)
    steps = _number("How many optimizer steps does the whole run have, such as 20k?", parse_count)
    run = {"parameters": parameters // shards, "layers": _LAYERS, "step_s": step, "replicas": int(count)}
    forecast = Forecast.of({**run, "bandwidth_bps": rate, "latency_s": latency}, steps, None, _UTILIZATION)
    row = forecast.best or forecast.nearest
    click.echo(forecast.advice())
    if row.outer is None:
        return {}
    options = {f"outer_{name}": value for name, value in row.outer.given().items() if name != "steps"}
    return {"outer_recipe": row.outer.recipe, **options, **islands}


def _number(question: str, parse: Callable[[str, str], Any], default: str | None = None) -> Any:
    def read(text: str) -> Any:
        try:
            return parse(text, "The answer")
        except ConfigError as error:
            raise click.UsageError(str(error)) from None

    return click.prompt(question, default=default, value_proc=read)


def found_rate(root: Path = Path("/")) -> str | None:
    """Return how fast the network interface is that leads out of this machine: `1000Mbit`; None: it isn't known."""
    try:
        routes = [line.split() for line in (root / "proc/net/route").read_text().splitlines()[1:]]
        name = next(route[0] for route in routes if route[1] == "00000000")
        megabits = int((root / "sys/class/net" / name / "speed").read_text())
    except (OSError, ValueError, LookupError, StopIteration):
        return None
    return f"{megabits}Mbit" if megabits > 0 else None
