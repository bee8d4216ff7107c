# SPDX-License-Identifier: Apache-2.0
"""The weights to evaluate of a state, and how those of two states differ: without loss, in few bytes.

The bits of two floats, as integers, differ by little if the values do, and in most values of 16 bits not at all at the
rates of fine-tuning. So a piece is: the gaps between values that have changed, and by how much, each byte of these
numbers in a plane of its own, deflated. Where 5 % have changed, all differences without gaps are 1.8 times as long.

Source: PULSESync (arXiv:2602.03839) sends the few values of bfloat16 that change in a step of reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from farflung.address.packed import Damaged, view_of
from farflung.comm.checksum import crc32
from farflung.comm.tensor_memory import bytes_of

try:
    from isal.isal_zlib import compress, decompressobj  # 10 times as fast as zlib
except ImportError:
    from zlib import compress, decompressobj  # type: ignore[assignment]  # other names of arguments

Row: TypeAlias = "tuple[str, str, Sequence[int], Sequence[int], Sequence[int]]"  # name, dtype, whole, offset, shape

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
_PIECE = 2**20  # values that are encoded at a time, at least, and at most twice as many
_LEVEL = 1  # higher ones save less than 1 %


def weights_in(parts: Mapping[str, Any], dtype: torch.dtype | None = None) -> Iterator[tuple[Row, Tensor]]:
    """Yield a rank's part of each tensor to evaluate, flat on the CPU, given its part of a state.

    Args:
        dtype: of floating values, as in `model.to(dtype)`; None: as the model has them.
    """
    rest = parts["place"].get("rest")
    for tree in [tree for part, tree in parts.items() if part != "place"] + [rest] * (rest is not None):
        for kind, rows in tree["names"].items():
            agreed = tree["agreed"][kind]
            chunks = _evaluated(**agreed) if isinstance(agreed, dict) else (x for bucket in agreed for x in bucket)
            for row, values in zip(rows, _cut(chunks, [prod(shape) for *_, shape in rows]), strict=True):
                values = values.to(getattr(torch, row[1]))
                yield row, values.to(dtype) if dtype is not None and values.is_floating_point() else values


def _evaluated(
    chunks: Sequence[Tensor], optimizer: Mapping[str, Any] | None = None, average: Sequence[Tensor] = ()
) -> Iterator[Tensor]:
    """Yield the values to evaluate: a running mean, or the slow weights of an anchor (`methods.momentum.lead_of`)."""
    ahead = 0.0  # which states of earlier versions don't have
    if optimizer is not None and not average:
        ahead = optimizer["param_groups"][0].get("look_ahead", 0.0)
    for k, chunk in enumerate(average or chunks):
        momentum = optimizer["state"].get(k, {}).get("momentum_buffer") if ahead and optimizer else None
        yield chunk.cpu() if momentum is None else torch.add(chunk.cpu(), momentum.cpu(), alpha=ahead)


def _cut(chunks: Iterable[Tensor], sizes: Sequence[int]) -> Iterator[Tensor]:
    """Yield tensors `[size]` of the values of chunks, one after the other; a chunk is made when it is needed."""
    coming, left = iter(chunks), torch.empty(0)
    for size in sizes:
        while left.numel() < size:
            chunk = next(coming).flatten()
            left = torch.cat([left, chunk]) if left.numel() else chunk
        yield left[:size]
        left = left[size:]


def assembled(ranks: Iterable[Iterable[tuple[Row, Tensor]]]) -> dict[str, Tensor]:
    """Return whole tensors by their names in the model, copies, given what `weights_in` yields for each rank."""
    found: dict[str, Tensor] = {}
    for pairs in ranks:
        for (name, _, whole, offset, shape), values in pairs:
            tensor = found.setdefault(name, torch.empty(list(whole), dtype=values.dtype))
            place = tuple(slice(at, at + length) for at, length in zip(offset, shape, strict=True))
            tensor[place] = values.view(list(shape))
    return found


@dataclass
class ReferenceWeights:
    """A rank's part of the weights to evaluate of one state, as the next one's differ from them.

    Attributes:
        name: of the state.
        rows: what `weights_in` yields; `dtype` is its own.
        bits: `[n]`, of all values, as integers as wide as `dtype`.
    """

    name: str
    dtype: torch.dtype
    rows: list[Row]
    bits: Tensor

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, pairs: Iterable[tuple[Row, Tensor]]) -> ReferenceWeights:
        rows, bits = [], [torch.empty(0, dtype=_kind(dtype))]
        for row, values in pairs:
            rows.append(row)
            bits.append(_bits(values, dtype))
        return cls(name, dtype, rows, torch.cat(bits))

    def pairs(self) -> Iterator[tuple[Row, Tensor]]:
        """Yield what `weights_in` has yielded."""
        start = 0
        for row in self.rows:
            own = getattr(torch, row[1])
            dtype, count = self.dtype if own.is_floating_point else own, prod(row[-1])
            width = -(-count * dtype.itemsize // self.dtype.itemsize)
            values = bytes_of(self.bits[start : start + width].clone())[: count * dtype.itemsize]
            yield row, values.view(dtype)
            start += width

    def advance(self, name: str, pairs: Iterable[tuple[Row, Tensor]]) -> dict[str, Any] | None:
        """Take over the weights of the next state; return the difference, or None if there are other tensors in it."""
        before, rows, pieces = self.name, iter(self.rows), []
        changed: list[Tensor] = []  # differences that are not encoded yet
        start = first = 0  # where the next values begin, and where those that are not encoded yet do
        for row, values in pairs:
            if next(rows, None) != row:
                return None
            for new in torch.split(_bits(values, self.dtype), _PIECE):
                held = self.bits[start : start + len(new)]
                changed.append(new - held)
                held.copy_(new)
                start += len(new)
                if start - first >= _PIECE:
                    pieces.append(_encoded(torch.cat(changed), self.bits[first:start]))
                    changed, first = [], start
        if changed:
            pieces.append(_encoded(torch.cat(changed), self.bits[first:start]))
        self.name = name
        return {"after": before, "pieces": pieces} if next(rows, None) is None else None

    def apply(self, name: str, difference: Mapping[str, Any]) -> None:
        """Take over the weights of the next state, given the difference; Damaged if it isn't one to these."""
        try:
            if difference["after"] != self.name:
                raise Damaged(f"it is one to the state {difference['after']}, and not to {self.name}")
            start = 0
            for piece in difference["pieces"]:
                held = self.bits[start : start + piece["size"]]
                _decode(piece, held)
                if crc32(view_of(held)) != piece["crc32"]:
                    raise Damaged("with it weights have other bits than those of the run")
                start += len(held)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise error if isinstance(error, Damaged) else Damaged(f"its form is wrong: {error}") from None
        if start != len(self.bits):
            raise Damaged(f"it has {start} of {len(self.bits)} values")
        self.name = name


