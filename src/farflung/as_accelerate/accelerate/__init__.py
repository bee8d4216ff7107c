# SPDX-License-Identifier: Apache-2.0
"""Stands for the package `accelerate` where its folder is on Python's path: its names and modules are Farflung's."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

import farflung
from farflung.integrations.as_accelerate import compatible_version

__version__ = compatible_version()
_NAME = "accelerate"
_NOT_HERE = f"Farflung answers for accelerate {__version__} here, and does not have it"


def __getattr__(name: str) -> object:
    try:
        return getattr(farflung, name)
    except AttributeError:
        raise AttributeError(f"module '{_NAME}' has no attribute {name!r} ({_NOT_HERE})") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *farflung.__all__})


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
            raise ModuleNotFoundError(f"No module named {fullname!r}: {_NOT_HERE}", name=fullname)
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


if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())
