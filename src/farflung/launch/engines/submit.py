# SPDX-License-Identifier: Apache-2.0
"""Starts a run by an engine and follows it; and the commands about one that was submitted."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from farflung.base.errors import ConfigError
from farflung.base.events import Kind, record
from farflung.config.resolve import Resolved
from farflung.config.setting import BOTH_SPELLINGS
from farflung.launch.codes import INTERRUPTED, EngineFailure
from farflung.launch.engines.engine import Engine, Job
from farflung.launch.events import Screen, showing
from farflung.launch.folder import NONE, SUBMITTED, RunFolder
from farflung.launch.plan import Script
from farflung.observe.folder import RUNS, named_run


def _engine_of(job: Job) -> Engine:
    """Return `Ssh` of `ssh.py`, `Slurm` of `slurm.py` and so on; each loads what it needs alone."""
    made: Engine = getattr(import_module(f"farflung.launch.engines.{job.engine}"), job.engine.capitalize())(job)
    return made


class Submitted:
    """Submits a run to its engine, and follows it.

    Raises:
        ConfigError: its settings can't work with this engine.
        EngineFailure: the engine is missing, or refuses it. Nothing was submitted.
    """

    def __init__(self, resolved: Resolved, script: Script) -> None:
        settings = resolved.settings
        if settings.run_dir == NONE:
            raise ConfigError("run_dir is none, but an engine keeps in the run's folder what it has submitted.")
        folder = Path(settings.run_dir or f"{RUNS}/{Path(script.name).stem}").absolute()
        self._job = Job(settings, script.name, script.arguments, folder)
        self._engine = _engine_of(self._job)
        self.goes_on = self.is_lone = False

    def described(self) -> str:
        return self._engine.described()

    def prepare(self) -> dict[str, Any]:
        self._job = self._engine.check() or self._job
        noun = "replicas" if self._job.is_elastic else "machines"
        return {"engine": self._job.engine, noun: self._job.count}

    def follow(self, folder: RunFolder) -> int:
        if folder.path is None:
            raise ConfigError(
                "An engine keeps in the run's folder what it has submitted. Name one that can be written."
            )
        job = replace(self._job, folder=folder.path)
        engine, where = _engine_of(job), job.engine
        try:
            if not (job.folder / SUBMITTED).exists():  # if this one is refused, the job before stays in reach
                job.write({})  # before anything of it can start
            handle = engine.submit()
        except OSError as error:
            raise EngineFailure(f"Nothing was submitted to {where}: {error}.") from None
        try:
            job.write(handle)
        except OSError as error:
            known = " ".join(f"{name} {value}" for name, value in handle.items())
            message = f"{job.folder} can't be written: {error.strerror}. Later commands won't find the run: {known}"
            record(Kind.WARNING, message=f"warning: {message}", **handle)
        record(Kind.SUBMITTED, message=f"submitted to {where}; the run's folder is {job.folder}", **handle)
        code = _followed(engine, job)
        self.goes_on = code == INTERRUPTED and engine.outlives_launch
        return code


def _followed(engine: Engine, job: Job) -> int:
    try:
        return engine.follow()
    except KeyboardInterrupt:
        if not engine.outlives_launch:
            raise
        words = f"still running: `farflung follow {job.name}` reattaches, `farflung cancel {job.name}` ends it"
        record(Kind.LEFT, level=logging.ERROR, message=words)
        return INTERRUPTED


@click.command(context_settings=BOTH_SPELLINGS)
@click.argument("run")
def follow(run: str) -> None:
    """Show what a run that was submitted prints, until it ends. RUN is its folder, or its name in farflung-runs."""
    job = Job.read(named_run(run))
    with showing(Screen(job.settings)):
        sys.exit(_followed(_engine_of(job), job))


@click.command(context_settings=BOTH_SPELLINGS)
@click.argument("run")
@click.argument("replicas", type=click.IntRange(min=0))
def scale(run: str, replicas: int) -> None:
    """Make a run that was submitted have this many REPLICAS: more are submitted, or some end and sign out."""
    job = Job.read(named_run(run))
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
    click.echo(_engine_of(Job.read(named_run(run))).cancel())