def _kind(dtype: torch.dtype) -> torch.dtype:
    return torch.int16 if dtype.itemsize == 2 else torch.int32


def _bits(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes of values as integers as wide as `dtype`; at their end zeros, if they don't fill the last."""
    plain = bytes_of(values.contiguous())
    return pad(plain, (0, -len(plain) % dtype.itemsize)).view(_kind(dtype))


def _encoded(difference: Tensor, new: Tensor) -> dict[str, Any]:
    """Encode by how much integers `[n]` have changed, with a checksum of what they are now."""
    folded = (difference << 1) ^ (difference >> (8 * difference.itemsize - 1))  # small if the difference is near zero
    at = folded.nonzero().flatten()
    if 2 * len(at) > len(folded):
        at = torch.arange(len(folded))
    gaps = torch.diff(at, prepend=at.new_tensor([-1])).int() - 1
    planes = torch.cat([_planes(gaps), _planes(folded[at])])
    data = torch.frombuffer(bytearray(compress(view_of(planes), _LEVEL)), dtype=torch.uint8)
    return {"size": len(new), "changed": len(at), "crc32": crc32(view_of(new)), "data": data}


def _decode(piece: Mapping[str, Any], held: Tensor) -> None:
    """Add what `_encoded` has encoded to integers; Damaged if that can't be."""
    count, width = piece["changed"], held.itemsize
    if not 0 <= count <= len(held) == piece["size"]:
        raise Damaged(f"it changes {count} of {piece['size']} values, and {len(held)} are there")
    if not count:
        return
    num_bytes = (4 + width) * count
    try:
        plain = bytearray(decompressobj().decompress(view_of(piece["data"]), num_bytes))
    except Exception as error:  # isal has an error of its own
        raise Damaged(f"it can't be inflated: {error}") from None
    if len(plain) != num_bytes:
        raise Damaged(f"{len(plain)} of {num_bytes} bytes are in it")
    planes = torch.frombuffer(plain, dtype=torch.uint8)
    gaps, folded = _numbers(planes[: 4 * count], torch.int32), _numbers(planes[4 * count :], held.dtype)
    at = (gaps + 1).cumsum(0) - 1
    if not 0 <= int(at.min()) <= int(at.max()) < len(held):
        raise Damaged("it changes values that are not there")
    held[at] += ((folded >> 1) & torch.iinfo(held.dtype).max) ^ -(folded & 1)


def _planes(x: Tensor) -> Tensor:
    """Return the first byte of each number, then the second one of each, and so on."""
    return bytes_of(x).view(-1, x.itemsize).t().flatten()


def _numbers(planes: Tensor, kind: torch.dtype) -> Tensor:
    """Undo `_planes`."""
    return planes.view(kind.itemsize, -1).t().reshape(-1).view(kind)
