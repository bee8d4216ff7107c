# SPDX-License-Identifier: Apache-2.0
"""The only branch on the kind of distribution."""

from __future__ import annotations

from farflung.base.enums import DistributedType
from farflung.config.handlers import DistributedDataParallelKwargs
from farflung.process.world import World
from farflung.strategy.base import Strategy
from farflung.strategy.ddp import DDP
from farflung.strategy.single import Single


def choose_strategy(world: World, ddp: DistributedDataParallelKwargs | None = None) -> Strategy:
    """Return how the processes of `world` train together: DDP when there are several, else nothing at all."""
    if world.kind == DistributedType.NO:
        return Single()
    return DDP(world.kind, world.group, world.device, ddp)
