# SPDX-License-Identifier: Apache-2.0
"""The command `farflung demo`: three ways to train one small GPT on real text, and what each of them costs."""

from __future__ import annotations

import importlib
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from farflung.base.errors import ConfigError
from farflung.base.words import counted
from farflung.config.launch import LaunchSettings
from farflung.cost.units import in_bytes
from farflung.demo.report import table_of
from farflung.demo.settings import MODEL_FILE, PICTURE_FILE, SIZES, DemoSettings, Result, load_results
from farflung.demo.text import Text, check_length, load_text
from farflung.launch.plan import fit_for_cores, make_plan
from farflung.launch.run import start

DEFAULT_OUTPUT = "farflung-demo"
PROMPT = "def main("


def _late(module: str) -> Any:
    """Load a module of this room that needs torch or matplotlib; the command itself starts without them."""
    return importlib.import_module(f"farflung.demo.{module}")


@click.command()
@click.option(
    "--steps", default=480, show_default=True, type=click.IntRange(min=1), help="Optimizer steps of each run."
)
@click.option("--processes", default=2, show_default=True, type=click.IntRange(min=2), help="Number of processes.")
@click.option("--size", default="small", show_default=True, type=click.Choice(list(SIZES)), help="Size of the model.")
@click.option("--data", metavar="FOLDER", help="Folder of text to train on.  [default: the standard library's sources]")
@click.option("--output", default=DEFAULT_OUTPUT, show_default=True, metavar="FOLDER", help="Folder for results.")
@click.option("--every", default=16, show_default=True, type=click.IntRange(min=1), help="Sync interval H, in steps.")
@click.option(
    "--batch", default=8, show_default=True, type=click.IntRange(min=1), help="Sequences per step, per process."
)
@click.option("--seed", default=0, show_default=True, help="Seed of weights, data order and generated text.")
@click.option("--generate", metavar="TEXT", help="Don't train; let the saved model continue TEXT.")
@click.option(
    "--length", default=400, show_default=True, type=click.IntRange(min=1), help="Number of bytes to generate."
)
def demo(generate: str | None, length: int, output: str, seed: int, **knobs: Any) -> None:
    """Train a small GPT on text in three ways, DDP, Local SGD and DiLoCo, and compare them.

    All three start from the same weights and see the same data in the same order. The output folder receives the
    results, a picture of the loss against the bytes sent, and the best model.
    """
    if generate is not None:
        click.echo(_late("generate").continued(Path(output), generate, length, seed))
    else:
        run(DemoSettings(output=output, seed=seed, **knobs))


def run(settings: DemoSettings) -> None:
    """Train in processes of their own, then show what came of it.

    Raises:
        ConfigError: the text is missing or too short, or the output folder can't be written to.
        SystemExit: the training failed; the launcher has said why, and this is its exit code.
    """
    fit_for_cores(settings.processes, "--processes")
    text = load_text(settings.data)
    check_length(text, context=settings.shape.context, sequences=settings.batch * settings.processes)
    _introduce(settings, text)
    try:
        settings_file = settings.save()
    except OSError as error:
        raise ConfigError(f"--output {settings.output} can't be written to: {error.strerror}.") from error
    launch = LaunchSettings(use_cpu=True, num_processes=settings.processes, module=True)
    code = start(launch, make_plan(launch, "farflung.demo.train", [str(settings_file)]))
    if code != 0:
        sys.exit(code)
    _conclude(settings, load_results(settings))


def _introduce(settings: DemoSettings, text: Text) -> None:
    source = "the standard library's sources" if settings.data is None else settings.data
    size = in_bytes(len(text.train))
    processes = counted(settings.processes, "process")
    click.echo(f"{processes}, {counted(settings.steps, 'step')} of each way, on {size} of {source}")
    if text.left_out:
        named = ", ".join(text.left_out[:5]) + (" ..." if len(text.left_out) > 5 else "")
        click.echo(f"{counted(len(text.left_out), 'file')} without UTF-8 text left out: {named}")


def _conclude(settings: DemoSettings, results: Sequence[Result]) -> None:
    click.echo()
    Console().print(table_of(results, settings.steps))
    picture = settings.path(PICTURE_FILE)
    if importlib.util.find_spec("matplotlib") is None:
        click.echo("No picture: matplotlib is not installed. Get it with `pip install 'farflung[plot]'`.")
    else:
        processes = counted(settings.processes, "process")
        title = f"What {processes} sent to learn the same text ({counted(settings.steps, 'step')})"
        _late("picture").draw(results, picture, title)
        click.echo(f"picture: {picture}")
    best = min(results, key=lambda result: result.loss)
    click.echo(f"model:   {settings.path(MODEL_FILE)}, trained by {best.way}; let it write:")
    folder = [] if settings.output == DEFAULT_OUTPUT else ["--output", settings.output]
    click.echo(shlex.join(["farflung", "demo", "--generate", PROMPT, *folder]))
