# SPDX-License-Identifier: Apache-2.0
"""Blockwise codecs: four or eight bits for each value, one fp32 scale for each block.

    scale = max|x| / top;  code = round(x / scale), |code| <= top;  Q(x) = code * scale

Each operation is one IEEE rounding to nearest, so the same wire stands for the same bits on every rank and device, and
encoding is deterministic. A block in which nothing is as large as 2**-100 is sent as zeros: its scale has no reciprocal
in fp32, and no weight moves by so little. NaN and infinities are kept from codecs by a vote; one that came nevertheless
would make its whole block NaN or infinite, and no other.

The wire: a scale for each block, then the codes. Two codes a and b of four bits make the byte 16 b + a; they stand half
a block apart, so that packing reads and writes memory in order. A last, shorter block has its own half.

Work goes in pieces that stay in a core's cache, about ten passes over each: a few tenths of a nanosecond a value. On
CUDA with Triton a kernel does it in one pass, with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from farflung.base.checks import shown
from farflung.base.errors import ConfigError
from farflung.codec.base import piece_size
from farflung.codec.wire_sizes import blockwise_bytes, scales_bytes

_LEAST = 2.0**-100  # the smallest max|x| of a block that is not sent as zeros
_HALF_MANTISSA = 1 << 22
_MANTISSA_BITS = 23
_WHOLE = 0x4B000000  # the bits of 2.0**23: for whole 0 <= k < 2**23, `_WHOLE + k` are the bits of 2.0**23 + k
_BIAS = 127
_LARGEST_FUSED = 4096  # values in a block that a kernel works on


def kernels(x: Tensor, block: int) -> Any:
    """Return the module `kernels`, or None if `x` `[n]` or the block is not for it.

    It is for fp32 on NVIDIA's devices if Triton is installed, and for blocks of a power of two. The module is loaded
    by name, as it can't be imported without Triton and shall not be before it is used.
    """
    is_power = block & (block - 1) == 0 and block <= _LARGEST_FUSED
    if x.device.type != "cuda" or x.dtype != torch.float32 or not is_power or torch.version.hip:
        return None
    return import_module("farflung.codec.kernels") if _has_triton() else None


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@dataclass(frozen=True)
class _Blockwise:
    """What the codecs of this file share: scales, blocks, pieces. The `block`, even, are values that share a scale."""

    block: int = 256

    linear: ClassVar[bool] = False
    limit: ClassVar[float] = torch.finfo(torch.float32).max
    bits: ClassVar[int]
    is_float: ClassVar[bool]
    top: ClassVar[float]  # the largest code

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block < 2 or self.block % 2:
            name = type(self).__name__
            raise ConfigError(f"{name}: block is {shown(self.block)}; it must be an even whole number, such as 256.")

    def _round(self, codes: Tensor, y: Tensor) -> None:
        """Fill `codes` `[rows, bytes]` uint8 from `y` `[rows, width]` fp32, |y| <= top, which is used up."""
        self._to_codes(y)
        if self.bits == 4:  # of codes from -7 to 7, 16 b + a fits into eight bits, and has one such b and a only
            low, high = y.chunk(2, dim=1)
            y = low.add_(high, alpha=16)
        codes.view(torch.int8).copy_(y)

    def _widen(self, codes: Tensor, y: Tensor) -> None:
        """Fill `y` `[rows, width]` fp32 with what `codes` `[rows, bytes]` uint8 stand for, in units of the scale."""
        low, high = y.chunk(2, dim=1) if self.bits == 4 else (y, None)
        low.copy_(codes.view(torch.int8))
        if high is not None:
            torch.mul(low, 1 / 16, out=high).round_()
            low.sub_(high, alpha=16)
        self._from_codes(y)

    def _to_codes(self, y: Tensor) -> None:
        """Turn values into codes, whole fp32 numbers, in place."""
        y.round_()

    def _from_codes(self, y: Tensor) -> None:
        """Turn codes into what they stand for, in place; whole numbers stand for themselves."""

    def encode(self, x: Tensor) -> Tensor:
        n = x.numel()
        wire = torch.empty(self.wire_bytes(n), dtype=torch.uint8, device=x.device)
        head = scales_bytes(n, self.block)
        scales, codes = wire[:head].view(torch.float32), wire[head:]
        if (fused := kernels(x, self.block)) is not None:
            fused.encode(x, scales, codes, top=self.top, **self._form)
            return wire
        scratch = torch.empty(self._piece(x), dtype=torch.float32, device=x.device)
        for start, rows, width in self._pieces(x):
            values = x[start : start + rows * width].float()
            if values.numel() < rows * width:
                values = pad(values, (0, rows * width - values.numel()))
            values = values.view(rows, width)
            y = scratch[: rows * width].view(rows, width)
            highest = torch.abs(values, out=y).amax(dim=1, keepdim=True)
            is_tiny = highest < _LEAST  # of NaN that is false
            first = start // self.block
            scales[first : first + rows].copy_((highest * (1 / self.top)).masked_fill_(is_tiny, 0).view(rows))
            steps = highest.reciprocal_().mul_(self.top).masked_fill_(is_tiny, 0)
            self._round(self._rows(codes, start, rows, width), torch.mul(values, steps, out=y))
        return wire

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        return self._decode(wire, out, None)

    def add(self, wire: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        return self._decode(wire, out, factor)

    def _decode(self, wire: Tensor, out: Tensor, factor: float | None) -> Tensor:
        head = scales_bytes(out.numel(), self.block)
        scales, codes = wire[:head].clone().view(torch.float32), wire[head:]  # cloned, as it may begin at any byte
        if (fused := kernels(out, self.block)) is not None:
            fused.decode(scales, codes, out, factor, **self._form)
            return out
        in_place = factor is None and out.dtype == torch.float32
        scratch = torch.empty(self.block if in_place else self._piece(out), dtype=torch.float32, device=out.device)
        for start, rows, width in self._pieces(out):
            target, first = out[start : start + rows * width], start // self.block
            fits = in_place and target.numel() == rows * width
            y = (target if fits else scratch[: rows * width]).view(rows, width)
            self._widen(self._rows(codes, start, rows, width), y)
            values = y.mul_(scales[first : first + rows].view(rows, 1)).view(-1)[: target.numel()]
            if factor is not None:
                target.add_(values if factor == 1 else values.to(out.dtype).mul_(factor))
            elif not fits:
                target.copy_(values)
        return out

    def wire_bytes(self, n: int) -> int:
        return blockwise_bytes(n, self.bits, self.block)

    @property
    def _form(self) -> dict[str, Any]:
        return {"block": self.block, "bits": self.bits, "is_float": self.is_float}

    def _piece(self, x: Tensor) -> int:
        return -(-min(piece_size(x), x.numel()) // self.block) * self.block

    def _pieces(self, x: Tensor) -> Iterator[tuple[int, int, int]]:
        """Yield where a piece starts, its number of blocks, and their width, filled up to whole bytes."""
        n = x.numel()
        full, step = n - n % self.block, self._piece(x)
        for start in range(0, full, step or 1):
            yield start, min(step, full - start) // self.block, self.block
        if n > full:
            in_a_byte = 8 // self.bits
            yield full, 1, -(-(n - full) // in_a_byte) * in_a_byte

    def _rows(self, codes: Tensor, start: int, rows: int, width: int) -> Tensor:
        first, size = start * self.bits // 8, rows * width * self.bits // 8
        return codes[first : first + size].view(rows, -1)


@dataclass(frozen=True)
class Int8(_Blockwise):
    """Whole numbers from -127 to 127: |x - Q(x)| <= max|x of the block| / 254 * (1 + 2**-13).

    Four times smaller than fp32 but for the scales, 8.125 bits a value at the default block. INTELLECT-1 trained with
    an int8 all-reduce of pseudo-gradients (arXiv:2412.01152), with another quantiser.
    """

    bits: ClassVar[int] = 8
    is_float: ClassVar[bool] = False
    top: ClassVar[float] = 127.0


@dataclass(frozen=True)
class Fp8(_Blockwise):
    """Eight-bit floats, e4m3: |x - Q(x)| <= max(|x| / 16, max|x of the block| * 2**-18) * (1 + 2**-13).

    Sign, four bits of exponent, three of mantissa, largest 448. Of small values it keeps more than `Int8`, of large
    ones less: at the block's maximum its error is up to 1/28 of it, that of `Int8` 1/254.
    """

    bits: ClassVar[int] = 8
    is_float: ClassVar[bool] = True
    top: ClassVar[float] = 448.0

    def _round(self, codes: Tensor, y: Tensor) -> None:
        codes.view(torch.float8_e4m3fn).copy_(y)

    def _widen(self, codes: Tensor, y: Tensor) -> None:
        # torch's own conversion takes ten times as long. Moved to the fields of an fp16, whose exponent counts from 15
        # instead of 7, the bits mean 2**-8 of the value; the shift leaves a second sign in bit 14.
        wide = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
        y.copy_(wide.view(torch.float16)).mul_(2.0**8)


@dataclass(frozen=True)
class Int4(_Blockwise):
    """Whole numbers from -7 to 7: |x - Q(x)| <= max|x of the block| / 14 * (1 + 2**-13).

    4.25 bits a value at the default block of 128.
    """

    block: int = 128

    bits: ClassVar[int] = 4
    is_float: ClassVar[bool] = False
    top: ClassVar[float] = 7.0


@dataclass(frozen=True)
class E3M0(_Blockwise):
    """Four-bit floats: |x - Q(x)| <= max(|x| / 3, max|x of the block| / 128) * (1 + 2**-13).

    A sign and three bits of exponent: code c > 0 stands for 2**(c - 7) of the block's maximum, code 0 for zero. The
    nearest of those is taken, of two equally near the larger. Of small values it keeps more than `Int4`, of values next
    to the maximum less. 4.25 bits a value at the default block of 128.

    Source: Streaming DiLoCo (arXiv:2501.18512) sends outer gradients so and sums them in fp32. To scale them by the
    block's maximum is our choice.
    """

    block: int = 128

    bits: ClassVar[int] = 4
    is_float: ClassVar[bool] = True
    top: ClassVar[float] = 1.0

    def _to_codes(self, y: Tensor) -> None:
        y.mul_(128)  # codes 1 to 7 begin at 1, 3, 6, 12, 24, 48, 96
        signs = y.clamp(-1, 1).to(torch.int8)  # 0 below 1
        y.abs_().clamp_(min=1.5)
        # The exponent, rounded: 1.5 to 3 give 1, to 6 give 2. As the low bits of a float it is a number again.
        exponents = y.view(torch.int32).add_(_HALF_MANTISSA).bitwise_right_shift_(_MANTISSA_BITS).add_(_WHOLE)
        exponents.view(torch.float32).sub_(2.0**_MANTISSA_BITS + _BIAS).mul_(signs)

    def _from_codes(self, y: Tensor) -> None:
        powers = y.abs().add_(2.0**_MANTISSA_BITS + _BIAS - 7)  # |code| - 7 as an exponent, in the low bits
        powers.view(torch.int32).bitwise_left_shift_(_MANTISSA_BITS)
        y.clamp_(-1, 1).mul_(powers)
