# SPDX-License-Identifier: Apache-2.0
"""Rank 0 hands every rank a nested value of its own: tensors and objects together, in one collective.

Each rank's slice of the scatter is a packet, like those of an `Exchange`. Its first leaf is the rest of the value,
pickled: the structure, and all leaves that are no plain tensors. Slices have the capacity that the sender announced
last. If packets do not fit, or have long been much smaller, it first sends packets without a header, whose second
length is the new capacity.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from farflung.base.errors import RankFailure
from farflung.base.tree import flatten, unflatten
from farflung.comm.group import Group, Work
from farflung.comm.packet import LENGTHS, Header, Headers, PacketBuffer, Signature, is_plain_bytes, raw

_SIGNATURE: Signature = ("scatter",)
_LEAST_BYTES = 4096  # the capacity before any packet was seen
_STEP_BYTES = 1024  # capacities are multiples of this, so that a few bytes more or less change nothing
_REST_BYTES = 256  # what is pickled is filled up to a multiple of this, so that headers stay the same
_MEMORY = 8  # packets whose largest sets the capacity


class Scatter:
    """Sends from rank 0 of `group`: each rank receives a nested value of its own.

    Every rank makes one object, and the same number of calls: `send` (or `fail`) on rank 0, `receive` on the others.
    Tensors arrive on the CPU, detached. Objects are pickled: the ranks of a group trust each other.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._headers = Headers()
        self._capacity = _LEAST_BYTES
        self._sizes: deque[int] = deque(maxlen=_MEMORY)
        self._slices: list[PacketBuffer] = []  # on rank 0
        self._under_way: Work | None = None

    def __reduce__(self) -> tuple[Callable[..., Scatter], tuple[Any, ...]]:
        return Scatter, (self._group,)

    def send(self, values: Sequence[Any]) -> Any:
        """Give `values[k]` to rank k, for each k, and return this rank's, as it is.

        Leaves may be tensors and any picklable objects. The tensors are copied; they are still on their way when this
        returns, and `flush` waits for them.
        """
        if self._group.size > 1:
            try:
                packets = [self._packed(value) for value in values[1:]]
            except Exception as error:  # whatever an object's own code raises; the other ranks raise too
                self.fail(f"{type(error).__name__}: {error}")
                raise
            self._deliver(packets)
        return values[0]

    def flush(self) -> None:
        """Wait until what was sent last has left."""
        work, self._under_way = self._under_way, None
        if work is not None:
            work.wait()

    def fail(self, reason: str) -> None:
        """Make the `receive` that the other ranks are in, or come to next, raise a `RankFailure` with `reason`."""
        if self._group.size > 1:
            header = self._headers.failure(_SIGNATURE, reason)
            self._deliver([(header, [])] * (self._group.size - 1))

    def receive(self) -> Any:
        """Return the value that rank 0 sent to this rank; RankFailure if it called `fail`.

        Its tensors share one block of memory, and nobody else's.
        """
        length = 0
        while length == 0:
            buffer = torch.empty(self._capacity, dtype=torch.uint8, device=self._group.wire_device)
            self._group.scatter(buffer, None, 0).wait()
            buffer = buffer.cpu()
            length, announced = LENGTHS.unpack_from(raw(buffer))
            self._capacity = self._capacity if length else announced
        self._start_over_when_full()
        header = self._headers.read(bytes(raw(buffer)[LENGTHS.size : LENGTHS.size + length]))
        if header.failed is not None:
            raise RankFailure(f"rank 0 could not send: {header.failed}")
        rest, *leaves = header.views(buffer)  # the buffer is fresh: the value may keep it
        spec, is_tensor, objects = pickle.loads(raw(rest))
        tensors, others = iter(leaves), iter(objects)
        return unflatten(spec, [next(tensors if is_one else others) for is_one in is_tensor])

    def _packed(self, value: Any) -> tuple[Header, list[Tensor]]:
        leaves, spec = flatten(value)
        is_tensor = [isinstance(leaf, Tensor) and is_plain_bytes(leaf) for leaf in leaves]
        objects = [leaf for leaf, is_one in zip(leaves, is_tensor, strict=True) if not is_one]
        rest = bytearray(pickle.dumps((spec, is_tensor, objects)))
        rest.extend(bytes(-len(rest) % _REST_BYTES))
        tensors = [leaf for leaf, is_one in zip(leaves, is_tensor, strict=True) if is_one]
        sent, shape = flatten([torch.frombuffer(rest, dtype=torch.uint8), *tensors])
        return self._headers.of(_SIGNATURE, shape, sent), sent

    def _deliver(self, packets: list[tuple[Header, list[Tensor]]]) -> None:
        largest = max(header.payload_at + header.carried for header, _ in packets)
        self._sizes.append(largest)
        needed = -(-max(_LEAST_BYTES, *self._sizes) // _STEP_BYTES) * _STEP_BYTES
        self.flush()  # the slices are in use until then
        if largest > self._capacity or needed < self._capacity // 2:
            for one in self._own_slices():
                LENGTHS.pack_into(raw(one.packet), 0, 0, needed)
            self._start().wait()
            self._capacity, self._slices = needed, []
        for one, (header, leaves) in zip(self._own_slices()[1:], packets, strict=True):
            one.write(header, leaves)
        self._under_way = self._start()
        self._start_over_when_full()

    def _own_slices(self) -> list[PacketBuffer]:
        if not self._slices:
            with torch.inference_mode(False):  # they are written in place later, in whatever mode
                memory = torch.zeros(self._group.size, self._capacity, dtype=torch.uint8, device="cpu")
                self._slices = [PacketBuffer(row) for row in memory.unbind()]
        return self._slices

    def _start(self) -> Work:
        sent = [one.packet.to(self._group.wire_device) for one in self._slices]
        return self._group.scatter(torch.empty_like(sent[0]), sent, 0)

    def _start_over_when_full(self) -> None:
        if self._headers.is_full:
            self._headers = Headers()
            self._slices = []
