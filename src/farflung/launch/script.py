# SPDX-License-Identifier: Apache-2.0
"""What is started: a script, a module or a program; found, and looked through, before any process runs it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from farflung.base.errors import ConfigError
from farflung.config.launch import LaunchSettings

RANK_STARTER = ("-m", "farflung.launch.rank")  # between Python and the script: has failures reported, wherever


def command_line(
    settings: LaunchSettings, script: str, arguments: Sequence[str], reported: bool = False
) -> tuple[str, ...]:
    """Return program and arguments that run `script`; `reported`: a launcher shows what it reports of its failure."""
    if settings.no_python:
        if shutil.which(script) is None:
            raise ConfigError(f"There is no executable program {script!r} (--no_python).")
        return (script, *arguments)
    python = (sys.executable, "-u", *(RANK_STARTER if reported else ()))
    if settings.module:
        _check_module(script)
        return (*python, "-m", script, *arguments)
    path = Path(script)
    if not script or not path.exists():
        raise ConfigError(f"The script {script!r} does not exist (looked in {os.getcwd()}).")
    if not path.is_file() and not (path / "__main__.py").is_file():
        raise ConfigError(f"The script {script!r} is not a file of Python code. Name one, or a module with -m.")
    return (*python, script, *arguments)


def _check_module(name: str) -> None:
    """Raise ConfigError if there is no module `name`. None is imported to find out."""
    where: Sequence[str] | None = [os.getcwd(), *sys.path]
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for k, part in enumerate(parts):
        spec = PathFinder.find_spec(".".join(parts[: k + 1]), where) if part and where is not None else None
        if spec is None:
            break
        where = spec.submodule_search_locations
    if spec is None:
        advice = " A script is named without -m." if Path(name).is_file() else ""
        raise ConfigError(
            f"There is no module {name!r}, neither here ({os.getcwd()}) nor among those installed.{advice}"
        )
