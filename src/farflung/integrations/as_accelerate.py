# SPDX-License-Identifier: Apache-2.0
"""Has `import accelerate` answered with Farflung's modules, in this process and in the processes that it starts.

The room `as_accelerate` holds a package `accelerate`, which answers, and the metadata of a distribution of that name.
If that folder comes first on Python's path, Python finds that package before an installed Accelerate; otherwise nothing
finds it. Only this metadata states the version that Farflung is compatible with.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

from farflung.base.errors import StateError
from farflung.base.events import Kind, record
from farflung.config import environ

FOLDER = Path(__file__).parents[1] / "as_accelerate"
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


def install_for_replica() -> None:
    """Do the same in a replica that comes and goes, which Accelerate takes for a process alone; say so if used."""
    if str(FOLDER) not in sys.path:  # where `--as-accelerate` puts it
        install_as_accelerate()
        sys.meta_path.insert(0, _AccelerateFinder())


class _AccelerateFinder(MetaPathFinder):
    """Finds nothing, but says who answers for `accelerate` when it is looked for."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == _NAME:
            sys.meta_path.remove(self)
            why = "Accelerate would give each replica all of the data"
            record(Kind.NOTE, message=f"`import accelerate` is answered by Farflung, as with --as-accelerate: {why}")


def path_variables() -> dict[str, str]:
    """Return the environment variables with which `import accelerate` is answered in a process that gets them."""
    before = environ.text("PYTHONPATH")
    kept = [entry for entry in before.split(os.pathsep) if entry != str(FOLDER)] if before else []  # "" is this folder
    return {"PYTHONPATH": os.pathsep.join([str(FOLDER), *kept])}


def compatible_version() -> str:
    """Return the version of Accelerate whose names and behaviour Farflung has."""
    from importlib.metadata import Distribution  # here, as it takes the command 16 ms

    return Distribution.at(FOLDER / f"{_NAME}.dist-info").version
