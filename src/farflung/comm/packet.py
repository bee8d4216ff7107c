# SPDX-License-Identifier: Apache-2.0
"""Nested data as bytes: what a header says of a tree, and where each leaf lies in the payload behind it.

A packet is `[8 bytes: header's length][8 bytes: payload's length][header][payload]`. The header holds the operation,
the structure, and each leaf's shape, dtype and kind of device; the payload holds the leaves' bytes, so that all shapes
and dtypes travel together. Headers are JSON, so equal trees have equal headers.
"""

from __future__ import annotations

import json
import math
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from farflung.base.errors import CollectiveMismatch, WrongType
from farflung.base.torch_internals import foreach_copy_
from farflung.base.tree import Spec, not_a_tensor
from farflung.comm.mismatch import by_rank, called

ALIGN = 16  # bytes; the widest dtype, complex128, needs no more
LENGTHS = struct.Struct("=QQ")  # of header and payload, in front of each packet

_MAX_HEADERS = 256

Signature: TypeAlias = tuple[Any, ...]  # an operation's name, then (argument, value) pairs that all ranks agree on


class LeafSpec(NamedTuple):
    """What a header says of a leaf."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def aligned(num_bytes: int) -> int:
    """Round `num_bytes` up to the next place where a leaf may begin."""
    return -(-num_bytes // ALIGN) * ALIGN


def is_plain_bytes(x: Tensor) -> bool:
    """Return whether `x` is plain bytes in memory: not sparse, quantized, nested, meta, or a wrapper of others."""
    dense = not x.is_nested and x.layout is torch.strided and not x.is_quantized and not x.is_meta
    return dense and not hasattr(x, "__tensor_flatten__")


def raw(buffer: Tensor) -> memoryview:
    """Return the bytes of `buffer` `[n]` uint8 on the CPU; writing them writes the tensor."""
    return buffer.numpy().data


class PayloadLayout:
    """Where tensors of given shapes and dtypes lie in a payload: in their order, each at a multiple of 16 bytes."""

    def __init__(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> None:
        self.shapes = [tuple(shape) for shape in shapes]
        self.dtypes = list(dtypes)
        self.offsets: list[int] = []
        self.nbytes = 0
        for k in range(len(self.shapes)):
            self.offsets.append(self.nbytes)
            self.nbytes += aligned(self._size(k))

    def _size(self, k: int) -> int:
        return math.prod(self.shapes[k]) * self.dtypes[k].itemsize

    def views(self, payload: Tensor) -> list[Tensor]:
        """Return each leaf's place in `payload` `[n]` uint8, from a multiple of 16 bytes on, as a typed view."""
        return [
            payload[offset : offset + self._size(k)].view(dtype).view(shape)
            for k, (shape, dtype, offset) in enumerate(zip(self.shapes, self.dtypes, self.offsets, strict=True))
        ]


class Header:
    """What a header says of the packet behind it. `Headers` keeps one object for each, so `is` compares them."""

    def __init__(self, encoded: bytes) -> None:
        self.encoded = encoded
        # The structure has names in place of types; `failed` says why the rank can't take part, None: it can.
        signature, self.tree, kinds, self.failed = json.loads(encoded)
        self.signature: Signature = tuple(signature)
        self.kinds = [LeafSpec(tuple(shape), getattr(torch, dtype), device) for shape, dtype, device in kinds]
        self.layout = PayloadLayout([kind.shape for kind in self.kinds], [kind.dtype for kind in self.kinds])
        self.payload_at = LENGTHS.size + aligned(len(encoded))  # in bytes from the packet's first
        self.carried = self.layout.nbytes  # that travel behind the header; 0 when the payload travels by itself

    def views(self, packet: Tensor) -> list[Tensor]:
        """Return each leaf's place in `packet` `[n]` uint8 as a typed view."""
        return self.layout.views(packet[self.payload_at :])


class Headers:
    """The headers that one rank has sent and received; each is encoded and decoded once."""

    def __init__(self) -> None:
        self._sent: dict[Any, Header] = {}  # by signature, structure and kinds of leaves
        self._known: dict[bytes, Header] = {}

    @property
    def is_full(self) -> bool:
        """Whether it is time to start over: a training loop knows a handful, but shapes may change in each batch."""
        return len(self._sent) + len(self._known) > _MAX_HEADERS

    def of(
        self,
        signature: Signature,
        spec: Spec,
        leaves: Sequence[Tensor],
        carries: Callable[[Header], bool] = lambda header: True,
    ) -> Header:
        """Return the header for a tree, `spec` and `leaves` as `flatten` gives them; WrongType: one is no plain bytes.

        Args:
            carries: whether the payload travels behind a header that is new.
        """
        key = signature, spec, tuple([(type(x), x.shape, x.dtype, x.device, x.layout) for x in leaves])
        header = self._sent.get(key)
        if header is None:
            for leaf in leaves:
                if not is_plain_bytes(leaf):
                    raise not_plain_bytes(signature, leaf)
            header = self._sent[key] = self.read(encode_header(signature, spec, leaves))
            header.carried = header.layout.nbytes if carries(header) else 0
        return header

    def failure(self, signature: Signature, reason: str) -> Header:
        """Return the header that says that this rank can't take part."""
        return self.read(json.dumps((signature, None, (), reason)).encode())

    def read(self, encoded: bytes) -> Header:
        header = self._known.get(encoded)
        if header is None:
            header = self._known[encoded] = Header(encoded)
        return header


