# SPDX-License-Identifier: Apache-2.0
"""How local weights take over the new anchor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from farflung.base.checks import check_number
from farflung.base.torch_internals import foreach_copy_, foreach_lerp


class Merge(Protocol):
    """Merges the new anchor into the local weights, in place."""

    def __call__(self, local: Sequence[Tensor], anchor: Sequence[Tensor]) -> None:
        """Change `local`; `anchor` has as many tensors of the same shapes, in fp32."""


@dataclass(frozen=True)
class Replace:
    """local <- anchor."""

    def __call__(self, local: Sequence[Tensor], anchor: Sequence[Tensor]) -> None:
        foreach_copy_(local, anchor)


@dataclass(frozen=True)
class Blend:
    """local <- alpha * local + (1 - alpha) * anchor, which keeps part of the steps done while the round was in flight.

    Args:
        alpha: 0 discards those steps, 1 discards the anchor.

    Raises:
        ConfigError: `alpha` is not from 0 to 1.

    Source: Streaming DiLoCo (arXiv:2501.18512), with alpha 0.5.
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha, least=0, most=1)

    def __call__(self, local: Sequence[Tensor], anchor: Sequence[Tensor]) -> None:
        """Interpolate in fp32 and round once; alpha 0 copies, alpha 1 changes nothing."""
        if self.alpha == 0:
            foreach_copy_(local, anchor)
        elif self.alpha < 1:
            blended = [piece.to(point.dtype) for piece, point in zip(local, anchor, strict=True)]
            foreach_copy_(local, foreach_lerp(list(anchor), blended, self.alpha))
