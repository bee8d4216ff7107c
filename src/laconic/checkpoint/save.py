# SPDX-License-Identifier: Apache-2.0
"""One object into one file."""

from __future__ import annotations

import os
from typing import Any

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor

from laconic.base.errors import ConfigError


def save_object(obj: Any, path: str | os.PathLike[str], safe_serialization: bool = False) -> None:
    """Write `obj` to `path`: with `torch.save`, or a flat dictionary of tensors as safetensors.

    Of tensors that share their memory (tied weights), safetensors gets the first name alone.

    Raises:
        ConfigError: `safe_serialization`, but `obj` is no dictionary from names to tensors.
    """
    if not safe_serialization:
        torch.save(obj, path)
        return
    if not isinstance(obj, dict) or not all(isinstance(value, Tensor) for value in obj.values()):
        raise ConfigError("safe_serialization=True writes a dictionary from names to tensors; this is something else.")
    with open(path, "wb") as file:  # not safetensors' own writer, whose files nobody else may read
        file.write(to_safetensors(without_aliases(obj), metadata={"format": "pt"}))


def without_aliases(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors`, contiguous, keeping only the first name of those that are the same piece of memory."""
    seen: set[tuple[Any, ...]] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        kept[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return kept
