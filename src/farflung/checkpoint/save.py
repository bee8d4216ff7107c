# SPDX-License-Identifier: Apache-2.0
"""One object into one file."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from farflung.base.errors import ConfigError
from farflung.checkpoint.writer import FileWriter, write_safetensors, write_torch


def save_object(obj: Any, path: str | os.PathLike[str], safe_serialization: bool = False) -> None:
    """Write `obj` to `path`: with `torch.save`, or a flat dictionary of tensors as safetensors.

    Of tensors that share their memory (tied weights), safetensors gets the first name alone.

    Raises:
        ConfigError: `safe_serialization`, but `obj` is no dictionary from names to tensors.
    """
    if not safe_serialization and hasattr(path, "write"):
        torch.save(obj, path)
        return
    if not safe_serialization:
        with FileWriter(path) as file:
            write_torch(obj, file)
        return
    if not isinstance(obj, dict) or not all(isinstance(value, Tensor) for value in obj.values()):
        raise ConfigError(
            "safe_serialization=True can only save a dictionary of tensors by name; this is something else."
        )
    with FileWriter(path) as file:  # not safetensors' own writer, whose files nobody else may read
        write_safetensors(obj, file)
