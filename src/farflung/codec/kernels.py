# SPDX-License-Identifier: Apache-2.0
"""The blockwise codecs as Triton kernels: one pass over memory for each direction, with the bits of the torch version.

Each program does one block. Results are bit-equal because each step is the same IEEE operation: divisions are rounded
to nearest (`div_rn`, as `/` is not), nothing is fused into a multiply-add (`enable_fp_fusion=False`), and rounding to a
whole number is to even, by adding and taking away 1.5 * 2**23. Only the sign of a zero may differ.

`blockwise` imports this file where Triton is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor


def _jit(function: Callable[..., Any]) -> Any:
    return triton.jit(function)


def encode(x: Tensor, scales: Tensor, codes: Tensor, *, block: int, bits: int, is_float: bool, top: float) -> None:
    """Fill `scales` `[ceil(n / block)]` fp32 and `codes` `[bytes]` uint8 from `x` `[n]` fp32, all on one CUDA device.

    Args:
        block: a power of two.
        is_float: e4m3 or E3M0, not whole numbers.
        top: the largest code.
    """
    if x.numel():
        with torch.cuda.device(x.get_device()):
            _encode[(scales.numel(),)](
                x, scales, codes, x.numel(), block, bits, is_float, top, 1 / top, **_options(block)
            )


def decode(
    scales: Tensor, codes: Tensor, out: Tensor, factor: float | None, *, block: int, bits: int, is_float: bool
) -> None:
    """Fill `out` `[n]` fp32 with what was encoded; with a factor, add that much of it instead."""
    if out.numel():
        with torch.cuda.device(out.get_device()):
            times = 1.0 if factor is None else float(factor)
            is_added = factor is not None
            _decode[(scales.numel(),)](
                scales, codes, out, out.numel(), times, block, bits, is_float, is_added, **_options(block)
            )


def _options(block: int) -> dict[str, Any]:
    return {"num_warps": min(8, max(1, block // 256)), "enable_fp_fusion": False}


@_jit
def _encode(
    x: Any,
    scales: Any,
    codes: Any,
    n: Any,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT: tl.constexpr,
    TOP: tl.constexpr,
    UNIT: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    start = row * BLOCK
    length = tl.minimum(n - start, BLOCK)
    half = (length * BITS + 7) // 8  # bytes of this block; with four bits, values in its first half
    lane = tl.arange(0, BLOCK * BITS // 8)
    low = tl.load(x + start + lane, mask=lane < half, other=0.0)
    highest = tl.max(tl.abs(low), axis=0)
    num_nan = tl.max((low != low).to(tl.int32), axis=0)
    if BITS == 4:
        high = tl.load(x + start + half + lane, mask=lane < length - half, other=0.0)
        highest = tl.maximum(highest, tl.max(tl.abs(high), axis=0))
        num_nan = tl.maximum(num_nan, tl.max((high != high).to(tl.int32), axis=0))
    highest = tl.where(num_nan > 0, float("nan"), highest)
    is_tiny = highest < 7.888609052210118e-31  # 2**-100
    tl.store(scales + row, tl.where(is_tiny, 0.0, highest * UNIT))
    step = tl.where(is_tiny, 0.0, tl.math.div_rn(1.0, highest) * TOP)
    code = _to_code(low * step, BITS, FLOAT)
    if BITS == 4:
        code = code + 16 * _to_code(high * step, BITS, FLOAT)
    tl.store(codes + row * (BLOCK * BITS // 8) + lane, (code & 255).to(tl.uint8), mask=lane < half)


@_jit
def _decode(
    scales: Any,
    codes: Any,
    out: Any,
    n: Any,
    factor: Any,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    start = row * BLOCK
    length = tl.minimum(n - start, BLOCK)
    half = (length * BITS + 7) // 8
    lane = tl.arange(0, BLOCK * BITS // 8)
    byte = tl.load(codes + row * (BLOCK * BITS // 8) + lane, mask=lane < half, other=0).to(tl.int32)
    code = (byte ^ 128) - 128  # the sign
    scale = tl.load(scales + row)
    if BITS == 4:
        high = (code + 8) >> 4
        _put(out + start + half + lane, _value(high, BITS, FLOAT) * scale, lane < length - half, factor, ADD)
        code = code - 16 * high
    _put(out + start + lane, _value(code, BITS, FLOAT) * scale, lane < half, factor, ADD)


@_jit
def _put(where: Any, value: Any, mask: Any, factor: Any, ADD: tl.constexpr) -> None:
    if ADD:
        value = tl.load(where, mask=mask, other=0.0) + value * factor
    tl.store(where, value, mask=mask)


@_jit
def _to_code(y: Any, BITS: tl.constexpr, FLOAT: tl.constexpr) -> Any:
    """Return int32 codes of fp32 values in units of the scale."""
    if FLOAT:
        if BITS == 4:  # E3M0: codes 1 to 7 begin at 1, 3, 6, 12, 24, 48, 96
            z = y * 128.0
            exponent = ((tl.maximum(tl.abs(z), 1.5).to(tl.int32, bitcast=True) + 0x400000) >> 23) - 127
            code = tl.where(z >= 1.0, exponent, tl.where(z <= -1.0, -exponent, 0))
        else:  # e4m3: below 2**-6 steps of 2**-9, above three bits of mantissa, rounded to even
            size = tl.abs(y)
            bits = size.to(tl.int32, bitcast=True)
            normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # exponents count from 7 instead of 127
            small = ((size * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
            code = tl.where(size < 0.015625, small, normal)
            code = tl.where(y.to(tl.int32, bitcast=True) < 0, code + 128, code)
    else:
        code = ((y + 12582912.0) - 12582912.0).to(tl.int32)
    return code


@_jit
def _value(code: Any, BITS: tl.constexpr, FLOAT: tl.constexpr) -> Any:
    """Return what int32 codes, with their sign, stand for in units of the scale, fp32."""
    if FLOAT:
        if BITS == 4:
            power = ((tl.abs(code) + 120) << 23).to(tl.float32, bitcast=True)
            value = tl.where(code > 0, power, tl.where(code < 0, -power, 0.0))
        else:
            size = code & 127
            normal = ((size << 20) + 1006632960).to(tl.float32, bitcast=True)  # 120 << 23
            value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
            value = tl.where(code < 0, -value, value)
    else:
        value = code.to(tl.float32)
    return value
