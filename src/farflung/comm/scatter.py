# SPDX-License-Identifier: Apache-2.0
"""One rank hands every rank a nested value of its own: tensors and objects together, in one collective.

Each rank's slice of the scatter is a packet that describes itself:

    [4 x 8 bytes: lengths of header, objects and payload, and the largest packet of this call][header][objects][payload]

The header holds structure, shapes and dtypes; it is encoded and decoded once and then found by its bytes. The objects
are the leaves that are no plain tensors, pickled. The payload is the tensors' bytes. The slices have a capacity that
all ranks derive alike from the packets before. When a packet does not fit, the first scatter carries the lengths
alone, and a second one the packets.
"""

from __future__ import annotations

import pickle
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from farflung.base.errors import RankFailure
from farflung.base.torch_internals import foreach_copy_
from farflung.base.tree import Spec, flatten, unflatten
from farflung.comm.exchange import carrier
from farflung.comm.group import Group, Work
from farflung.comm.packet import Layout, aligned, is_plain, raw

_LENGTHS = struct.Struct("=QQQQ")
_FIRST_BYTES = 4096  # the capacity before any packet was seen
_STEP_BYTES = 1024  # capacities are multiples of this, so that a few bytes more or less change nothing
_MEMORY = 8  # packets whose largest sets the capacity
_MAX_KNOWN = 64  # headers remembered; batches padded to their longest sample bring new shapes all the time


_Packet: TypeAlias = "tuple[bytes, bytes, _Form, list[Tensor]]"  # header, objects, form, tensors


class _Form:
    """What a header says: the structure, and which leaves are tensors of which shape and dtype (None: an object)."""

    def __init__(self, spec: Spec, kinds: tuple[Any, ...]) -> None:
        self.spec = spec
        self.kinds = kinds
        tensors = [kind for kind in kinds if kind is not None]
        self.layout = Layout([shape for shape, _ in tensors], [dtype for _, dtype in tensors])


