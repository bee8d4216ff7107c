# SPDX-License-Identifier: Apache-2.0
"""Error feedback: what a codec left out of one round is sent in a later one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from farflung.base.checks import check_number
from farflung.base.errors import ConfigError
from farflung.base.lazy import LazyModule
from farflung.codec.base import Codec

if TYPE_CHECKING:
    from farflung.codec import named as named
else:
    named = LazyModule("farflung.codec.named")


@dataclass(frozen=True)
class ErrorFeedback:
    """Send with this round's values what was left out of the last ones.

        e <- beta * e + x;  send Q(e);  e <- e - Q(e)

    With beta 1 all that was sent and the residual e together are the sum of all x: nothing is lost, only late. Below 1
    what is late fades, and e takes the place of an outer momentum. The residual is fp32 and belongs to the caller, one
    tensor as long as `x`, zeros at first, kept in checkpoints.

    Args:
        codec: what is wrapped. The wire, its size and its limit are this codec's; the wire is always of bytes.
        beta: what is kept of the residual from one round to the next. SparseLoCo takes 0.95.

    Raises:
        ConfigError: `beta` is not above 0 and at most 1, or `codec` feeds back already.

    Source: Error feedback fixes SignSGD (arXiv:1901.09847); with a beta, SparseLoCo (arXiv:2508.15706).
    """

    codec: Codec
    beta: float = 1.0

    linear: ClassVar[bool] = False  # what a wire leaves out must not depend on how much it will count in a sum

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", named.codec_of(self.codec))
        check_number("ErrorFeedback: beta", self.beta, above=0, most=1)
        if isinstance(self.codec, ErrorFeedback):
            raise ConfigError(f"ErrorFeedback({self.codec!r}): this codec already has a residual; pass one without.")

    @property
    def limit(self) -> float:
        return self.codec.limit

    @property
    def is_sparse(self) -> bool:
        return getattr(self.codec, "is_sparse", False)

    def encode_with(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the wire of `beta * residual + x`, and leave in `x` what it does not say: the next residual.

        `x` and the residual are `[n]`, of one dtype. The residual stays as it is: a failed round takes nothing of it.
        """
        wire = self.encode(x.add_(residual, alpha=self.beta))
        self.codec.add(wire, x, -1.0)
        return wire

    def encode(self, x: Tensor) -> Tensor:
        """Return the wire of `x` alone, as for values that no residual belongs to."""
        wire = self.codec.encode(x)
        return (wire.clone() if wire is x else wire).view(torch.uint8)

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        return self.codec.decode(wire, out)

    def add(self, wire: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        return self.codec.add(wire, out, factor)

    def wire_bytes(self, n: int) -> int:
        return self.codec.wire_bytes(n)
