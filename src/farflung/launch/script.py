# SPDX-License-Identifier: Apache-2.0
"""What is started: a script, a module or a program; found, and looked through, before any process runs it."""

from __future__ import annotations

import ast
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from farflung.base.errors import ConfigError
from farflung.config.launch import LaunchSettings

RANK_STARTER = ("-m", "farflung.launch.rank")  # between Python and the script: has failures reported, wherever


def command_line(
    settings: LaunchSettings, script: str, arguments: Sequence[str], reported: bool = False
) -> tuple[str, ...]:
    """Return program and arguments that run `script`.

    Args:
        reported: a launcher is there to show what the process reports of its failure.

    Raises:
        ConfigError: there is no such file, module or program.
    """
    if settings.no_python:
        if shutil.which(script) is None:
            raise ConfigError(f"There is no executable program {script!r} (--no_python).")
        return (script, *arguments)
    python = (sys.executable, "-u", *(RANK_STARTER if reported else ()))
    if settings.module:
        _find_module(script)
        return (*python, "-m", script, *arguments)
    path = Path(script)
    if not script or not path.exists():
        raise ConfigError(f"The script {script!r} does not exist (looked in {os.getcwd()}).")
    if not path.is_file() and not (path / "__main__.py").is_file():
        raise ConfigError(f"The script {script!r} is not a file of Python code. Name one, or a module with -m.")
    return (*python, script, *arguments)


def refuse_accelerate(settings: LaunchSettings, script: str) -> None:
    """Refuse an outer loop for a script whose code imports `accelerate`, and nowhere `farflung`.

    Looked through are the script and the modules beside it that it imports, and those that these import. One that has
    a word of farflung in it may know what it does, and code that can't be read as Python is left to Python.

    Raises:
        ConfigError: it is such a script.
    """
    file = Path(_find_module(script).origin or "") if settings.module else Path(script)
    where = Path.cwd() if settings.module else file.parent
    unread = [file / "__main__.py" if file.is_dir() else file]
    seen: set[Path] = set()
    accelerates = False
    while unread:
        path = unread.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        code = path.read_bytes()
        if b"farflung" in code:
            return
        for name, folder in _imports(code, where, path.parent):
            accelerates |= name.partition(".")[0] == "accelerate"
            beside = folder.joinpath(*name.split("."))
            unread += [beside.with_name(f"{beside.name}.py"), beside / "__init__.py"]
    if accelerates:
        raise ConfigError(
            f"{script} imports accelerate, which knows nothing of --outer {settings.outer_recipe}. "
            "Import the same names from farflung instead, or launch it with --as-accelerate."
        )


def _imports(code: bytes, where: Path, here: Path) -> Iterator[tuple[str, Path]]:
    """Yield the modules that `code` in the folder `here` imports, each with the folder that it is looked for in."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, where) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = (here, *here.parents)[node.level - 1] if 0 < node.level <= len(here.parents) else where
            names = [node.module] if node.module else []
            names += [f"{node.module}.{alias.name}" if node.module else alias.name for alias in node.names]
            yield from ((name, folder) for name in names)


def _find_module(name: str) -> ModuleSpec:
    """Return where the module `name` is. None is imported for that.

    Raises:
        ConfigError: there is none.
    """
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
    return spec
