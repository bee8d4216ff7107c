# SPDX-License-Identifier: Apache-2.0
"""The blockwise codecs as Triton kernels: one pass over memory for each direction, with the bits of the torch version.

Each program does some blocks. Results are bit-equal because each step is the same IEEE operation: divisions are rounded
to nearest (`div_rn`, as `/` is not), nothing is fused into a multiply-add (`enable_fp_fusion=False`), and rounding to a
whole number is to even, by adding and taking away 1.5 * 2**23. Only the sign of a zero may differ.

`blockwise` imports this file if Triton is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

_TILE, _WARPS = 1024, 4  # values in a program, if a block is no larger, and its warps of 32 threads


def _jit(function: Callable[..., Any]) -> Any:
    return triton.jit(function)


def encode(x: Tensor, scales: Tensor, codes: Tensor, *, block: int, bits: int, is_float: bool, top: float) -> None:
    """Fill `scales` `[ceil(n / block)]` fp32 and `codes` `[bytes]` uint8 from `x` `[n]` fp32, all on one CUDA device.

    Args:
        block: a power of two.
        is_float: e4m3 or E3M0, not whole numbers.
        top: the largest code.
    """
    _launch(_encode, x, block, x, scales, codes, 1 / top, block, bits, is_float, top)


def decode(
    scales: Tensor, codes: Tensor, out: Tensor, factor: float | None, *, block: int, bits: int, is_float: bool
) -> None:
    """Fill `out` `[n]` fp32 with what was encoded; with a factor, add that much of it instead."""
    times = 1.0 if factor is None else float(factor)
    _launch(_decode, out, block, scales, codes, out, times, block, bits, is_float, factor is not None)


def _launch(kernel: Any, values: Tensor, block: int, *arguments: Any) -> None:
    """Run a kernel on all blocks of `values`: many whole ones a program, and the shorter one at the end by itself."""
    n = values.numel()
    full, rows = n // block, max(1, _TILE // block)
    with torch.cuda.device(values.get_device()):
        if full:
            kernel[(-(-full // rows),)](0, full, n, rows, True, *arguments, num_warps=_WARPS, enable_fp_fusion=False)
        if n % block:
            kernel[(1,)](full, full + 1, n, 1, False, *arguments, num_warps=_WARPS, enable_fp_fusion=False)


@_jit
def _encode(  # type: ignore[no-untyped-def]
    first,
    end,
    n,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
    x,
    scales,
    codes,
    unit,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT: tl.constexpr,
    TOP: tl.constexpr,
):
    row = first + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    length = BLOCK if WHOLE else tl.minimum(n - row * BLOCK, BLOCK)
    half = (length * BITS + 7) // 8  # bytes of a block; with four bits, values in its first half
    lane = tl.arange(0, BLOCK * BITS // 8)[None, :]
    is_low = (lane < half) & (row < end)
    low = tl.load(x + row * BLOCK + lane, mask=is_low, other=0.0)
    highest = tl.max(tl.abs(low), axis=1, keep_dims=True)
    num_nan = tl.max((low != low).to(tl.int32), axis=1, keep_dims=True)
    if BITS == 4:
        high = tl.load(x + row * BLOCK + half + lane, mask=(lane < length - half) & (row < end), other=0.0)
        highest = tl.maximum(highest, tl.max(tl.abs(high), axis=1, keep_dims=True))
        num_nan = tl.maximum(num_nan, tl.max((high != high).to(tl.int32), axis=1, keep_dims=True))
    highest = tl.where(num_nan > 0, float("nan"), highest)
    is_tiny = highest < 7.888609052210118e-31  # 2**-100
    tl.store(scales + row, tl.where(is_tiny, 0.0, highest * unit), mask=row < end)
    step = tl.where(is_tiny, 0.0, tl.math.div_rn(1.0, highest) * TOP)
    code = _to_code(low * step, BITS, FLOAT)
    if BITS == 4:
        code = code + 16 * _to_code(high * step, BITS, FLOAT)
    tl.store(codes + row * (BLOCK * BITS // 8) + lane, (code & 255).to(tl.uint8), mask=is_low)


@_jit
def _decode(  # type: ignore[no-untyped-def]
    first,
    end,
    n,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
    scales,
    codes,
    out,
    factor,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT: tl.constexpr,
    ADD: tl.constexpr,
):
    row = first + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    length = BLOCK if WHOLE else tl.minimum(n - row * BLOCK, BLOCK)
    half = (length * BITS + 7) // 8
    lane = tl.arange(0, BLOCK * BITS // 8)[None, :]
    is_low = (lane < half) & (row < end)
    byte = tl.load(codes + row * (BLOCK * BITS // 8) + lane, mask=is_low, other=0).to(tl.int32)
    code = (byte ^ 128) - 128  # the sign
    scale = tl.load(scales + row, mask=row < end, other=0.0)
    start = out + row * BLOCK + lane
    if BITS == 4:
        high = (code + 8) >> 4
        is_high = (lane < length - half) & (row < end)
        _put(start + half, _value(high, BITS, FLOAT) * scale, is_high, factor, ADD)
        code = code - 16 * high
    _put(start, _value(code, BITS, FLOAT) * scale, is_low, factor, ADD)


@_jit
def _put(where, value, mask, factor, ADD: tl.constexpr):  # type: ignore[no-untyped-def]
    if ADD:
        value = tl.load(where, mask=mask, other=0.0) + value * factor
    tl.store(where, value, mask=mask)


@_jit
def _to_code(y, BITS: tl.constexpr, FLOAT: tl.constexpr):  # type: ignore[no-untyped-def]
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
def _value(code, BITS: tl.constexpr, FLOAT: tl.constexpr):  # type: ignore[no-untyped-def]
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
