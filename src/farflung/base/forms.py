# SPDX-License-Identifier: Apache-2.0
"""What is known of tensors without their values: batch sizes, shapes and dtypes, and which are the same memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from farflung.base.errors import ConfigError, Unsupported
from farflung.base.tree import is_container, leaves_of, not_a_tensor, recursively_apply


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor was left unpadded."""


def find_batch_size(data: Any) -> int:
    """Return the first dimension of the first leaf of a tree, which must be a tensor that has one.

    Raises:
        ConfigError: a container is empty, or the tensor has no dimension.
        WrongType: the first leaf is no tensor.
    """
    leaf = data
    while is_container(leaf):
        children = leaves_of(leaf)
        if not children:
            raise ConfigError(f"find_batch_size: this {type(leaf).__name__} is empty. Bring one that holds tensors.")
        leaf = children[0]
    if not isinstance(leaf, Tensor):
        raise not_a_tensor("find_batch_size", leaf)
    if leaf.dim() == 0:
        raise ConfigError("find_batch_size: a tensor without dimensions has no batch size. Bring one of one sample.")
    return leaf.shape[0]


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return what `find_batch_size` does, None where it raises."""
    try:
        return find_batch_size(data)
    except ConfigError:
        return None


@dataclasses.dataclass
class TensorInformation:
    """A tensor's shape and dtype: what is needed to make room for it."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: Any) -> bool:
    """Say whether `tensor_info` is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def get_data_structure(data: Any) -> Any:
    """Replace every tensor of a tree by its `TensorInformation`."""
    return recursively_apply(lambda x: TensorInformation(x.shape, x.dtype), data)


def get_shape(data: Any) -> Any:
    """Replace every tensor of a tree by the list of its sizes."""
    return recursively_apply(lambda x: list(x.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Replace every `TensorInformation` of a tree by a tensor of that form on the CPU, without values yet."""
    return recursively_apply(
        lambda form: torch.empty(form.shape, dtype=form.dtype), data_structure, test_type=is_tensor_information
    )


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what is equal for two dense tensors, that are not empty, only where they are the same piece of memory.

    A conjugate or negated view has its base's address, shape and strides, and other values.
    """
    lazily = tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, lazily


def bytes_of(tensor: Tensor) -> Any:
    """Return the values of a dense tensor as a numpy array `[n]` of bytes; no copy where they lie so on the CPU."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy()


def check_exchangeable(named: Iterable[tuple[str, Tensor]], takes_float8: bool = False) -> None:
    """Check that parameters and buffers can go from one process to another.

    Args:
        takes_float8: the backend knows 8-bit floats, as NCCL does.

    Raises:
        Unsupported: one is sparse, or a float of 8 bits.
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
