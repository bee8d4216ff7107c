# SPDX-License-Identifier: Apache-2.0
"""The commands `farflung config`, which asks for settings, writes the defaults, or shows those in effect and their
origins, and `farflung env`, which shows what to put into a bug report.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import click

from farflung.base.checks import check_path
from farflung.base.errors import ConfigError, FarflungError
from farflung.base.optional import installed_version
from farflung.config.files import write_file
from farflung.config.grid import HOST
from farflung.config.launch import FIELDS, LaunchSettings, field_named
from farflung.config.places import find_file, own_file
from farflung.config.resolve import Resolved, resolve
from farflung.config.setting import BOTH_SPELLINGS, Field, Value
from farflung.cost.forecast import Forecast
from farflung.cost.units import parse_count, parse_rate, parse_seconds
from farflung.launch.main import CommandGroup
from farflung.launch.options import SettingsCommand, given, launch_options
from farflung.launch.plan import count_gpus, usable_cores

_PACKAGES = ("farflung", "torch", "numpy", "safetensors", "accelerate", "transformers")
_LAYERS = 24


@click.group(cls=CommandGroup, invoke_without_command=True, context_settings=BOTH_SPELLINGS)
@click.option("--config_file", metavar="FILE", help="File to write. [~/.config/farflung/config.yaml]")
@click.pass_context
def config(ctx: click.Context, config_file: str | None) -> None:
    """Ask for the settings of `farflung launch` and save them in a file."""
    if ctx.invoked_subcommand is not None:
        if config_file is not None:
            raise click.UsageError(f"--config_file must come after `{ctx.invoked_subcommand}`.")
        return
    path = check_path("--config_file", config_file or own_file())
    if os.path.exists(path):
        click.confirm(f"{path} exists. Replace it?", abort=True)
    write_file(path, ask())
    click.echo(f"Written to {path}.")
    _say_if_hidden(path)


def ask() -> dict[str, Value]:
    """Ask for the settings and return the answers by name. A question is repeated until its answer is valid."""
    known: dict[str, Value] = {entry.name: entry.default for entry in FIELDS}
    asked: dict[str, Value] = {}
    for entry in FIELDS:
        if entry.question is not None and entry.asked_when(known):
            asked[entry.name] = known[entry.name] = _answer(entry, known)
    grid = _ask_grid(known)
    return asked | grid | ask_outer(known | grid)


def _ask_grid(answers: dict[str, Value]) -> dict[str, Value]:
    """Ask how many processes share one copy of a sharded model, and return the grid that follows; nothing for all."""
    count = int(answers["num_processes"] or 1)
    sizes = [size for size in range(2, count) if count % size == 0]
    if not answers["use_fsdp"] or not sizes:
        return {}

    def read(text: str) -> int:
        if text and text not in map(str, sizes):
            raise ConfigError(f"The answer is {text!r}; use one of {', '.join(map(str, sizes))}, or leave it empty.")
        return int(text or count)

    question = f"How many processes share one copy of the model (empty: all {count})?"
    size: int = _prompt(question, read, "")
    if size == count:
        return {}
    sides = {"replicate": count // size, "shard": size}
    return {"use_parallelism_config": True} | {f"parallelism_config_dp_{name}_size": n for name, n in sides.items()}


def _answer(entry: Field, known: dict[str, Value]) -> Value:
    assert entry.question is not None
    question = entry.question if isinstance(entry.question, str) else entry.question(known)
    if entry.kind is bool:
        return click.confirm(question, default=bool(entry.default)) or entry.default

    def read(text: str) -> Value:
        value = entry.parse(text, entry.name) if text else entry.default
        # The address of machine 0 may be asked for later; any word stands in for it in this check.
        LaunchSettings.of({**known, "main_process_ip": "later", entry.name: value})
        return value

    choices = f" ({', '.join(entry.choices)})" if entry.choices else ""
    default = "" if entry.default is None else entry.text(entry.default)
    value: Value = _prompt(question + choices, read, default)
    return value


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
    rate = _number("What is the bandwidth of each process's network link, such as 1Gbit?", parse_rate)
    latency = _number("What is the one-way latency (half of a ping's round trip)?", parse_seconds, "1ms")
    parameters = _number("How many trainable parameters does the model have, such as 124M?", parse_count)
    step = _number("How long does one optimizer step take without communication, such as 500ms?", parse_seconds)
    steps = _number("How many optimizer steps does the whole run have, such as 20k?", parse_count)
    run = {"parameters": parameters // shards, "layers": _LAYERS, "step_s": step, "replicas": int(count)}
    forecast = Forecast({**run, "bandwidth_bps": rate, "latency_s": latency}, steps)
    row = forecast.rows[0]
    click.echo(forecast.advice())
    if row.outer is None:
        return {}
    options = {f"outer_{name}": value for name, value in row.outer.given().items() if name != "steps"}
    return {"outer_recipe": row.outer.recipe, **options, **islands}


def _number(question: str, parse: Callable[[str, str], Any], default: str | None = None) -> Any:
    return _prompt(question, lambda text: parse(text, "The answer"), default)


def _prompt(question: str, read: Callable[[str], Any], default: str | None) -> Any:
    """Ask until `read` takes the answer."""

    def answer(text: str) -> Any:
        try:
            return read(text)
        except FarflungError as error:
            raise click.UsageError(str(error)) from None

    return click.prompt(question, default=default, show_default=default != "", value_proc=answer)


def _say_if_hidden(path: Path) -> None:
    """Say how to use a file that another one takes precedence over."""
    counts = find_file()
    if counts is None or counts.resolve() != path.resolve():
        click.echo(f"Use it with `farflung launch --config_file {path}`.")


@config.command("default", context_settings=BOTH_SPELLINGS)
@click.option("--config_file", metavar="FILE", help="File to write. [~/.config/farflung/config.yaml]")
@click.option("--mixed_precision", default="no", metavar="no|fp16|bf16|fp8", help="Mixed precision. [no]")
def default(config_file: str | None, mixed_precision: str) -> None:
    """Write a file with the default settings, unless there is one."""
    path = write_basic_config(mixed_precision, config_file)
    if path:
        click.echo(f"Written to {path}.")
        _say_if_hidden(path)


def write_basic_config(mixed_precision: str = "no", save_location: str | Path | None = None) -> Path | Literal[False]:
    """Write a file with the default settings: one process per accelerator of the machine that reads it.

    Args:
        mixed_precision: `no`, `fp16`, `bf16` or `fp8`.
        save_location: the file; by default `~/.config/farflung/config.yaml`.

    Returns:
        the file's path, or False if the file exists, which is not changed.
    """
    path = check_path("save_location", save_location or own_file())
    if path.is_file():
        click.echo(f"{path} exists and was not changed. `farflung config` asks whether to replace it.")
        return False
    precision = field_named("mixed_precision").parse(mixed_precision, "mixed_precision")
    return write_file(path, {"mixed_precision": precision})


def _show(origin: bool, **params: Any) -> None:
    click.echo("\n".join(describe(resolve(given(params)), origin)))


def describe(resolved: Resolved, origin: bool) -> list[str]:
    """Return one line for each setting that has a value: its name, the value and, with `origin`, where it is from."""
    rows = [(f"{name}: {value}", where) for name, value, where in resolved.rows(everything=True)]
    return [f"{line:<40} # {where}" if origin else line for line, where in rows]


config.add_command(
    SettingsCommand(
        "show",
        params=[
            *launch_options(),
            click.Option(["--origin"], is_flag=True, help="Also show where each value comes from."),
        ],
        callback=_show,
        help="Show the settings in effect, given these flags, the environment and the files.",
    )
)


@click.command()
@click.option("--config_file", "--config-file", metavar="FILE", help="Show the settings in this file.")
def env(config_file: str | None) -> None:
    """Show versions, devices and the settings in use."""
    facts = {"platform": platform.platform(), "python": platform.python_version()}
    facts |= {package: installed_version(package) or "not installed" for package in _PACKAGES}
    facts |= {"cores": str(usable_cores()), "gpus": str(count_gpus())}
    for name, fact in facts.items():
        click.echo(f"{name}: {fact}")
    resolved = resolve({} if config_file is None else {"config_file": config_file})  # last, as it may be what is wrong
    click.echo(f"settings: {resolved.file or 'defaults'}")
    for line in describe(resolved, origin=True):
        click.echo(f"  {line}")
