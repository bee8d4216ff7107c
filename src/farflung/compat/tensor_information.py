# SPDX-License-Identifier: Apache-2.0
"""What is known of tensors without their values: batch sizes, shapes and dtypes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from farflung.base.errors import ConfigError
from farflung.base.tree import is_container, leaves_of, not_a_tensor, recursively_apply


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
