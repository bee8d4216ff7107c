# SPDX-License-Identifier: Apache-2.0
"""What a codec is, and the two that torch can sum on the way: as it is, and cast to fewer bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from farflung.base.checks import check_word


class Codec(Protocol):
    """Turns values into a buffer for the wire, whose size depends on the number of values alone.

    All ranks get the same bits from the same wire.
    """

    @property
    def linear(self) -> bool:
        """Whether wires may be summed instead of what they stand for."""

    @property
    def limit(self) -> float:
        """The largest magnitude that survives; more becomes an infinity."""

    def encode(self, x: Tensor) -> Tensor:
        """Return the wire of `x` `[n]`, which stays as it is.

        A codec that is not linear returns one flat uint8 tensor of `wire_bytes(n)` bytes. The wire of a linear one has
        a dtype that can be summed, and may be `x` itself; its bytes can be decoded as well. `x` is contiguous, fp32,
        or fp64, of whose bits the wire keeps no more than of fp32's.
        """

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        """Fill `out` `[n]` with what `wire` stands for, and return it. `out` may be what was encoded."""

    def add(self, wire: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        """out += factor * what `wire` stands for, and return `out`. With factor 1 nothing rounds but the addition.

        Any other product is rounded before it is added, so that it is the same with and without fused arithmetic.
        """

    def wire_bytes(self, n: int) -> int: ...


_PIECE = 1 << 17


def piece_size(x: Tensor) -> int:
    """Return how many values of `x` to work on at a time: on the CPU as many as its cache holds, elsewhere all."""
    return _PIECE if x.device.type == "cpu" else max(x.numel(), 1)


@dataclass(frozen=True)
class Identity:
    """Send values as they are."""

    linear: ClassVar[bool] = True
    limit: ClassVar[float] = float("inf")

    def encode(self, x: Tensor) -> Tensor:
        return x

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        return out if wire is out else out.copy_(_typed(wire, out.dtype))

    def add(self, wire: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        return _add(_typed(wire, out.dtype), out, factor)

    def wire_bytes(self, n: int) -> int:
        return 4 * n


_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cast:
    """Send values rounded to 16 bits, `bf16` or `fp16`; they are summed so on the way, as in DDP's compression hooks.

    Each of the M - 1 additions of M wires rounds once more, so the relative error of a sum of like signs is at most
    M * 2**-9 for bf16 and M * 2**-12 for fp16.
    """

    dtype: str = "bf16"

    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_word("Cast: dtype", self.dtype, _CASTS)

    @property
    def limit(self) -> float:
        return float(torch.finfo(_CASTS[self.dtype]).max)

    def encode(self, x: Tensor) -> Tensor:
        return x.to(_CASTS[self.dtype])

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        return out.copy_(_typed(wire, _CASTS[self.dtype]))

    def add(self, wire: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        return _add(_typed(wire, _CASTS[self.dtype]), out, factor)

    def wire_bytes(self, n: int) -> int:
        return 2 * n


def _typed(wire: Tensor, dtype: torch.dtype) -> Tensor:
    return wire.clone().view(dtype) if wire.dtype == torch.uint8 else wire  # bytes may begin at an odd one


def _add(wire: Tensor, out: Tensor, factor: float) -> Tensor:
    size = piece_size(out)
    for values, target in zip(torch.split(wire, size), torch.split(out, size), strict=True):
        target.add_(values if factor == 1 else values.to(out.dtype) * factor)
    return out
