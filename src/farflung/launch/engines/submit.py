# SPDX-License-Identifier: Apache-2.0
"""Starts a run by an engine and follows it; and the commands about one that was submitted."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from farflung.base.errors import ConfigError
from farflung.base.events import EVENTS, Kind, record
from farflung.config.resolve import Resolved
from farflung.config.setting import BOTH_SPELLINGS
from farflung.launch.codes import DONE, ENGINE, INTERRUPTED
from farflung.launch.engines.engine import Engine, Job
from farflung.launch.events import FolderSink, Screen, showing
from farflung.observe.folder import NONE, RUNS, make_folder, named_run

# By the names of the setting `engine`.
_ENGINES = {
    "ssh": "farflung.launch.engines.ssh:Ssh",
    "slurm": "farflung.launch.engines.slurm:Slurm",
    "ray": "farflung.launch.engines.ray:Ray",
    "kubernetes": "farflung.launch.engines.kubernetes:Kubernetes",
}


def _engine_of(job: Job) -> Engine:
    module, name = _ENGINES[job.settings.engine or "ssh"].split(":")
    made: Engine = getattr(import_module(module), name)(job)
    return made


def submit_run(resolved: Resolved, script: str, arguments: Sequence[str]) -> int:
    """Submit a run to its engine, follow it to its end, and return the exit code.

    Raises:
        ConfigError: its settings can't work with this engine.
        EngineFailure: the engine is missing, or refuses it. Nothing was submitted.
    """
    settings = resolved.settings
    if settings.run_dir == NONE:
        raise ConfigError("run_dir is none, but an engine keeps in the run's folder what it has submitted.")
    named = settings.run_dir or f"{RUNS}/{Path(script).stem}"
    job = Job(settings, script, tuple(arguments), Path(named).absolute())
    engine = _engine_of(job)
    if settings.dry_run:
        click.echo(engine.described())
        return DONE
    job = engine.check() or job
    world = {"engine": settings.engine or "ssh", ("replicas" if job.is_elastic else "machines"): job.count}
    folder = make_folder(resolved, script, arguments, world)
    if folder.path is None:
        raise ConfigError("An engine keeps in the run's folder what it has submitted. Name one that can be written.")
    job = replace(job, folder=folder.path)
    EVENTS.addHandler(FolderSink(folder.path))
    job.write({})  # before anything of it can start
    engine = _engine_of(job)
    try:
        handle = engine.submit()
    except BaseException:
        record(Kind.ENDED, code=ENGINE)
        raise
    job.write(handle)
    record(Kind.SUBMITTED, message=f"submitted to {world['engine']}; the run's folder is {job.folder}", **handle)
    code = _followed(_engine_of(replace(job, handle=handle)) if engine.outlives_launch else engine, job)
    goes_on: dict[str, Any] = {"goes_on": True} if code == INTERRUPTED and engine.outlives_launch else {}
    record(Kind.ENDED, code=code, **goes_on)
    return code


def _followed(engine: Engine, job: Job) -> int:
    try:
        return engine.follow()
    except KeyboardInterrupt:
        if not engine.outlives_launch:
            raise
        words = f"the run goes on: `farflung follow {job.name}` shows it again, `farflung cancel {job.name}` ends it"
        record(Kind.LEFT, level=logging.ERROR, message=words)
        return INTERRUPTED


def _submitted(name: str) -> Job:
    return Job.read(named_run(name))


@click.command(context_settings=BOTH_SPELLINGS)
@click.argument("run")
def follow(run: str) -> None:
    """Show what a run that was submitted prints, until it ends. RUN is its folder, or its name in farflung-runs."""
    job = _submitted(run)
    with showing(Screen(job.settings)):
        sys.exit(_followed(_engine_of(job), job))


@click.command(context_settings=BOTH_SPELLINGS)
@click.argument("run")
@click.argument("replicas", type=click.IntRange(min=0))
def scale(run: str, replicas: int) -> None:
    """Make a run that was submitted have this many REPLICAS: more are submitted, or some end and sign out."""
    job = _submitted(run)
    least, most = job.settings.bounds
    if not job.is_elastic:
        raise ConfigError(f"{job.name} has a fixed number of processes; only a run with --elastic can be scaled.")
    if not least <= replicas <= most:
        raise ConfigError(f"{replicas} replicas are asked for, but elastic is {job.settings.elastic}.")
    click.echo(_engine_of(job).scale(replicas))


@click.command(context_settings=BOTH_SPELLINGS)
@click.argument("run")
def cancel(run: str) -> None:
    """End a run that was submitted."""
    click.echo(_engine_of(_submitted(run)).cancel())
