# SPDX-License-Identifier: Apache-2.0
"""Answers `import accelerate` with Farflung's modules, in this process and in the processes that it starts.

The folder `path` next to this file holds a package `accelerate`, which calls `answer_imports`, and the metadata of a
distribution of that name. If the folder comes first on Python's path, Python finds that package before an installed
Accelerate; otherwise nothing finds it. Only this metadata states the version that Farflung is compatible with.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from farflung.base.errors import StateError
from farflung.config import environ

FOLDER = Path(__file__).with_name("path")
_NAME = "accelerate"


def install_as_accelerate() -> None:
    """Answer `import accelerate` with Farflung from now on: in this process, and in Python processes that it starts.

    `accelerate.utils` is `farflung.utils` then, and so on: the same module objects with the same classes.
    `importlib.metadata.version("accelerate")` returns the version that Farflung is compatible with. An installed
    Accelerate stays as it is. Calling this again changes nothing.

    Raises:
        StateError: Accelerate was imported already.
    """
    loaded = sys.modules.get(_NAME)
    if loaded is not None and getattr(loaded, "__file__", None) != str(FOLDER / _NAME / "__init__.py"):
        where = getattr(loaded, "__file__", "an unknown place")
        raise StateError(
            f"install_as_accelerate: accelerate was already imported, from {where}. Call it before the imports of "
            "accelerate and of libraries that use it, or start the script with `farflung launch --as-accelerate`."
        )
    sys.path[:] = [str(FOLDER), *(entry for entry in sys.path if entry != str(FOLDER))]
    environ.export(path_variables())
    importlib.invalidate_caches()


def path_variables() -> dict[str, str]:
    """Return the environment variables with which `import accelerate` is answered in a process that gets them."""
    before = (environ.text("PYTHONPATH") or "").split(os.pathsep)
    kept = [entry for entry in before if entry not in ("", str(FOLDER))]
    return {"PYTHONPATH": os.pathsep.join([str(FOLDER), *kept])}


def compatible_version() -> str:
    """Return the version of Accelerate whose names and behaviour Farflung has."""
    from importlib.metadata import Distribution  # here, as it takes the command 16 ms

    return Distribution.at(FOLDER / f"{_NAME}.dist-info").version


def answer_imports() -> None:
    """Answer the imports of Accelerate's submodules in this process; called when `accelerate` itself is imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def attribute(name: str) -> Any:
    """Return what `accelerate.<name>` is: Farflung's object of that name, or its module."""
    try:
        return getattr(importlib.import_module("farflung"), name)
    except AttributeError:
        raise AttributeError(f"module '{_NAME}' has no attribute {name!r} ({_who_answers()})") from None


def names() -> list[str]:
    """Return the public names of Farflung, which `accelerate` has too."""
    return [name for name in importlib.import_module("farflung").__all__ if name != "__version__"]


class _Finder(MetaPathFinder):
    """Finds Farflung's module for each submodule of `accelerate`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, inner = fullname.partition(".")
        if package != _NAME or not inner:
            return None
        own = importlib.util.find_spec(f"farflung.{inner}")
        if own is None:
            raise ModuleNotFoundError(f"No module named {fullname!r}: {_who_answers()}", name=fullname)
        return ModuleSpec(
            fullname, _Alias(own), origin=own.origin, is_package=own.submodule_search_locations is not None
        )


class _Alias(Loader):
    """Loads a module under another name: the same object, not a copy."""

    def __init__(self, own: ModuleSpec) -> None:
        self._own = own

    def exec_module(self, module: ModuleType) -> None:
        # What is in `sys.modules` afterwards is what the import returns.
        sys.modules[module.__name__] = importlib.import_module(self._own.name)

    def get_code(self, fullname: str) -> CodeType | None:
        """Raise ImportError for `python -m`: Farflung has a command."""
        raise ImportError(f"{fullname} can't be run where Farflung answers for {_NAME}. Use `farflung launch`.")


def _who_answers() -> str:
    return f"Farflung answers for accelerate {compatible_version()} here, and does not have it"
