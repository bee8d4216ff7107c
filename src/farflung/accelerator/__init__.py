# SPDX-License-Identifier: Apache-2.0
"""The object that users hold: it delegates, nothing else.

Scripts also look here for `Accelerator` and for the classes and constants that it takes. Those are loaded when they are
asked for; what begins with a small letter is a module of this room.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_DOORS = tuple(
    f"farflung.{door}" for door in ("utils", "state", "data_loader", "optimizer", "scheduler", "hooks", "tracking")
)


def __getattr__(name: str) -> Any:
    if name == "Accelerator":
        return import_module("farflung.accelerator.accelerator").Accelerator
    doors = map(import_module, _DOORS if name[0].isupper() else ())
    door = next((door for door in doors if hasattr(door, name)), None)
    if door is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(door, name)
