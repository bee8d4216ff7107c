# SPDX-License-Identifier: Apache-2.0
"""What only some checkpoints need, loaded at its first use: torch's DCP takes 0.3 s, the outer loop 0.1 s."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farflung.base.lazy import LazyModule

if TYPE_CHECKING:
    from farflung.checkpoint import sharded as sharded
    from farflung.exchanged import states as states
else:
    sharded, states = LazyModule("farflung.checkpoint.sharded"), LazyModule("farflung.exchanged.states")
