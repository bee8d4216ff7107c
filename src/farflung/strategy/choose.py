# SPDX-License-Identifier: Apache-2.0
"""The only branch on the kind of distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from farflung.base.enums import DistributedType
from farflung.base.lazy import LazyModule
from farflung.config.handlers import DistributedDataParallelKwargs
from farflung.config.sharding import FullyShardedDataParallelPlugin
from farflung.process.mesh import Mesh
from farflung.process.world import World
from farflung.strategy.base import Strategy
from farflung.strategy.ddp import DDP

if TYPE_CHECKING:
    from farflung.strategy import fsdp as fsdp_strategy
else:
    fsdp_strategy = LazyModule("farflung.strategy.fsdp")


def choose_strategy(
    world: World,
    mesh: Mesh,
    ddp: DistributedDataParallelKwargs | None = None,
    fsdp: FullyShardedDataParallelPlugin | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Strategy:
    """Return how the processes of `world` train together: FSDP if a plugin asks for it, DDP, or nothing at all.

    FSDP computes in `compute_dtype` if its plugin does not say.
    """
    is_alone = world.kind == DistributedType.NO
    strategy: Strategy
    if fsdp is None:
        strategy = Strategy(mesh) if is_alone else DDP(world.kind, mesh, world.device)
    elif is_alone:
        strategy = fsdp_strategy.OneShard(mesh, world.device, fsdp)
    else:
        strategy = fsdp_strategy.FSDP(mesh, world.device, fsdp, compute_dtype)
    strategy.ddp_handler = ddp
    return strategy
