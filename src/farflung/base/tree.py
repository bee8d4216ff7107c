# SPDX-License-Identifier: Apache-2.0
"""Nested data: what batches, outputs and metrics are made of, taken apart and put together again.

A *tree* is a tensor, or a list, tuple, named tuple, dataclass or mapping of trees; anything else is a leaf without
numbers.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from farflung.base.checks import shown, wrong_type
from farflung.base.errors import WrongType

Spec: TypeAlias = Any  # a hashable description of a tree's structure, made by `flatten`


def is_torch_tensor(tensor: Any) -> bool:
    """Return whether `tensor` is a torch tensor."""
    return isinstance(tensor, Tensor)


def is_namedtuple(data: Any) -> bool:
    """Return whether `data` is an instance of a `collections.namedtuple` or `typing.NamedTuple`."""
    return isinstance(data, tuple) and hasattr(data, "_fields") and hasattr(data, "_asdict")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Build a list, tuple or named tuple of the type of `obj` from the items of `generator`."""
    if is_namedtuple(obj):
        return type(obj)(*generator)
    return type(obj)(generator)


def _is_record(data: Any) -> bool:
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def _field_names(record: Any) -> tuple[str, ...]:
    return tuple([field.name for field in dataclasses.fields(record) if hasattr(record, field.name)])


def _filled(record: Any, fields: Iterable[tuple[str, Any]]) -> Any:
    """Set `fields` of a dataclass instance that may be frozen. Its constructor may take others, or derive some."""
    for name, value in fields:
        object.__setattr__(record, name, value)
    return record


def _remade(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if isinstance(like, defaultdict):
        return type(like)(like.default_factory, items)
    return type(like)(items)  # type: ignore[call-arg]


def rebuilt(data: Any, visit: Callable[[Any], Any]) -> Any:
    """Return a copy of the container `data` with `visit` applied to each child; raise TypeError if it is none."""
    if isinstance(data, (list, tuple)):
        return honor_type(data, [visit(value) for value in data])
    if isinstance(data, Mapping):
        return _remade(data, {key: visit(value) for key, value in data.items()})
    if _is_record(data):
        return _filled(copy.copy(data), [(name, visit(getattr(data, name))) for name in _field_names(data)])
    raise TypeError(f"{type(data).__name__} is not a container that Farflung takes apart")


def is_container(data: Any) -> bool:
    """Return whether `data` is a list, tuple, mapping or dataclass instance, so a node and not a leaf of a tree."""
    return isinstance(data, (list, tuple, Mapping)) or _is_record(data)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply `func(leaf, *args, **kwargs)` to every leaf of `data` that passes `test_type`; keep the structure.

    A leaf that does not pass is kept as it is, or raises WrongType with `error_on_other_type`.
    """
    if not callable(func):
        raise wrong_type("recursively_apply: func", func, "a function of a tensor")

    def visit(node: Any) -> Any:
        if test_type(node):
            return func(node, *args, **kwargs)
        if is_container(node):
            return rebuilt(node, visit)
        if error_on_other_type:
            raise not_a_tensor(getattr(func, "__name__", repr(func)).lstrip("_"), node)
        return node

    return visit(data)


def not_a_tensor(operation: str, leaf: Any) -> WrongType:
    """Return the error for a `leaf` that `operation` cannot use."""
    return WrongType(
        f"{operation}: found a {type(leaf).__name__} ({shown(leaf)}) among nested tensors. Only tensors in nested "
        "lists, tuples, dictionaries and dataclasses can be used here; for other objects use gather_object or "
        "broadcast_object_list."
    )


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | list[str] | None = None,
    into_dataclasses: bool = True,
) -> Any:
    """Move every tensor of a tree, and everything that has a `to` method, to `device`.

    `non_blocking` doesn't wait for copies from pinned memory; values of mappings under `skip_keys` stay where they are,
    and dataclass instances stay as they are without `into_dataclasses`.
    """
    try:
        target = device if isinstance(device, torch.device) else torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise wrong_type("send_to_device: device", device, "a device, such as 'cpu' or 'cuda:0'") from error
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())

    def visit(node: Any) -> Any:
        if isinstance(node, Tensor):
            return node.to(target, non_blocking=non_blocking)
        if type(node) is not dict and hasattr(node, "to") and not isinstance(node, type):
            try:
                return node.to(target, non_blocking=non_blocking)
            except TypeError:  # a `to` that takes the device alone
                return node.to(target)
        if isinstance(node, Mapping):
            return _remade(node, {key: value if key in skipped else visit(value) for key, value in node.items()})
        is_entered = isinstance(node, (list, tuple)) or (into_dataclasses and _is_record(node))
        return rebuilt(node, visit) if is_entered else node

    return visit(tensor)


def leaves_of(data: Any) -> list[Any]:
    """Return every leaf of a tree, tensors and others, in order."""
    return flatten(data)[0]


def batch_size_of(data: Any) -> int | None:
    """Return the first dimension of the first tensor in `data` that has one, or None when there is no such tensor."""
    for leaf in leaves_of(data):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    return None


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in `data`, or None when there is no tensor."""
    return next((leaf.device for leaf in leaves_of(data) if isinstance(leaf, Tensor)), None)


def listify(data: Any) -> Any:
    """Turn every tensor of a tree into nested lists of Python numbers."""
    return recursively_apply(lambda x: x.detach().cpu().tolist(), data)


def convert_to_fp32(tensor: Any) -> Any:
    """Convert every fp16 and bf16 tensor of a tree to fp32."""
    return recursively_apply(
        lambda x: x.float(),
        tensor,
        test_type=lambda x: isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16),
    )


def flatten(data: Any) -> tuple[list[Any], Spec]:
    """Take a tree apart: its leaves in order, and a hashable description of its structure.

    Trees of one structure have equal descriptions: same container types, lengths, keys in the same order.
    """
    leaves: list[Any] = []
    return leaves, _describe(data, leaves)


def _describe(node: Any, leaves: list[Any]) -> Spec:
    """Collect the leaves below `node`; return None for a leaf, (type, keys or None, children) for a container."""
    kind = type(node)
    if kind is Tensor or not is_container(node):
        leaves.append(node)
        return None
    if isinstance(node, (list, tuple)):
        return kind, None, tuple([_describe(child, leaves) for child in node])
    if isinstance(node, defaultdict):
        return kind, (node.default_factory, *node), tuple([_describe(child, leaves) for child in node.values()])
    if isinstance(node, Mapping):
        return kind, tuple(node), tuple([_describe(child, leaves) for child in node.values()])
    names = _field_names(node)
    return kind, names, tuple([_describe(getattr(node, name), leaves) for name in names])


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Any:
    """Build the tree that `spec` describes from `leaves`, both as `flatten` gives them."""
    return _build(spec, iter(leaves))


def _build(spec: Spec, supply: Iterator[Any]) -> Any:
    if spec is None:
        return next(supply)
    kind, keys, children = spec
    values = [_build(child, supply) for child in children]
    if keys is None:
        return kind(*values) if hasattr(kind, "_fields") else kind(values)
    if issubclass(kind, defaultdict):
        return kind(keys[0], zip(keys[1:], values, strict=True))
    if issubclass(kind, Mapping):
        return kind(dict(zip(keys, values, strict=True)))
    return _filled(object.__new__(kind), zip(keys, values, strict=True))
