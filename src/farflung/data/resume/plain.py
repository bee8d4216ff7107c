# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint can hold of data: batches, and the states of data sets, as plain containers on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor


class _NotPlain(Exception):
    """Something that a checkpoint can't hold."""


def plain_or_none(batch: Any) -> Any:
    """Return a batch as plain data on the CPU, None where it holds something else, such as a class of the script's."""
    try:
        return _plain(batch)
    except _NotPlain:
        return None


def _plain(node: Any) -> Any:
    kind = type(node)
    if kind is Tensor:
        return node.detach().cpu()
    if kind is dict:
        return {_plain(key): _plain(value) for key, value in node.items()}
    if kind is list or kind is tuple:
        return kind([_plain(value) for value in node])
    if node is None or kind in (int, float, bool, str, bytes, complex):
        return node
    if kind is np.ndarray and node.dtype.kind in "biufc":
        return node
    raise _NotPlain


def state_of(keeper: Any) -> Any:
    """Return the state of a data set or a loader, None where it keeps none that a checkpoint can hold."""
    if not (hasattr(keeper, "state_dict") and hasattr(keeper, "load_state_dict")):
        return None
    return plain_or_none(keeper.state_dict())
