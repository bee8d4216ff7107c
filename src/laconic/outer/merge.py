# SPDX-License-Identifier: Apache-2.0
"""How local weights take over what was agreed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Merge(Protocol):
    """Brings an agreed point into the local weights, in place."""

    def __call__(self, local: Sequence[Tensor], anchor: Sequence[Tensor]) -> None:
        """Change `local`; `anchor` has as many tensors of the same shapes, in fp32."""


@dataclass(frozen=True)
class Replace:
    """local <- anchor."""

    def __call__(self, local: Sequence[Tensor], anchor: Sequence[Tensor]) -> None:
        """Copy."""
        torch._foreach_copy_(local, anchor)  # type: ignore[arg-type]
