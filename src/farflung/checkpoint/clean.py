# SPDX-License-Identifier: Apache-2.0
"""A state dict as safetensors can hold it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from farflung.checkpoint.writer import without_aliases

_logger = logging.getLogger(__name__)


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items that safetensors can hold: contiguous tensors, and of those that are one tensor the first.

    What is no tensor is kept as it is.
    """
    kept = without_aliases({name: value for name, value in state_dict.items() if isinstance(value, Tensor)})
    left_out = [name for name, value in state_dict.items() if isinstance(value, Tensor) and name not in kept]
    if left_out:
        _logger.warning("%s are left out: they share their memory with tensors that are saved.", ", ".join(left_out))
    items = {name: kept.get(name, value) for name, value in state_dict.items() if name not in left_out}
    return {name: _plain(value) if isinstance(value, Tensor) else value for name, value in items.items()}


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory has its values, in their order."""
    return tensor.contiguous().resolve_conj().resolve_neg()
