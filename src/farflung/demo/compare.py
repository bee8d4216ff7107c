# SPDX-License-Identifier: Apache-2.0
"""What `farflung demo` does: it trains in processes of their own, and shows what came of it."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Sequence

import click
from rich.console import Console

from farflung.base.errors import ConfigError
from farflung.base.files import atomic_file
from farflung.base.words import counted, in_bytes, in_rate
from farflung.config.launch import LaunchSettings
from farflung.demo.report import draw, later, shown, table_of, verdicts
from farflung.demo.settings import (
    DEFAULT_OUTPUT,
    MODEL_FILE,
    PICTURE_FILE,
    REPORT_FILE,
    DemoSettings,
    Result,
    load_results,
)
from farflung.demo.text import Text, check_length, load_text
from farflung.launch.events import Screen, showing
from farflung.launch.plan import fit_for_cores, make_plan
from farflung.launch.run import start
from farflung.observe.report import page

PROMPT = "def main("


def run(settings: DemoSettings) -> None:
    """Train in processes of their own, then show what came of it; exit with the launcher's code if that failed."""
    fit_for_cores(settings.processes, "--processes")
    text = load_text(settings.data)
    check_length(text, context=settings.shape.context, sequences=settings.batch * settings.processes)
    _introduce(settings, text)
    try:
        settings_file = settings.save()
    except OSError as error:
        raise ConfigError(f"--output {settings.output} can't be written to: {error.strerror}.") from error
    launch = LaunchSettings(use_cpu=True, num_processes=settings.processes, module=True)
    with showing(Screen(launch)):
        code = start(launch, make_plan(launch, "farflung.demo.train", [str(settings_file)]))
    if code != 0:
        sys.exit(code)
    _conclude(settings, load_results(settings))


def _introduce(settings: DemoSettings, text: Text) -> None:
    source = "the standard library's sources" if settings.data is None else settings.data
    size = in_bytes(len(text.train))
    processes, steps = counted(settings.processes, "process"), counted(settings.steps, "step")
    click.echo(f"{processes} train a tiny byte-level GPT on {size} of {source}, in six ways that take turns:")
    click.echo(f"{steps} each, on the same data, from the same weights.")
    if text.left_out:
        named = ", ".join(text.left_out[:5]) + (" ..." if len(text.left_out) > 5 else "")
        click.echo(f"{counted(len(text.left_out), 'file')} without UTF-8 text left out: {named}")


def _conclude(settings: DemoSettings, results: Sequence[Result]) -> None:
    rate = in_rate(settings.bandwidth_bps)
    click.echo()
    Console().print(table_of(results, rate))
    for line in verdicts(results, rate):
        click.echo(line)
    click.echo()
    picture = settings.path(PICTURE_FILE)
    if importlib.util.find_spec("matplotlib") is None:
        click.echo("No picture: matplotlib is not installed. Get it with `pip install 'farflung[plot]'`.")
    else:
        processes, steps = counted(settings.processes, "process"), counted(settings.steps, "step")
        title = f"The same GPT and text, {steps} by {processes}"
        draw(results, picture, title, rate)
        click.echo(f"picture: {picture}")
    report = settings.path(REPORT_FILE)
    with atomic_file(report) as part:
        part.write_text(page([shown(result, rate) for result in later(results)]), encoding="utf-8")
    click.echo(f"report:  {report}, for a browser")
    best = min(results, key=lambda result: result.loss)
    click.echo(f"model:   {settings.path(MODEL_FILE)}, trained by {best.way}. It is tiny: a sample resembles Python,")
    click.echo("         but won't run. Generate one:")
    folder = [] if settings.output == DEFAULT_OUTPUT else ["--output", settings.output]
    click.echo(shlex.join([sys.executable, "-m", "farflung", "demo", "--generate", PROMPT, *folder]))
