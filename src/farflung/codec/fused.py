# SPDX-License-Identifier: Apache-2.0
"""Says where a blockwise codec can work as one kernel, and brings the kernels."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from farflung.base.optional import is_available

_LARGEST_BLOCK = 4096


def kernels(x: Tensor, block: int) -> Any:
    """Return the module `kernels`, or None where `x` `[n]` or the block is not for it.

    It is for fp32 on NVIDIA's devices where Triton is installed, and for blocks of a power of two. The module is loaded
    by name, as it can't be imported without Triton and shall not be before it is used.
    """
    is_power = block & (block - 1) == 0 and block <= _LARGEST_BLOCK
    if x.device.type != "cuda" or x.dtype != torch.float32 or not is_power or torch.version.hip:
        return None
    return import_module("farflung.codec.kernels") if is_available("triton") else None
