# SPDX-License-Identifier: Apache-2.0
"""What `farflung launch` does with its settings: choose what starts the script, and follow the run to its end."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import click

from farflung.base.errors import FarflungError
from farflung.base.events import EVENTS, Kind, record
from farflung.base.files import FORMER_NAME
from farflung.config.places import former_files
from farflung.config.resolve import Resolved
from farflung.launch.codes import DONE, INTERRUPTED, EngineFailure, of_error
from farflung.launch.events import FolderSink, Screen, showing
from farflung.observe.folder import RunFolder, make_folder


@dataclass(frozen=True)
class Script:
    """What a launcher runs.

    Args:
        exec_alone: one process alone takes the place of this one.
        is_inner: this launcher is under that of replicas.
    """

    name: str
    arguments: tuple[str, ...] = ()
    exec_alone: bool = False
    is_inner: bool = False


class Starter(Protocol):
    """Starts a run. ConfigError is raised for settings that can't work, before anything is started.

    Attributes:
        goes_on: the run outlives its launcher, which was interrupted.
    """

    goes_on: bool

    def described(self) -> str:
        """Return what would be started, as `--dry-run` shows it."""

    def prepare(self) -> dict[str, Any]:
        """Check what can be checked, serve or find what the run needs; return the facts of the event `started`."""

    def follow(self, folder: RunFolder) -> int:
        """Start the run and follow it to its end; return the exit code, one of `codes`."""


def starter_of(resolved: Resolved, script: Script) -> Starter:
    """Return what starts a script with these settings: each is loaded only where it is asked for."""
    settings = resolved.settings
    where, name = ("run", "Ranks") if settings.is_local else ("engines.submit", "Submitted")
    if settings.is_local and (settings.elastic is not None or settings.join is not None):
        where, name = "elastic", "Replicas"
    starter: Starter = getattr(import_module(f"farflung.launch.{where}"), name)(resolved, script)
    return starter


def launch_script(resolved: Resolved, script: Script) -> int:
    """Run a script to its end and return the exit code."""
    settings = resolved.settings
    with showing(Screen(settings)):
        _record_notes(resolved)
        starter = starter_of(resolved, script)
        if settings.dry_run:
            click.echo(starter.described())
            return DONE
        started = starter.prepare()
        folder = make_folder(resolved, script.name, script.arguments, started)
        EVENTS.addHandler(FolderSink(folder.path))
        record(Kind.STARTED, **started)
        code = INTERRUPTED
        try:
            code = starter.follow(folder)
        except FarflungError as error:
            code = of_error(error)
            if not (settings.json and isinstance(error, EngineFailure)):
                raise
            record(Kind.FAILED, message=str(error))
        finally:
            record(Kind.ENDED, code=code, **({"goes_on": True} if starter.goes_on else {}))
        return code


def _record_notes(resolved: Resolved) -> None:
    if resolved.file is not None:
        new = former_files().get(resolved.file)
        advice = f" (this package was called {FORMER_NAME}; rename the file to {new})" if new else ""
        record(Kind.SETTINGS, message=f"settings from {resolved.file}{advice}", file=str(resolved.file))
    for note in resolved.notes:
        record(Kind.NOTE, level=logging.ERROR, message=note)
