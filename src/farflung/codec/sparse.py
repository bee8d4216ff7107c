# SPDX-License-Identifier: Apache-2.0
"""The top-k codec: of each chunk only the largest values, where they are and roughly what they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from farflung.base.checks import check_whole
from farflung.base.errors import ConfigError
from farflung.codec.base import piece_size
from farflung.codec.wire_sizes import index_bits, packing, top_k_bytes

_MAGNITUDE = 0x7FFFFFFF  # all bits of an fp32 but its sign: as whole numbers they are in the order of the magnitudes
_NEGATIVE, _LARGE = 1, 2  # the bits of a code
_LEVELS = 2  # in bf16: its rounding, 1/512, is negligible next to that to two levels, and feedback sees it


@dataclass(frozen=True)
class TopK:
    """Send the `k` largest magnitudes of each `chunk` values, of two equal ones the first; the others are zero.

    With 2 bits, what is sent of a value is its sign and one of two levels of its chunk: low, the mean of the sent
    magnitudes below their mean m, or high, the mean of the others. Among codes with that threshold these levels leave
    the least squares, and so the codec contracts, which is what error feedback needs to converge. For each chunk

        |x - Q(x)|**2 <= |x|**2 - (1 - 2**-16) * (sum of sent magnitudes)**2 / k,

    about (1 - 1 / chunk) * |x|**2 at worst, and each single error is at most the largest magnitude. With 32 bits values
    are sent as they are: only what is not sent is in error, and nothing is if `k` is the whole chunk.

    The wire: two bf16 levels a chunk (with 2 bits), the values, the indices in ascending order. An index takes as many
    bits as the chunk needs, rounded up to an even number: 12 at 4096, two in three bytes. At the defaults that is
    64 * (12 + 2) / 4096 = 0.219 bit a value, and 0.008 for levels. A last, shorter chunk sends min(k, its length).

    A NaN counts as larger than all, and would make the levels of its chunk NaN. Keep what is not sent with
    `ErrorFeedback`, or it is lost.

    Args:
        k: values sent of a chunk.
        chunk: values in a chunk.
        bits: 2 or 32, of a sent value.

    Raises:
        ConfigError: a number is out of its range.

    Source: SparseLoCo (arXiv:2508.15706) for chunks, k, 2 bits and feedback. How it sets its four levels is not known
    to us [?]: the authors' earlier 8-bit code takes means of equal bins over six standard deviations of a tensor.
    """

    k: int = 64
    chunk: int = 4096
    bits: int = 2

    linear: ClassVar[bool] = False
    is_sparse: ClassVar[bool] = True  # a sum of several is not

    def __post_init__(self) -> None:
        check_whole("TopK: chunk", self.chunk, least=2, most=1 << 16)
        check_whole("TopK: k", self.k, least=1, most=self.chunk)
        if self.bits not in (2, 32):
            raise ConfigError(f"TopK(bits={self.bits!r}): values are sent with 2 or 32 bits.")

    @property
    def limit(self) -> float:
        return float(torch.finfo(torch.bfloat16 if self.bits == 2 else torch.float32).max)

    def encode(self, x: Tensor) -> Tensor:
        wire = torch.empty(self.wire_bytes(x.numel()), dtype=torch.uint8, device=x.device)
        chosen, levels, codes = [], [], []
        for rows in self._chunks(x):
            index = self._largest(rows)
            values = rows.gather(1, index)
            steps, code = _to_levels(values) if self.bits == 2 else (values[:0], values)
            chosen.append(index.view(-1))
            levels.append(steps.view(-1))
            codes.append(code.view(-1))
        head, body, places = self._cut(wire, x)
        head.copy_(torch.cat(levels).view(torch.uint8))
        body.copy_(_pack(torch.cat(codes), 2) if self.bits == 2 else torch.cat(codes).view(torch.uint8))
        places.copy_(_pack(torch.cat(chosen), index_bits(self.chunk)))
        return wire

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        index, values = self._sent(wire, out)
        return out.zero_().scatter_(0, index, values)

    def add(self, wire: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        index, values = self._sent(wire, out)
        if factor != 1:
            values.mul_(factor)
        return out.scatter_(0, index, out.gather(0, index).add_(values))  # no place is named twice

    def wire_bytes(self, n: int) -> int:
        return sum(top_k_bytes(n, self.k, self.chunk, self.bits))

    def _cut(self, wire: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(wire, list(top_k_bytes(x.numel(), self.k, self.chunk, self.bits)))

    def _chunks(self, x: Tensor) -> Iterator[Tensor]:
        """Yield fp32 `[rows, width]`: some chunks at a time, then the last one if it is shorter."""
        full = x.numel() - x.numel() % self.chunk
        for rows in torch.split(x[:full].view(-1, self.chunk), max(piece_size(x) // self.chunk, 1)):
            yield rows.float()
        if full < x.numel():
            yield x[full:].float().view(1, -1)

    def _largest(self, rows: Tensor) -> Tensor:
        """Return where the largest magnitudes are, `[rows, k]` in ascending order.

        Magnitude and place make one number, so that no two are equal and any order of search finds the same.
        """
        width = rows.shape[1]
        shift = (self.chunk - 1).bit_length()
        from_behind = torch.arange(width - 1, -1, -1, device=rows.device)
        keys = rows.view(torch.int32).bitwise_and(_MAGNITUDE).long().bitwise_left_shift_(shift).add_(from_behind)
        best = keys.topk(min(self.k, width), dim=1, sorted=False).values
        return (width - 1 - best.bitwise_and_((1 << shift) - 1)).sort(dim=1).values

    def _sent(self, wire: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Return where in `out` something was sent, and what, in its dtype."""
        full, rest = divmod(out.numel(), self.chunk)
        num_sent = full * self.k + min(self.k, rest)
        head, body, places = self._cut(wire, out)
        of_chunk = torch.arange(num_sent, device=out.device).div_(self.k, rounding_mode="floor")
        index = _unpack(places, index_bits(self.chunk), num_sent).add_(of_chunk * self.chunk)
        if self.bits == 32:
            return index, body.clone().view(torch.float32).to(out.dtype)
        code = _unpack(body, 2, num_sent)
        levels = head.clone().view(torch.bfloat16).to(out.dtype)
        values = levels[of_chunk * _LEVELS + code // _LARGE]
        return index, torch.where((code & _NEGATIVE).bool(), -values, values)


def _to_levels(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round `[rows, k]` to two magnitudes a row: bf16 `[rows, 2]` (low, high), and codes int64 `[rows, k]`."""
    sizes = values.abs()
    k = sizes.shape[1]
    is_large = sizes >= (sizes / k).sum(dim=1, keepdim=True)  # divided first, or the sum may overflow
    num_large = is_large.sum(dim=1, keepdim=True)
    low = (sizes / (k - num_large).clamp_(min=1)).masked_fill_(is_large, 0).sum(dim=1)
    high = (sizes / num_large.clamp(min=1)).masked_fill_(~is_large, 0).sum(dim=1)
    return torch.stack([low, high], dim=1).to(torch.bfloat16), is_large * _LARGE + (values < 0) * _NEGATIVE


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Put whole numbers below 2**`bits`, an even number up to 16, one after the other, the first in the lowest bits."""
    numbers, size = packing(bits)
    missing = -codes.numel() % numbers
    filled = torch.nn.functional.pad(codes, (0, missing)).view(-1, numbers)
    word = (filled << torch.arange(0, numbers * bits, bits, device=codes.device)).sum(dim=1, keepdim=True)
    return (word >> torch.arange(0, 8 * size, 8, device=codes.device)).bitwise_and_(255).to(torch.uint8).view(-1)


def _unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """Return the `n` numbers that were packed, int64."""
    numbers, size = packing(bits)
    word = (packed.view(-1, size).long() << torch.arange(0, 8 * size, 8, device=packed.device)).sum(1, keepdim=True)
    codes = word >> torch.arange(0, numbers * bits, bits, device=packed.device)
    return codes.bitwise_and_((1 << bits) - 1).view(-1)[:n]
