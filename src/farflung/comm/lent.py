# SPDX-License-Identifier: Apache-2.0
"""Buckets that are sent from where the tensors live: nothing is packed, and nothing is written back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from farflung.comm.bucket import Buckets, Piece, cut_into_buckets
from farflung.comm.shards import addresses, is_plain, local

_LONG = 2**18  # elements of a tensor from which a message of its own costs less than a copy
_LINE_BYTES = 64  # torch lets its own tensors begin at multiples of it


class Lent(Buckets):
    """Buckets whose values are lent to the wire as they are, while what comes goes into the buffer.

    Short tensors move together when this is made: those of a bucket into one flat tensor, their home. Each gets a
    storage of its own in it, so that who saves, copies or shares a model notices nothing. One whose memory somebody
    else uses too (a view, an array of numpy, another tensor or process) stays where it is, and its values are copied
    into its place in the home and back. Long tensors stay where they are, in buckets of their own behind the others.

    Args:
        tensors: contiguous ones on the CPU, none of them a DTensor, all of the same dtype as the buckets.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        dtype: torch.dtype = torch.float32,
        *,
        cap_bytes: int,
        num_buffers: int | None = 2,
        tail: int = 0,
    ) -> None:
        self._homes: list[Tensor] = []
        super().__init__(tensors, dtype, cap_bytes=cap_bytes, num_buffers=num_buffers, tail=tail)
        self._settle(tensors)

    @property
    def has_homes(self) -> bool:
        """Whether there are short tensors, which bucket 0 holds then."""
        return bool(self._homes)

    def home_with_tail(self) -> Tensor:
        """Return the home of bucket 0 and the room behind it, `[sizes[0] + tail]`."""
        return self._homes[0]

    def lend(self, k: int, is_loaded: bool = False) -> list[Tensor]:
        """Return the values of bucket `k` where they are now, one after the other. Write to them, then `give_back`.

        Args:
            is_loaded: they were lent before, and no tensor has been written to since.
        """
        if k >= len(self._homes):
            return [piece.to(self.dtype) for piece in self._outside[k]]
        pieces, rooms = self._strays[k]
        if pieces and not is_loaded:
            torch._foreach_copy_(rooms, pieces)
        return [self._homes[k][: self.sizes[k]]]

    def give_back(self, k: int, values: Sequence[Tensor]) -> None:
        """Let the tensors have `values`, which `lend` returned and which may have been written to."""
        if k >= len(self._homes):
            for piece, value in zip(self._outside[k], values, strict=True):
                if piece is not value:  # it has been given another dtype
                    piece.copy_(value)
            return
        pieces, rooms = self._strays[k]
        if pieces:
            torch._foreach_copy_(pieces, rooms)
        increment_version(self._outside[k])  # as for all that is written in place, so that a stale backward is an error

    def rebind(self, tensors: Sequence[Tensor]) -> None:
        """Find the tensors again, and let those that are new here move in."""
        if addresses(tensors) != self._addresses:
            self._settle(tensors)

    def _planned(self, storages: Sequence[Tensor], cap: int) -> list[list[Piece]]:
        """Put the short tensors first, which are not cut, and of them those whose rows can be aligned."""
        long = [k for k, storage in enumerate(storages) if storage.numel() >= min(_LONG, cap)]
        short = sorted(set(range(len(storages))) - set(long), key=lambda k: (storages[k].nbytes % _LINE_BYTES != 0, k))
        first = cut_into_buckets(storages, short, cap, intact=True)
        self._num_homes = len(first)
        return first + cut_into_buckets(storages, long, cap)

    def _settle(self, tensors: Sequence[Tensor]) -> None:
        self._outside = []  # or they would seem to be in use
        for k in range(self._num_homes):
            if k == len(self._homes):
                self._homes.append(torch.zeros(self.sizes[k] + (self._tail if k == 0 else 0), dtype=self.dtype))
            for number, room in zip(self.owners(k), self.cut(k, self._homes[k][: self.sizes[k]]), strict=True):
                if _is_free(tensors[number], room) and tensors[number].data_ptr() != room.data_ptr():
                    _move(tensors[number], room)
        self._bind(tensors)
        self._strays = []
        for k, home in enumerate(self._homes):
            rooms = zip(self._outside[k], self.cut(k, home[: self.sizes[k]]), strict=True)
            away = [(piece, room) for piece, room in rooms if piece.data_ptr() != room.data_ptr()]
            self._strays.append(([piece for piece, _ in away], [room for _, room in away]))


def _is_free(tensor: Tensor, room: Tensor) -> bool:
    """Say whether nobody would notice if this tensor lay in `room`."""
    if not is_plain(tensor) or tensor.dtype != room.dtype or tensor.numel() != room.numel():
        return False
    return not tensor.untyped_storage().is_shared() and _num_uses(tensor) == _num_uses(torch.empty(1))


def _num_uses(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _move(tensor: Tensor, room: Tensor) -> None:
    begin = room.storage_offset() * room.itemsize
    storage = room.untyped_storage()[begin : begin + room.nbytes]
    moved = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())
    tensor.data = moved.copy_(local(tensor))
