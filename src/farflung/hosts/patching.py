# SPDX-License-Identifier: Apache-2.0
"""Replaces functions of other libraries."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any


def around(owner: Any, name: str, act: Callable[..., Any]) -> None:
    """Replace a function of `owner` by `act`, which is called with that function and then its arguments.

    Modules that have imported a module's function by name get the new one too.
    """
    function = getattr(owner, name)
    made = functools.update_wrapper(lambda *args, **options: act(function, *args, **options), function)
    setattr(owner, name, made)
    for names in _namespaces() if isinstance(owner, ModuleType) else ():
        if names.get(name) is function and not str(names.get("__name__")).startswith(f"{owner.__name__}."):
            names[name] = made


def _namespaces() -> Iterator[dict[str, Any]]:
    """Yield the names of all modules, and the copy of a script's that its functions see in a spawned process."""
    for module in list(sys.modules.values()):
        yield getattr(module, "__dict__", {})
    for var in list(vars(sys.modules["__main__"]).values()):
        for function in (var, *vars(var).values()) if isinstance(var, type) else (var,):
            if isinstance(function, FunctionType):
                yield function.__globals__
