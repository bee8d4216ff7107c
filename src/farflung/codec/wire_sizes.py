# SPDX-License-Identifier: Apache-2.0
"""What encoded values take on the wire, in bytes; asked by codecs and by what forecasts their cost."""

from __future__ import annotations

import math

_SCALE_BYTES = 4  # fp32
_VALUE_BYTES = 4
_LEVELS_BYTES = 2 * 2  # two levels a chunk, bf16


def blockwise_bytes(n: int, bits: int, block: int) -> int:
    """Return the bytes of `n` values of `bits` bits each, and of one scale for each `block` of them."""
    return scales_bytes(n, block) + (n * bits + 7) // 8


def scales_bytes(n: int, block: int) -> int:
    """Return the bytes of one scale for each `block` of `n` values."""
    return _SCALE_BYTES * -(-n // block)


def top_k_bytes(n: int, k: int, chunk: int, bits: int) -> tuple[int, int, int]:
    """Return the bytes of levels, values and indices where `k` of each `chunk` of `n` values go, in 2 or 32 bits."""
    num_sent = n // chunk * k + min(k, n % chunk)
    levels = _LEVELS_BYTES * -(-n // chunk) if bits == 2 else 0
    values = packed_bytes(num_sent, 2) if bits == 2 else _VALUE_BYTES * num_sent
    return levels, values, packed_bytes(num_sent, index_bits(chunk))


def index_bits(chunk: int) -> int:
    """Return the bits of a place in a chunk, rounded up to an even number."""
    return -(-(chunk - 1).bit_length() // 2) * 2


def packing(bits: int) -> tuple[int, int]:
    """Return how many numbers of `bits` bits fill how many whole bytes: 4 of 2 bits fill 1, 2 of 12 bits fill 3."""
    numbers = 8 // math.gcd(bits, 8)
    return numbers, numbers * bits // 8


def packed_bytes(n: int, bits: int) -> int:
    """Return the bytes of `n` packed numbers of `bits` bits."""
    numbers, size = packing(bits)
    return -(-n // numbers) * size
