# SPDX-License-Identifier: Apache-2.0
"""A state dict as safetensors can hold it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from farflung.checkpoint.writer import without_aliases


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items that safetensors can hold: contiguous tensors, and of those that are one tensor the first.

    What is no tensor is kept as it is.
    """
    kept = without_aliases({name: value for name, value in state_dict.items() if isinstance(value, Tensor)})
    return {
        name: _plain(kept[name]) if name in kept else value
        for name, value in state_dict.items()
        if name in kept or not isinstance(value, Tensor)
    }


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory has its values, in their order."""
    return tensor.contiguous().resolve_conj().resolve_neg()
