# SPDX-License-Identifier: Apache-2.0
"""What one Accelerator trains with and has prepared, which is also what its checkpoints keep."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from farflung.base.torch_internals import compiled_from
from farflung.comm.shards import is_sharded, mesh_of
from farflung.config.sharding import FullyShardedDataParallelPlugin
from farflung.data.loader import PreparedLoader
from farflung.loop.optimizer import AcceleratedOptimizer
from farflung.loop.scheduler import AcceleratedScheduler
from farflung.loop.state import LoopState
from farflung.precision.base import Precision
from farflung.process.world import World
from farflung.strategy.base import Strategy

if TYPE_CHECKING:
    from farflung.data.slots import Slots

Hooks = OrderedDict[int, Callable[..., Any]]
_T = TypeVar("_T")


@dataclass
class Run:
    """What one Accelerator was made with, what it has prepared, in order, and which wrapper stands for which original.

    `evaluated` are those of `models` that were prepared for evaluation alone; `unaveraged` are parameters that must not
    train, see `Strategy.unaveraged`; `slots` are the shares of a replica that comes and goes, None if the replicas of
    the run are fixed.
    """

    world: World
    loop: LoopState
    precision: Precision
    strategy: Strategy
    fsdp: FullyShardedDataParallelPlugin | None = None  # how models were asked to be sharded
    outers: Any = None  # the `OuterController`, a room above: open loops, and states that wait; set for a checkpoint
    slots: Slots | None = None
    models: list[nn.Module] = field(default_factory=list)
    evaluated: list[nn.Module] = field(default_factory=list)
    unaveraged: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    schedulers: list[AcceleratedScheduler] = field(default_factory=list)
    loaders: list[PreparedLoader] = field(default_factory=list)
    custom: list[Any] = field(default_factory=list)  # registered objects
    save_hooks: Hooks = field(default_factory=OrderedDict)  # called with `models` before they are written or read
    load_hooks: Hooks = field(default_factory=OrderedDict)
    _known: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def find(self, thing: Any) -> Any:
        """Return the prepared form of `thing`, which may be that form itself, or None."""
        name = self._known.get(id(thing))
        return None if name is None else name[1]

    def resolve(self, model: Any) -> Any:
        """Return the prepared form of a model that was unwrapped or compiled since; `model` itself if it is unknown."""
        found = self.find(model)
        if found is None and isinstance(model, nn.Module):
            found = self.find(compiled_from(model))
        return model if found is None else found

    def add(self, listed: list[_T], original: Any, prepared: _T) -> _T:
        """Append `prepared`, which stands for `original` from now on, to one of the lists, and return it."""
        listed.append(prepared)
        setattr(prepared, "_is_accelerate_prepared", True)  # noqa: B010  libraries ask; of what class it is, is open
        self._known[id(original)] = (original, prepared)  # the original is kept alive, so its id stays its own
        self._known[id(prepared)] = (prepared, prepared)
        return prepared

    def clear(self) -> None:
        for listed in (self.models, self.evaluated, self.unaveraged, self.optimizers, self.schedulers, self.loaders):
            listed.clear()
        self._known.clear()

    @property
    def trained(self) -> list[nn.Module]:
        """Those of `models` that are not for evaluation alone and have something that requires a gradient."""
        left_out = {id(model) for model in self.evaluated}
        return [
            model
            for model in self.models
            if id(model) not in left_out and any(p.requires_grad for p in model.parameters())
        ]

    @property
    def is_training(self) -> bool:
        """Whether a model that is trained is in train mode, or there is none yet."""
        return not self.trained or any(model.training for model in self.trained)

    @property
    def modules(self) -> list[nn.Module]:
        """The models as they were prepared, and the modules inside them, in a fixed order."""
        return [*self.models, *self.bare_models]

    @property
    def bare_models(self) -> list[nn.Module]:
        """The modules inside the prepared models, whose names files have."""
        return [self.strategy.unwrap(model) for model in self.models]

    @property
    def bare_optimizers(self) -> list[torch.optim.Optimizer]:
        return [prepared.optimizer for prepared in self.optimizers]

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
        return any(optimizer.is_own for optimizer in self.optimizers)
