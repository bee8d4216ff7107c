# SPDX-License-Identifier: Apache-2.0
"""What `farflung launch` does with its settings: choose what starts the script, and follow the run to its end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

import click

from farflung.base.errors import FarflungError
from farflung.base.events import EVENTS, Kind, record
from farflung.base.lazy import LazyModule
from farflung.config import environ
from farflung.config.engines import LOCAL
from farflung.config.resolve import Resolved
from farflung.launch.codes import DONE, INTERRUPTED, EngineFailure, of_error, refused
from farflung.launch.events import Screen, showing, showing_ranks
from farflung.launch.folder import RunFolder, make_folder
from farflung.launch.options import launch_flags
from farflung.launch.plan import Script
from farflung.launch.run import Ranks
from farflung.process.sockets import allow_connections

if TYPE_CHECKING:
    from farflung.launch import elastic
    from farflung.launch.engines import submit
else:
    elastic = LazyModule("farflung.launch.elastic")
    submit = LazyModule("farflung.launch.engines.submit")


class Starter(Protocol):
    """Starts a run. ConfigError is raised for settings that can't work, before anything is started.

    Attributes:
        goes_on: the run outlives its launcher, which was interrupted.
        is_lone: one process alone takes the place of this one.
    """

    goes_on: bool
    is_lone: bool

    def described(self) -> str:
        """Return what would be started, as `--dry-run` shows it."""

    def prepare(self) -> dict[str, Any]:
        """Check what can be checked, serve or find what the run needs; return the facts of the event `started`."""

    def follow(self, folder: RunFolder) -> int:
        """Start the run and follow it to its end; return the exit code, one of `codes`."""


def starter_of(resolved: Resolved, script: Script) -> Starter:
    """Return what starts a script with these settings."""
    settings = resolved.settings
    if not settings.is_local:
        return submit.Submitted(resolved, script)
    is_elastic = settings.elastic is not None or settings.join is not None
    return elastic.Replicas(resolved, script) if is_elastic else Ranks(resolved, script)


def launch_script(resolved: Resolved, script: Script) -> int:
    """Run a script to its end and return the exit code."""
    screen = Screen(resolved.settings)
    with showing(screen), environ.patched(_without_rank(script)):
        _record_notes(resolved, script)
        starter = starter_of(resolved, script)
        if resolved.settings.dry_run:
            click.echo(starter.described())
            return DONE
        if not starter.is_lone:
            allow_connections()
        started = starter.prepare()
        folder = make_folder(resolved, script.name, script.arguments, started)
        EVENTS.addHandler(folder)
        record(Kind.STARTED, **started)
        code = INTERRUPTED
        try:
            with showing_ranks(screen, folder):
                code = _follow(starter, folder)
        except FarflungError as error:
            code = of_error(error)
            if not (resolved.settings.json and isinstance(error, EngineFailure)):
                raise
            record(Kind.FAILED, message=str(error))
        finally:
            record(Kind.ENDED, code=code, **({"goes_on": True} if starter.goes_on else {}))
        return code


def _follow(starter: Starter, folder: RunFolder) -> int:
    try:
        return starter.follow(folder)
    except BrokenPipeError:  # who read this command's output has ended
        raise
    except OSError as error:
        raise refused(error) from error


def _without_rank(script: Script) -> dict[str, None]:
    """Return the variables of a rank that starts this launcher, to be unset; a replica's launcher hands them on."""
    return {} if script.is_inner else dict.fromkeys(filter(environ.text, environ.OF_RANK))


def _record_notes(resolved: Resolved, script: Script) -> None:
    if resolved.file is not None:
        record(Kind.SETTINGS, message=f"settings from {resolved.file}", file=str(resolved.file))
    for note in resolved.notes:
        record(Kind.NOTE, level=logging.ERROR, message=note)
    settings = resolved.settings
    if settings.engine == LOCAL or script.is_inner or settings.no_python:
        return  # a launcher under another one repeats what that was given, and a program has flags of its own
    given = [name for name, origin in resolved.origins.items() if origin.kind == "flag"]
    if flags := launch_flags(script.name, script.arguments, given):
        message = (
            f"warning: {' and '.join(flags)} went to the script, after whose name they stand. If they are for the "
        )
        record(Kind.WARNING, message=f"{message}launcher, write them before {script.name}")