class Scatter:
    """Sends from rank `src`: each rank receives a nested value of its own.

    Every rank makes one object, and the same number of calls: `send` (or `fail`) on the source, `receive` on the
    others. Tensors arrive on the CPU, detached. Objects are pickled: the ranks of a group trust each other.

    Args:
        group: the ranks.
        src: the rank in `group` that has the values.
    """

    def __init__(self, group: Group, src: int = 0) -> None:
        self._group = group
        self._src = src
        self._sizes = deque([_FIRST_BYTES], maxlen=_MEMORY)
        self._encoded: dict[Any, tuple[bytes, _Form]] = {}
        self._decoded: dict[bytes, _Form] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._under_way: Work | None = None

    def send(self, values: Sequence[Any]) -> Any:
        """Give `values[k]` to rank k, for each k, and return the one that belongs to this rank, as it is.

        The tensors are copied; they are still on their way when this returns, and `flush` waits for them.

        Args:
            values: a nested value for each rank of the group; leaves may be tensors and any picklable objects.

        Raises:
            ValueError: there is not one value for each rank.
        """
        size = self._group.size
        if len(values) != size:
            raise ValueError(f"Scatter.send: got {len(values)} values for {size} ranks; give one for each rank.")
        if size > 1:
            others = [k for k in range(size) if k != self._src]
            try:
                packets = {k: self._packed(values[k]) for k in others}
            except Exception as error:  # whatever an object's own code raises; it goes on, and the others hear of it
                self.fail(f"{type(error).__name__}: {error}")
                raise
            self._deliver(packets)
        return values[self._src]

    def flush(self) -> None:
        """Wait until what was sent last has left.

        Raises:
            RankFailure: a rank left or died.
        """
        work, self._under_way = self._under_way, None
        if work is not None:
            work.wait()

    def fail(self, reason: str) -> None:
        """Make the `receive` that the other ranks are in, or come to next, raise a `RankFailure` with `reason`."""
        if self._group.size > 1:
            word: _Packet = b"", pickle.dumps(reason), _Form(None, (None,)), []
            self._deliver({k: word for k in range(self._group.size) if k != self._src})

    def receive(self) -> Any:
        """Return the value that the source sent to this rank. Its tensors share one block of memory, and nobody else's.

        Raises:
            RankFailure: the source called `fail`.
        """
        capacity = max(self._sizes)
        buffer, lengths = self._collected(capacity)
        largest = lengths[3]
        self._sizes.append(_rounded(largest))
        if largest > capacity:
            buffer, lengths = self._collected(_rounded(largest))
        return self._unpacked(buffer, lengths)

    def _packed(self, value: Any) -> _Packet:
        leaves, spec = flatten(value)
        tensors: list[Tensor] = []
        objects: list[Any] = []
        kinds: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor) and is_plain(leaf):
                tensors.append(leaf)
                kinds.append((tuple(leaf.shape), leaf.dtype))
            else:
                objects.append(leaf)
                kinds.append(None)
        key = spec, tuple(kinds)
        known = self._encoded.get(key)
        if known is None:
            known = pickle.dumps(key), _Form(*key)
            _remember(self._encoded, key, known)
        header, form = known
        return header, pickle.dumps(objects) if objects else b"", form, tensors

    def _deliver(self, packets: dict[int, _Packet]) -> None:
        largest = max(
            _LENGTHS.size + aligned(len(header)) + aligned(len(objects)) + form.layout.nbytes
            for header, objects, form, _ in packets.values()
        )
        capacity = max(self._sizes)
        self._sizes.append(_rounded(largest))
        self.flush()  # the scratch is in use until then
        if largest > capacity:
            parts = self._parts(capacity)
            for rank in packets:
                _LENGTHS.pack_into(raw(parts[rank]), 0, 0, 0, 0, largest)
            self._scattered(parts[self._src], parts)
            capacity = _rounded(largest)
        parts = self._parts(capacity)
        for rank, (header, objects, form, tensors) in packets.items():
            _write(parts[rank], largest, header, objects, form.layout, tensors)
        self._under_way = self._started(parts[self._src], parts)

    def _parts(self, capacity: int) -> list[Tensor]:
        size = self._group.size
        if self._scratch.numel() < size * capacity:
            with torch.inference_mode(False):  # it is written in place later, in whatever mode
                self._scratch = torch.empty(size * capacity, dtype=torch.uint8, device="cpu")
        return list(self._scratch[: size * capacity].view(size, capacity).unbind())

    def _collected(self, capacity: int) -> tuple[Tensor, tuple[int, ...]]:
        buffer = torch.empty(capacity, dtype=torch.uint8, device="cpu")
        self._scattered(buffer, None)
        return buffer, _LENGTHS.unpack_from(raw(buffer))

    def _scattered(self, out: Tensor, parts: list[Tensor] | None) -> None:
        there = carrier(self._group)
        arrived = out.to(there)
        self._started(arrived, parts).wait()
        if arrived is not out:
            out.copy_(arrived)

    def _started(self, out: Tensor, parts: list[Tensor] | None) -> Work:
        there = carrier(self._group)
        sent = None if parts is None else [part.to(there) for part in parts]
        return self._group.scatter(out.to(there), sent, self._src)

    def _unpacked(self, buffer: Tensor, lengths: tuple[int, ...]) -> Any:
        header_end = _LENGTHS.size + lengths[0]
        objects_at = aligned(header_end)
        payload_at = aligned(objects_at + lengths[1])
        content = raw(buffer)
        objects = pickle.loads(content[objects_at : objects_at + lengths[1]]) if lengths[1] else []
        if lengths[0] == 0:
            raise RankFailure(f"rank {self._src} could not send: {objects}")
        header = bytes(content[_LENGTHS.size : header_end])
        form = self._decoded.get(header)
        if form is None:
            form = _Form(*pickle.loads(header))
            _remember(self._decoded, header, form)
        tensors = iter(form.layout.views(buffer[payload_at:]))  # the buffer is fresh: the value may keep it
        others = iter(objects)
        return unflatten(form.spec, [next(others) if kind is None else next(tensors) for kind in form.kinds])


def _write(
    part: Tensor, largest: int, header: bytes, objects: bytes, layout: Layout, tensors: Sequence[Tensor]
) -> None:
    content = raw(part)
    _LENGTHS.pack_into(content, 0, len(header), len(objects), layout.nbytes, largest)
    objects_at = _LENGTHS.size + aligned(len(header))
    payload_at = objects_at + aligned(len(objects))
    content[_LENGTHS.size : _LENGTHS.size + len(header)] = header
    content[objects_at : objects_at + len(objects)] = objects
    if tensors:
        with torch.no_grad():
            foreach_copy_(layout.views(part[payload_at:]), list(tensors))


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _STEP_BYTES) * _STEP_BYTES


def _remember(table: dict[Any, Any], key: Any, value: Any) -> None:
    if len(table) >= _MAX_KNOWN:
        table.clear()
    table[key] = value
