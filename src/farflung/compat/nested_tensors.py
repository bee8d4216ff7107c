# SPDX-License-Identifier: Apache-2.0
"""Nested tensors: their batch size, shapes and structure, and how they are cut and joined."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from farflung.base.checks import wrong_type
from farflung.base.errors import ConfigError, ShapeMismatch, WrongType
from farflung.base.tree import flatten, is_container, leaves_of, not_a_tensor, recursively_apply, unflatten


def find_batch_size(data: Any) -> int:
    """Return the first dimension of the first leaf of a tree, which must be a tensor that has one."""
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


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Take `tensor_slice` of the first dimension of every tensor of a tree (the last two arguments are unused)."""
    if not isinstance(tensor_slice, (slice, tuple)):
        raise wrong_type("slice_tensors: tensor_slice", tensor_slice, "a slice, such as slice(0, 2)")
    return recursively_apply(lambda x: x[tensor_slice], data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate trees of one structure, tensor by tensor.

    Raises WrongType for trees of other structures or leaves, ShapeMismatch for shapes that differ beyond `dim`.
    """
    if not isinstance(data, (list, tuple)) or not data:
        raise wrong_type("concatenate: data", data, "a list of nested tensors of one structure")
    flat = [flatten(tree) for tree in data]
    if any(spec != flat[0][1] for _, spec in flat[1:]):
        specs = ", ".join(str(spec) for _, spec in flat)
        raise WrongType(f"concatenate: the structures differ: {specs}. Bring nested tensors of one structure.")
    if len(data) == 1:
        return data[0]
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    for leaf in (leaf for column in columns for leaf in column if not isinstance(leaf, Tensor)):
        raise wrong_type("concatenate: something in data", leaf, "a tensor, as nothing else can be concatenated")
    try:
        joined = [torch.cat(column, dim=dim) for column in columns]
    except (RuntimeError, IndexError, TypeError) as error:
        shapes = ", ".join(str([list(x.shape) for x in column]) for column in columns)
        what = f"concatenate: tensors of the shapes {shapes} can't be joined along dim={dim!r}."
        raise ShapeMismatch(what) from error
    return unflatten(flat[0][1], joined)
