# SPDX-License-Identifier: Apache-2.0
"""Accelerate's helpers over plain values: sizes in words, dictionaries, attributes and names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import reduce
from typing import Any

from farflung.base.errors import ConfigError

_STEPS = ("bytes", "KB", "MB", "GB", "TB")
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMG])(i?)([Bb])\s*", re.IGNORECASE)


def convert_bytes(size: float) -> str:
    """Return a number of bytes with the largest unit that fits, of 1024 each: `1.5 MB`."""
    for unit in _STEPS:
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def convert_file_size_to_int(size: int | str) -> int:
    """Return a size in bytes: `5GB` is 5 * 10**9, `5GiB` is 5 * 2**30; a small b counts bits, 8 of them a byte.

    Raises:
        ConfigError: it is none, or without a unit.
    """
    if isinstance(size, int) and size >= 0:
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        raise ConfigError(f"The size {size!r} is none; give bytes as a number, or a text such as '5GB' or '5GiB'.")
    number, power, binary, last = float(match[1]), "KMG".index(match[2].upper()) + 1, bool(match[3]), match[4]
    if binary:
        return int(number * 1024**power)
    return int(number * 1000**power) // (8 if last == "b" else 1)


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
