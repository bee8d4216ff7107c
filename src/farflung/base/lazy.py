# SPDX-License-Identifier: Apache-2.0
"""Modules of ours that are loaded at their first use, as they load torch or take longer than a wrong use to answer."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """Stands for the module of this name. Type checkers are to see the module itself: import it for them alone."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)
