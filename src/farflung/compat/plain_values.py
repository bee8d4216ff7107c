# SPDX-License-Identifier: Apache-2.0
"""Accelerate's helpers over plain values: sizes in words, dictionaries, attributes and names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

from farflung.base.sizes import num_bytes

_STEPS = ("bytes", "KB", "MB", "GB", "TB")


def convert_bytes(size: float) -> str:
    """Return a number of bytes with the largest unit that fits, of 1024 each: `1.5 MB`."""
    for unit in _STEPS:
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def convert_file_size_to_int(size: int | str) -> int:
    """Return a size in bytes; see `num_bytes`."""
    return num_bytes(size, "size", least=0)


def merge_dicts(source: Mapping[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Put the items of `source` into `destination`, those of inner dictionaries one by one, and return it."""
    for key, value in source.items():
        destination[key] = merge_dicts(value, destination.get(key, {})) if isinstance(value, dict) else value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return an attribute of an attribute, by a name with dots: `layer.weight.dtype`."""
    return reduce(getattr, attr.split("."), obj)


def get_pretty_name(obj: Any) -> str:
    """Return the name of a function or a class, or that of the class of anything else."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)
