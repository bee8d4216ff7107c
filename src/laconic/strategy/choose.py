# SPDX-License-Identifier: Apache-2.0
"""The only branch on the kind of distribution."""

from __future__ import annotations

from laconic.base.enums import DistributedType
from laconic.config.handlers import DistributedDataParallelKwargs
from laconic.process.world import World
from laconic.strategy.base import Strategy
from laconic.strategy.ddp import DDP
from laconic.strategy.single import Single


def choose_strategy(world: World, ddp: DistributedDataParallelKwargs | None = None) -> Strategy:
    """Return how the processes of `world` train together: DDP when there are several, else nothing at all."""
    if world.kind == DistributedType.NO:
        return Single()
    return DDP(world.kind, world.group, world.device, ddp)
