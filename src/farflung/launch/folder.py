# SPDX-License-Identifier: Apache-2.0
"""Makes a run's folder, and writes what its launcher knows: settings and their origins, versions, events."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from farflung.base.errors import ConfigError
from farflung.base.events import FILES_ONLY, Event, Kind, Sink, tell
from farflung.base.files import atomic_file
from farflung.base.optional import installed_version
from farflung.config import environ
from farflung.config.launch import LaunchSettings
from farflung.config.resolve import Resolved
from farflung.observe.attempts import next_attempt
from farflung.observe.folder import FACTS, LATEST, RUNS
from farflung.process.identity import this_process
from farflung.process.run_files import EVENTS, LOGS, add_lines

NONE = "none"  # in place of a folder
SUBMITTED = "engine.json"  # what was submitted to an engine, whose launchers write into the folder of whoever did it
_NOT_IN_FOLDERS = {"report", "goes_on"}  # reports, which the ranks write, and the ends of launchers whose runs continue
_GIT_WITHIN_S = 2.0


class RunFolder(Sink):
    """The folder of one run on this machine, to which its launcher writes events; without a path it writes none.

    Args:
        path: None: there is none.
        attempt: which one of this folder's it belongs to.
        launcher: its id among those that write there; None: it submits a run, and others launch it.
    """

    is_folder = True

    def __init__(self, path: Path | None, attempt: int = 1, launcher: str | None = None) -> None:
        super().__init__(FILES_ONLY)
        self.path, self._attempt, self._launcher = path, attempt, launcher

    @property
    def variables(self) -> dict[str, str]:
        """Those of the environment by which ranks find it."""
        if self.path is None:
            return {}
        return {environ.RUN_FOLDER: str(self.path), environ.RUN_ATTEMPT: str(self._attempt)}

    def with_logs(self, settings: LaunchSettings) -> LaunchSettings:
        """Return the settings with the place of the files that `tee` writes: this folder, unless one is named."""
        if settings.tee == "0" or settings.log_dir is not None or self.path is None:
            return settings
        return replace(settings, log_dir=str(self.path / LOGS))

    def show(self, event: Event) -> None:
        if self.path is None or event.facts.keys() & _NOT_IN_FOLDERS:
            return
        row = event.row()
        if self._launcher is not None:
            row |= {"attempt": self._attempt, "launcher": self._launcher}
        if event.kind is Kind.STARTED:
            row |= {"attempt": self._attempt, **this_process()}
        add_lines(self.path / EVENTS, [row])


def make_folder(resolved: Resolved, script: str, arguments: Sequence[str], world: Mapping[str, Any]) -> RunFolder:
    """Make the folder that the settings ask for and write how the run was started; point `latest` at it.

    Args:
        world: how many processes or replicas there are, and on which machine these are.

    Raises:
        ConfigError: the folder that was named can't be written. If none was named, a line says so instead.
    """
    settings = resolved.settings
    if settings.run_dir == NONE:
        return RunFolder(None)
    path = Path(settings.run_dir or RUNS).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        path = path if settings.run_dir else _new(path, Path(script).stem)
        launcher = None if "engine" in world else os.urandom(4).hex()
        attempt = next_attempt(path, world) if settings.run_dir else 1  # a new folder has none yet
        made = RunFolder(path, attempt, launcher)
        if launcher is not None and (path / SUBMITTED).exists():
            return made
        facts = _facts(resolved, script, arguments, world)
        with atomic_file(path / FACTS) as part:
            part.write_text(json.dumps(facts, indent=1), encoding="utf-8")
        if not settings.run_dir:
            _point(path.parent / LATEST, path.name)
    except OSError as error:
        problem = f"the run's folder {path} can't be written: {error.strerror}"
        if settings.run_dir:
            raise ConfigError(f"run_dir is {settings.run_dir!r}, but {problem}. Name another one, or none.") from None
        tell(f"farflung: {problem}, so there is none; --run-dir names another place")
        return RunFolder(None)
    return made


def _new(runs: Path, name: str) -> Path:
    """Make a folder that nobody else has: of this second, with a number if need be."""
    stem = f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{name}"
    for number in count(1):
        made = runs / (stem if number == 1 else f"{stem}-{number}")
        with suppress(FileExistsError):
            made.mkdir()
            break
    return made


def _point(link: Path, target: str) -> None:
    """Point `latest` at the newest run, or remove it: without it, `watch` and `report` find the newest themselves."""
    aside = link.with_name(f".{link.name}-{os.getpid()}")
    try:
        aside.symlink_to(target)
        aside.replace(link)
    except OSError:  # a file system without links, or a copy of a run that came back in place of the link
        for path in (aside, link):
            with suppress(OSError):
                path.unlink()


def _facts(resolved: Resolved, script: str, arguments: Sequence[str], world: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "script": script,
        "arguments": list(arguments),
        "started": time.time(),
        "command": sys.argv,
        "folder": os.getcwd(),
        **this_process(),
        "world": dict(world),
        "settings": {name: {"value": value, "from": origin} for name, value, origin in resolved.rows()},
        "versions": {"python": platform.python_version()}
        | {name: installed_version(name) or None for name in ("farflung", "torch")},
        "system": platform.platform(),
        "git": _commit(Path(script)),
    }


def _commit(script: Path) -> str | None:
    """Return the commit of the script's repository, with a `+` where something was changed since; None without git."""
    where = script.parent if script.exists() else Path()
    with suppress(OSError, subprocess.SubprocessError):
        asked = ["git", "-C", str(where), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_GIT_WITHIN_S, check=True)
        return done.stdout.strip() or None
    return None