class PacketBuffer:
    """Memory for a packet, `[capacity]` uint8, and the views into it that headers have asked for."""

    def __init__(self, packet: Tensor) -> None:
        self.packet = packet
        self._header: Header | None = None  # of the packet that was written last
        self._views: dict[Header, list[Tensor]] = {}

    def write(self, header: Header, leaves: Sequence[Tensor]) -> None:
        """Put a packet in: as much of lengths, header and payload as fits."""
        capacity = self.packet.numel()
        if header is not self._header:
            head = LENGTHS.pack(len(header.encoded), header.carried) + header.encoded
            fitting = head if len(head) <= capacity else head[: LENGTHS.size]
            raw(self.packet)[: len(fitting)] = fitting
            self._header = header
        if header.carried and header.payload_at + header.carried <= capacity:
            with torch.no_grad():
                foreach_copy_(self.views(header), list(leaves))

    def views(self, header: Header) -> list[Tensor]:
        """Return each leaf's place in a packet with this header as a typed view."""
        views = self._views.get(header)
        if views is None:
            with torch.inference_mode(False):  # a view made in inference mode could not be written outside of it
                views = self._views[header] = header.views(self.packet)
        return views


def encode_header(signature: Signature, spec: Spec, leaves: Sequence[Tensor]) -> bytes:
    """Encode what the other ranks need to know of a tree: `spec` and `leaves` as `flatten` gives them."""
    kinds = [(tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."), leaf.device.type) for leaf in leaves]
    return json.dumps((signature, _named(spec), kinds, None), separators=(",", ":")).encode()


def not_plain_bytes(signature: Signature, leaf: Any) -> WrongType:
    """Return the error for a leaf that can't be sent."""
    if not isinstance(leaf, Tensor):
        return not_a_tensor(signature[0], leaf)
    sort = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
    return WrongType(
        f"{signature[0]}: a {type(leaf).__name__} ({sort}, {leaf.dtype}, on {leaf.device}) can't be sent as plain "
        "bytes. Pass dense tensors (to_dense(), full_tensor(), dequantize()), or use gather_object or "
        "broadcast_object_list."
    )


def _named(spec: Spec) -> Any:
    """Replace types by their names and keys by their texts."""
    if spec is None:
        return None
    kind, keys, children = spec
    if issubclass(kind, defaultdict):
        keys = keys[1:]  # the first one is the factory
    names = None if keys is None else tuple([repr(key) for key in keys])
    return kind.__name__, names, tuple([_named(child) for child in children])


def require_alike(headers: Sequence[Header], advice: str, alike: Callable[[LeafSpec], Any] = lambda kind: kind) -> None:
    """Raise CollectiveMismatch, with the first difference, if the ranks' trees differ in structure or in a leaf.

    Args:
        advice: what to do about shapes that differ.
        alike: what must be equal of each leaf.
    """
    if all(header is headers[0] for header in headers):
        return
    name = called(headers[0].signature)
    if any(header.tree != headers[0].tree for header in headers):
        trees = by_rank("brought", dict(enumerate(_sketch(header.tree) for header in headers)))
        raise CollectiveMismatch(
            f"{name}: {trees}. All ranks must pass the same structure, with keys in the same order."
        )
    for k, path in enumerate(_paths(headers[0].tree)):
        kinds = [header.kinds[k] for header in headers]
        if any(alike(kind) != alike(kinds[0]) for kind in kinds):
            where = f"at {path}, " if path else ""
            one_device = all(kind.device == kinds[0].device for kind in kinds)
            one_dtype = all(kind.dtype == kinds[0].dtype for kind in kinds)
            leaves = by_rank("brought", dict(enumerate(_leaf(kind, not one_device) for kind in kinds)))
            if not one_device:
                advice = "Move them to the same type of device on all ranks."
            elif not one_dtype:
                advice = "Convert them to the same dtype on all ranks."
            raise CollectiveMismatch(f"{name}: {where}{leaves}. {advice}")


def _leaf(kind: LeafSpec, with_device: bool) -> str:
    text = f"{list(kind.shape)} {str(kind.dtype).removeprefix('torch.')}"
    return f"{text} on {kind.device}" if with_device else text


def _sketch(tree: Any) -> str:
    """`dict('a': tensor, 'b': list(tensor, tensor))`."""
    if tree is None:
        return "tensor"
    kind, keys, children = tree
    inside = [_sketch(child) for child in children]
    if keys is not None:
        inside = [f"{key}: {text}" for key, text in zip(keys, inside, strict=True)]
    return f"{kind}({', '.join(inside)})"


def _paths(tree: Any, path: str = "") -> Iterator[str]:
    """Yield where each leaf is, as one would write it: `['logits'][0]`."""
    if tree is None:
        yield path
        return
    _, keys, children = tree
    for key, child in zip(range(len(children)) if keys is None else keys, children, strict=True):
        yield from _paths(child, f"{path}[{key}]")
