# SPDX-License-Identifier: Apache-2.0
"""Nested data as bytes: what a header says of a tree, and where each leaf lies in the payload behind it.

A packet is `[8 bytes: header's length][8 bytes: payload's length][header][payload]`. The header holds the operation,
the structure, and each leaf's shape, dtype and kind of device; the payload holds the leaves' bytes, so that all shapes
and dtypes travel together. Headers are JSON, so equal trees have equal headers.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from farflung.base.tree import Spec

ALIGN = 16  # bytes; the widest dtype, complex128, needs no more
LENGTHS = struct.Struct("=QQ")  # of header and payload, in front of each packet

Call: TypeAlias = tuple[Any, ...]  # an operation's name, then (argument, value) pairs on which all ranks must agree


class Kind(NamedTuple):
    """What a header says of a leaf."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def aligned(num_bytes: int) -> int:
    """Round `num_bytes` up to the next place where a leaf may begin."""
    return -(-num_bytes // ALIGN) * ALIGN


def is_plain(x: Tensor) -> bool:
    """Say whether `x` is plain bytes in memory: not sparse, quantized, nested, meta, or a wrapper of other tensors."""
    dense = not x.is_nested and x.layout is torch.strided and not x.is_quantized and not x.is_meta
    return dense and not hasattr(x, "__tensor_flatten__")


def raw(buffer: Tensor) -> memoryview:
    """Return the bytes of `buffer` `[n]` uint8 on the CPU; writing them writes the tensor."""
    return buffer.numpy().data


class Layout:
    """Where tensors of given shapes and dtypes lie in a payload: sorted by dtype, each at a multiple of 16 bytes.

    Attributes:
        nbytes: bytes of the whole payload, a multiple of 16.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> None:
        self.shapes = [tuple(shape) for shape in shapes]
        self.dtypes = list(dtypes)
        self.offsets = [0] * len(self.shapes)
        self.nbytes = 0
        for k in sorted(range(len(self.shapes)), key=lambda k: str(self.dtypes[k])):
            self.offsets[k] = self.nbytes
            self.nbytes += aligned(num_elements(self.shapes[k]) * self.dtypes[k].itemsize)

    def views(self, payload: Tensor) -> list[Tensor]:
        """Return each leaf's place in `payload` as a typed view.

        Args:
            payload: `[..., n]` uint8 with n >= `nbytes`; each of its rows begins at a multiple of 16 bytes.

        Returns:
            for each leaf a view `[..., *shape]`.
        """
        rows = payload[..., : self.nbytes]
        typed = {dtype: rows.view(dtype) for dtype in set(self.dtypes)}
        views = []
        for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True):
            whole = typed[dtype]
            size = (*whole.shape[:-1], *shape)
            stride = (*whole.stride()[:-1], *_strides(shape))
            views.append(whole.as_strided(size, stride, whole.storage_offset() + offset // dtype.itemsize))
        return views


class Form:
    """What a header says. An exchange keeps one object for each header, so `is` compares them.

    Attributes:
        call: the operation and the arguments that all ranks must agree on.
        tree: the structure, with names in place of types.
        kinds: of each leaf.
        failed: why the rank can't take part; None: it can.
        layout: where the leaves lie in the payload.
        payload_at: where the payload begins, in bytes from the packet's first.
        carried: bytes of payload that this rank sends behind the header; 0 when the payload travels by itself.
    """

    def __init__(self, header: bytes) -> None:
        self.header = header
        call, self.tree, kinds, self.failed = json.loads(header)
        self.call: Call = tuple(call)
        self.kinds = [Kind(tuple(shape), getattr(torch, dtype), device) for shape, dtype, device in kinds]
        self.layout = Layout([kind.shape for kind in self.kinds], [kind.dtype for kind in self.kinds])
        self.payload_at = LENGTHS.size + aligned(len(header))
        self.carried = 0

    def views(self, packets: Tensor) -> list[Tensor]:
        """Return each leaf's place in `packets` `[..., n]` uint8 as a view `[..., *shape]`."""
        return self.layout.views(packets[..., self.payload_at :])


def header_of(call: Call, spec: Spec, leaves: Sequence[Tensor]) -> bytes:
    """Encode what the other ranks need to know of a tree: `spec` and `leaves` as `flatten` gives them."""
    kinds = [(tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."), leaf.device.type) for leaf in leaves]
    return json.dumps((call, _named(spec), kinds, None), separators=(",", ":")).encode()


def header_of_failure(call: Call, reason: str) -> bytes:
    """Encode that this rank can't take part in `call`."""
    return json.dumps((call, None, (), reason)).encode()


def num_elements(shape: Sequence[int]) -> int:
    """Return the number of elements of a tensor of `shape`."""
    numel = 1
    for n in shape:
        numel *= n
    return numel


def _named(spec: Spec) -> Any:
    """Replace types by their names and keys by their texts."""
    if spec is None:
        return None
    kind, keys, children = spec
    if issubclass(kind, defaultdict):
        keys = keys[1:]  # the first one is the factory
    names = None if keys is None else tuple([repr(key) for key in keys])
    return kind.__name__, names, tuple([_named(child) for child in children])


def _strides(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for k in range(len(shape) - 1, 0, -1):
        strides[k - 1] = strides[k] * shape[k]
    return strides
