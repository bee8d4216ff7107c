# SPDX-License-Identifier: Apache-2.0
"""Batches as numbers of samples: counts, joins and cuts them, whatever containers they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farflung.base.errors import WrongType
from farflung.base.tree import (
    batch_size_of,
    flatten,
    is_container,
    is_namedtuple,
    leaves_of,
    recursively_apply,
    unflatten,
)

_ARRAYS = (Tensor, np.ndarray)


class _ListLeaf:
    """A list or tuple of values without arrays, such as strings or dicts of them: one leaf, with an entry a sample."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, part: slice) -> _ListLeaf:
        return _ListLeaf(self.items[part])


class BatchView:
    """A batch of `length` samples, taken apart: each leaf has an entry a sample, or belongs to all. None: not known."""

    def __init__(self, batch: Any) -> None:
        size = length_of_arrays(batch)
        is_leaf = partial(_is_list_leaf, size)
        self._leaves, self._spec = flatten(recursively_apply(_ListLeaf, batch, test_type=is_leaf))
        of_texts = (len(leaf) for leaf in self._leaves if isinstance(leaf, _ListLeaf))
        self.length = next(of_texts, None) if size is None else size

    def cut(self, part: slice) -> Any:
        return self._with([leaf[part] if self._has_entries(leaf) else leaf for leaf in self._leaves])

    def whole(self) -> Any:
        return self._with(self._leaves)

    def fits(self, other: BatchView) -> bool:
        """Return whether `other` can be concatenated with this one: the same structure, and entries of equal shapes."""
        return self._spec == other._spec and all(map(self._fit, self._leaves, other._leaves))

    def _has_entries(self, leaf: Any) -> bool:
        if isinstance(leaf, _ARRAYS):
            return leaf.ndim > 0 and leaf.shape[0] == self.length
        return isinstance(leaf, _ListLeaf) and len(leaf) == self.length

    def _fit(self, mine: Any, other: Any) -> bool:
        kinds = [next((kind for kind in _ARRAYS if isinstance(leaf, kind)), None) for leaf in (mine, other)]
        if kinds[0] is None or kinds[1] is None:
            return kinds[0] is kinds[1]
        return kinds[0] is kinds[1] and mine.shape[1:] == other.shape[1:] and mine.dtype == other.dtype

    def _with(self, leaves: list[Any]) -> Any:
        batch = unflatten(self._spec, leaves)
        if not any(isinstance(leaf, _ListLeaf) for leaf in leaves):
            return batch
        return recursively_apply(attrgetter("items"), batch, test_type=lambda node: isinstance(node, _ListLeaf))


def length_of(batch: Any) -> int | None:
    """Return how many samples a batch has; None if nothing in it shows that."""
    size = length_of_arrays(batch)
    return BatchView(batch).length if size is None else size


def length_of_arrays(batch: Any) -> int | None:
    """Return the first dimension of the first tensor that has one, or of the first numpy array."""
    if (size := batch_size_of(batch)) is not None:
        return size
    return next((len(leaf) for leaf in leaves_of(batch) if isinstance(leaf, np.ndarray) and leaf.ndim), None)


def concatenated(parts: Sequence[BatchView]) -> BatchView:
    """Join batches that fit together, sample after sample; what belongs to all samples is taken from the first."""
    first = parts[0]
    if len(parts) == 1:
        return first
    leaves = []
    for column in zip(*(part._leaves for part in parts), strict=True):
        if not all(part._has_entries(leaf) for part, leaf in zip(parts, column, strict=True)):
            leaves.append(column[0])
        elif isinstance(column[0], Tensor):
            leaves.append(torch.cat(column))
        elif isinstance(column[0], np.ndarray):
            leaves.append(np.concatenate(column))
        else:
            kind = type(column[0].items)
            leaves.append(_ListLeaf(kind(item for texts in column for item in texts.items)))
    return BatchView(first._with(leaves))


def extended(batch: BatchView, source: BatchView, count: int) -> BatchView:
    """Add the first `count` samples of `source` to `batch`, from its beginning again where it has too few."""
    fitting = source if source.length and batch.fits(source) else batch
    length = fitting.length
    assert length, "a batch that needs samples has one at least"
    parts = [batch]
    while count > 0:
        parts.append(BatchView(fitting.cut(slice(0, min(count, length)))))
        count -= length
    return concatenated(parts)


def _is_list_leaf(size: int | None, node: Any) -> bool:
    """Return whether a list has an entry a sample: plain values, or as many others, without arrays, as samples."""
    if not isinstance(node, (list, tuple)) or len(node) == 0 or is_namedtuple(node):
        return False
    if not any(isinstance(item, _ARRAYS) or is_container(item) for item in node):
        return True
    are_columns = all(isinstance(item, (list, tuple)) and len(item) == size for item in node) and all(
        _is_list_leaf(None, item) for item in node
    )
    return len(node) == size and not are_columns and not any(isinstance(leaf, _ARRAYS) for leaf in leaves_of(node))


def plain_or_none(batch: Any) -> Any:
    """Return a batch as plain data on the CPU; None if it holds other objects, such as a class of the script's."""
    try:
        return _plain(batch)
    except WrongType:
        return None


def _plain(node: Any) -> Any:
    kind = type(node)
    if kind is Tensor:
        value = node.detach().cpu()
        is_part = value.layout is torch.strided and value.untyped_storage().nbytes() > value.nbytes
        return value.clone() if is_part else value  # torch.save would write all that it is a view of
    if kind is dict:
        return {_plain(key): _plain(value) for key, value in node.items()}
    if kind is list or kind is tuple:
        return kind([_plain(value) for value in node])
    if node is None or kind in (int, float, bool, str, bytes, complex):
        return node
    if kind is np.ndarray and node.dtype.kind in "biufc":
        return node
    raise WrongType(f"a checkpoint can't hold a {kind.__name__}")


def state_of(keeper: Any) -> Any:
    """Return the state of a data set or a loader; None if it keeps none that a checkpoint can hold."""
    if not (hasattr(keeper, "state_dict") and hasattr(keeper, "load_state_dict")):
        return None
    return plain_or_none(keeper.state_dict())
