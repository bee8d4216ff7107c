# SPDX-License-Identifier: Apache-2.0
"""What exists for Accelerate's names alone: the doors import it, and no room below does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def defined_in(module: Mapping[str, Any]) -> list[str]:
    """Return the public names of what a module (its `globals()`) defines: doors hand on all of them."""
    own = module["__name__"]
    return [name for name, value in module.items() if name[0] != "_" and getattr(value, "__module__", "") == own]
