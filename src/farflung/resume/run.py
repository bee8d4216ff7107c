# SPDX-License-Identifier: Apache-2.0
"""All objects of a run whose state is kept in checkpoints."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from farflung.comm.shards import is_sharded, mesh_of
from farflung.data.loader import PreparedLoader
from farflung.loop.optimizer import AcceleratedOptimizer
from farflung.loop.scheduler import AcceleratedScheduler
from farflung.loop.state import LoopState
from farflung.precision.base import Precision
from farflung.process.world import World
from farflung.strategy.base import Strategy

if TYPE_CHECKING:
    from farflung.config.sharding import FullyShardedDataParallelPlugin

Hooks = OrderedDict[int, Callable[..., Any]]


class PreparedObjects(Protocol):
    """What was prepared, in order."""

    models: list[nn.Module]
    optimizers: list[AcceleratedOptimizer]
    schedulers: list[AcceleratedScheduler]

    @property
    def loaders(self) -> Sequence[PreparedLoader]: ...


class OuterLoopRegistry(Protocol):
    """The outer loops that are open, and states that wait for loops to be opened."""

    waiting: list[dict[str, Any]]

    @property
    def live(self) -> Sequence[Any]: ...

    @property
    def leads(self) -> bool:
        """Whether this replica writes what all have in common, as the first one of those that come and go."""

    @property
    def member(self) -> int:
        """This replica's id, where replicas come and go; else 0."""

    @property
    def can_begin_here(self) -> bool:
        """Whether there are open loops, and none has done a step: they begin where the model is at the first one."""

    def state_of(self, module: nn.Module) -> dict[str, Any]:
        """Return the state dict of a model with the weights that all ranks agreed on, where there are such."""

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Give the open loops their states, in order; the other states wait."""


@dataclass(frozen=True)
class Run:
    """All objects whose state is kept."""

    world: World
    loop: LoopState
    precision: Precision
    strategy: Strategy
    registry: PreparedObjects
    outers: OuterLoopRegistry
    custom: list[Any]  # registered objects
    fsdp: FullyShardedDataParallelPlugin | None = None  # how models were asked to be sharded
    save_hooks: Hooks = field(default_factory=OrderedDict)  # called with the models before they are written or read
    load_hooks: Hooks = field(default_factory=OrderedDict)

    @property
    def modules(self) -> list[nn.Module]:
        """The models as they were prepared, and the modules inside them, in a fixed order."""
        return [*self.registry.models, *self.bare_models]

    @property
    def bare_models(self) -> list[nn.Module]:
        """The modules inside the prepared models, which hooks are given, and whose names files have."""
        return [self.strategy.unwrap(model) for model in self.registry.models]

    @property
    def bare_optimizers(self) -> list[torch.optim.Optimizer]:
        return [prepared.optimizer for prepared in self.registry.optimizers]

    @property
    def gathers(self) -> bool:
        """Whether what is sharded is written whole, as if it were not."""
        return self.fsdp is not None and self.fsdp.state_dict_type == "FULL_STATE_DICT"

    @property
    def spread(self) -> tuple[list[int], str] | None:
        """The ranks over which models are sharded, this one among them, and how; None: nothing is."""
        shards = (p for model in self.bare_models for p in model.parameters() if is_sharded(p))
        first = next(shards, None)
        return None if first is None else mesh_of(first)

    @property
    def replicas_differ(self) -> bool:
        """Whether ranks have trained alone, so that what is usually the same on all of them is not."""
        return any(optimizer.is_own for optimizer in self.registry.optimizers)
