# SPDX-License-Identifier: Apache-2.0
"""What only some checkpoints need, loaded at its first use: torch's DCP takes 0.3 s, the outer loop 0.1 s."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farflung.checkpoint.sharded import (
        ShardPlanner as ShardPlanner,
        ShardReader as ShardReader,
        merge_shards as merge_shards,
        nested as nested,
    )
    from farflung.outer.merge_states import MergedState as MergedState, merge_states as merge_states


_WHERE = {"merge_states": "farflung.outer.merge_states"}


def __getattr__(name: str) -> Any:
    return getattr(import_module(_WHERE.get(name, "farflung.checkpoint.sharded")), name)
