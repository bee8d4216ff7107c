# SPDX-License-Identifier: Apache-2.0
"""Tensors as pieces of memory: which are the same one, their bytes, and which can be sent to another process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from farflung.base.errors import Unsupported


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what is equal for two dense tensors, that are not empty, only if they are the same piece of memory.

    A conjugate or negated view has its base's address, shape and strides, and other values.
    """
    lazily = tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, lazily


def bytes_of(tensor: Tensor) -> Any:
    """Return the values of a dense tensor as a numpy array `[n]` of bytes; no copy if they lie so on the CPU."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy()


def check_exchangeable(named: Iterable[tuple[str, Tensor]], takes_float8: bool = False) -> None:
    """Raise Unsupported for parameters and buffers that can't go from one process to another.

    Those are sparse ones, and floats of 8 bits unless the backend `takes_float8`, as NCCL does.
    """
    for name, tensor in named:
        if tensor.layout is not torch.strided:
            raise Unsupported(
                f"{name} is a sparse tensor ({tensor.layout}), which several processes can't train or exchange. Store "
                "it dense (to_dense()), or keep it outside of the model's parameters and buffers."
            )
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1 and not takes_float8:
            raise Unsupported(
                f"{name} is a {tensor.dtype} tensor, which can't be sent between processes on CPUs, or averaged. Store "
                "its bits as uint8 (.view(torch.uint8)), or another floating type."
            )
