# SPDX-License-Identifier: Apache-2.0
"""The state behind collectives over nested data: buffers and headers that are made once and used again and again.

Every operation begins with the same collective: each rank gathers the others' packets, cut to a capacity. Small values
are complete with that. What did not fit, and what lies on another device, follows in a second step that the operation
chooses; by then every rank has every header, so that all of them choose alike, or raise alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from farflung.base.errors import CollectiveMismatch, WrongType
from farflung.base.tree import Spec, flatten
from farflung.comm.group import Group
from farflung.comm.mismatch import called, calls_differ
from farflung.comm.packet import LENGTHS, Header, Headers, PacketBuffer, Signature, aligned, not_plain_bytes, raw

MIN_CAPACITY = 4 * 1024
MAX_CAPACITY = 128 * 1024  # up to here gloo's time is nearly all latency
_MEMORY = 4  # packets whose largest sets the capacity
_KEPT_BYTES = 64 * 1024 * 1024  # scratch larger than this is given back after use


class Buffers:
    """Memory for one packet of each rank, of one capacity: what this rank sends, and what all ranks sent."""

    def __init__(self, size: int, capacity: int) -> None:
        self.capacity = capacity
        with torch.inference_mode(False):  # they are written in place later, in whatever mode
            self.mine = PacketBuffer(torch.zeros(capacity, dtype=torch.uint8, device="cpu"))
            self.everyone = torch.zeros(size * capacity, dtype=torch.uint8, device="cpu")
            self.ranks = [PacketBuffer(row) for row in self.everyone.view(size, capacity).unbind()]
        self.content = raw(self.everyone)


class Packets:
    """What all ranks sent. All views into it are of memory that the next exchange overwrites."""

    def __init__(self, headers: list[Header], arrived: list[bool], buffers: Buffers) -> None:
        self.headers = headers  # by rank
        self.arrived = arrived  # for each rank, whether its payload came along with the header
        self.same = all(header is headers[0] for header in headers)
        self._buffers = buffers

    def views(self, rank: int) -> list[Tensor]:
        return self._buffers.ranks[rank].views(self.headers[rank])


class Exchange:
    """Exchanges nested values between the ranks of a group; the owner of the group owns one of these.

    Not for use by several threads at a time.
    """

    pickled_as: Callable[[], Exchange] | None = None  # finds it when it is unpickled; None: a new one is made

    def __init__(self, group: Group) -> None:
        self.group = group
        self.size = group.size
        self.rank = group.rank
        self._buffers: dict[int, Buffers] = {}  # by their capacity
        self._sizes = deque([MIN_CAPACITY], maxlen=_MEMORY)
        self._headers = Headers()
        self._scratch: dict[str, Tensor] = {}

    def __reduce__(self) -> tuple[Callable[..., Exchange], tuple[Any, ...]]:
        return (Exchange, (self.group,)) if self.pickled_as is None else (self.pickled_as, ())

    def flatten(self, signature: Signature, tree: Any) -> tuple[list[Tensor], Spec]:
        """Flatten `tree`, which must hold tensors alone: else all ranks raise."""
        leaves, spec = flatten(tree)
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or leaf.is_nested:
                self.fail(signature, not_plain_bytes(signature, leaf))
        return leaves, spec

    def share(self, signature: Signature, leaves: list[Tensor], spec: Spec, limit: int = MAX_CAPACITY) -> Packets:
        """Gather the packets of all ranks; if one failed, or made another call, all raise CollectiveMismatch.

        Args:
            leaves: what `flatten` returned with `spec`; if one is not made of plain bytes, all ranks raise.
            limit: bytes of payload that may travel behind the header; more travel by themselves.
        """

        def carries(header: Header) -> bool:
            num_bytes = header.layout.nbytes
            fits = num_bytes <= limit and header.payload_at + num_bytes <= MAX_CAPACITY
            return fits and self.wire(leaves).type == "cpu"

        try:
            header = self._headers.of(signature, spec, leaves, carries)
        except WrongType as error:
            self.fail(signature, error)
        packets = self._gathered(header, leaves)
        if not packets.same:
            for rank, other in enumerate(packets.headers):
                if other.failed is not None:
                    raise CollectiveMismatch(f"{called(other.signature)}: rank {rank} failed: {other.failed}")
            if any(other.signature != header.signature for other in packets.headers):
                raise calls_differ([other.signature for other in packets.headers])
        return packets

    def fail(self, signature: Signature, error: Exception) -> NoReturn:
        """Notify the other ranks, so that they raise too instead of waiting, and raise `error`."""
        if self.size > 1:
            reason = f"{type(error).__name__}: {str(error)[:1000]}"
            self._gathered(self._headers.failure(signature, reason), [])
        raise error

    def wire(self, leaves: Sequence[Tensor]) -> torch.device:
        """Return the device on which the payload of `leaves` travels: their own if the group can use it."""
        for leaf in leaves:
            if leaf.device.type != "cpu" and self.group.supports(leaf.device.type):
                return leaf.device
        return self.group.wire_device

    def scratch(self, name: str, num_bytes: int, device: torch.device) -> Tensor:
        """Return a buffer `[num_bytes]` uint8 that the next call with `name` may hand out again.

        On the CPU it is kept, because fresh pages cost more than the copy; elsewhere torch keeps blocks itself.
        """
        if device.type != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        kept = self._scratch.get(name)
        if kept is None or kept.numel() < num_bytes:
            with torch.inference_mode(False):
                kept = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            if num_bytes <= _KEPT_BYTES:
                self._scratch[name] = kept
        return kept[:num_bytes]

    def _gathered(self, header: Header, leaves: list[Tensor]) -> Packets:
        if self._headers.is_full:
            self._headers = Headers()
            self._buffers.clear()
        buffers = self._fitting_buffers()
        buffers.mine.write(header, leaves)
        self._gather(buffers.everyone, buffers.mine.packet)
        capacity = buffers.capacity
        lengths = [LENGTHS.unpack_from(buffers.content, rank * capacity) for rank in range(self.size)]
        totals = [LENGTHS.size + aligned(length) + payload for length, payload in lengths]
        self._sizes.append(max(totals))
        if max(length for length, _ in lengths) <= capacity - LENGTHS.size:
            starts = range(LENGTHS.size, self.size * capacity, capacity)
            encoded = [
                bytes(buffers.content[at : at + length]) for at, (length, _) in zip(starts, lengths, strict=True)
            ]
        else:
            encoded = self._long_headers(header, [length for length, _ in lengths])
        headers = [header if one == header.encoded else self._headers.read(one) for one in encoded]
        arrived = [
            payload == other.layout.nbytes and (total <= capacity or payload == 0)
            for total, (_, payload), other in zip(totals, lengths, headers, strict=True)
        ]
        return Packets(headers, arrived, buffers)

    def _long_headers(self, header: Header, lengths: Sequence[int]) -> list[bytes]:
        longest = aligned(max(lengths))
        mine = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        raw(mine)[: len(header.encoded)] = header.encoded
        everyone = torch.empty(self.size * longest, dtype=torch.uint8, device="cpu")
        self._gather(everyone, mine)
        content = raw(everyone)
        return [bytes(content[rank * longest : rank * longest + length]) for rank, length in enumerate(lengths)]

    def _fitting_buffers(self) -> Buffers:
        capacity = min(max(max(self._sizes), MIN_CAPACITY), MAX_CAPACITY)
        capacity = 1 << (capacity - 1).bit_length()
        buffers = self._buffers.get(capacity)
        if buffers is None:
            buffers = self._buffers[capacity] = Buffers(self.size, capacity)
        return buffers

    def _gather(self, everyone: Tensor, mine: Tensor) -> None:
        if self.group.supports("cpu"):
            self.group.all_gather(everyone, mine).wait()
            return
        gathered = torch.empty_like(everyone, device=self.group.wire_device)
        self.group.all_gather(gathered, mine.to(gathered.device)).wait()
        everyone.copy_(gathered)
