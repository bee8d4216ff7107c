# SPDX-License-Identifier: Apache-2.0
"""The DDP models that `--outer` follows, and which of them have an outer loop together."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from farflung.base.errors import StateError, Unsupported
from farflung.base.torch_internals import compiled_from
from farflung.base.words import counted
from farflung.comm.recording import WeakHook
from farflung.hosts.driver import Driver, EpochTracker
from farflung.hosts.evaluation import AgreedState, LentWeights, end_evaluation
from farflung.outer.gradients import LocalDDP
from farflung.process.mesh import Mesh


class FollowedLoop:
    """The models of one outer loop, which is open from the first step on.

    Attributes:
        models: a model that is wrapped once the loop is open is not among them, and gets a loop of its own.
        driver: None before the first step and at the end.
    """

    def __init__(self, flush: Callable[[FollowedLoop], None]) -> None:
        self.models: list[FollowedModel] = []
        self.driver: Driver | None = None
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # that train the models
        self.epochs = EpochTracker(partial(flush, self))

    def take_driver(self) -> Driver | None:
        """Return the driver, whose loop has to be ended: the models have none from now on."""
        self.end_evaluations()
        driver, self.driver = self.driver, None
        return driver

    def end_evaluations(self) -> None:
        """Put this rank's own weights back into all models, which have no other ones without a driver."""
        if self.driver is not None:
            self.driver.end_evaluations()


class FollowedModel:
    """A DDP model that keeps its gradients, and the loop over it."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        has_warmup: bool,
        mesh: Mesh,
        shared: FollowedLoop,
        trains: Callable[[], None],
    ) -> None:
        self._averages_without_loop = has_warmup
        self.mesh, self.shared = mesh, shared
        shared.models.append(self)
        self.local = LocalDDP(ddp, self._averages, mesh.island)
        self.evaluation, self.saved = LentWeights(ddp, self.local.module, trains), AgreedState()
        self._trained = {name for name, one in self.local.module.named_parameters() if one.requires_grad}
        ddp.register_comm_hook = _no_second_hook  # type: ignore[method-assign]
        for whole in filter(None, (self.local.module, compiled_from(self.local.module))):
            hooks: Any = whole  # whose types are not complete in torch
            hooks.register_state_dict_post_hook(WeakHook(_put_agreed, self))
            hooks.register_load_state_dict_pre_hook(WeakHook(end_evaluation, self))
            hooks.register_load_state_dict_post_hook(WeakHook(_begin_anew, self))

    @property
    def driver(self) -> Driver | None:
        return self.shared.driver

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that required gradients when the model was wrapped."""
        return [one for name, one in self.local.module.named_parameters() if name in self._trained]

    def _averages(self) -> bool:
        return self._averages_without_loop if self.driver is None else self.driver.loop.is_warming

    def holds(self, module: nn.Module) -> bool:
        """Whether `module` is the model, or what it was compiled from; a copy of it has its hooks too."""
        return module is self.local.module or module is compiled_from(self.local.module)

    def end(self) -> None:
        """Follow the model no longer: restore DDP's gradient synchronization."""
        self.evaluation.end()
        self._averages_without_loop = True
        self.shared.models.remove(self)
        self.local.end()


def _no_second_hook(state: object, hook: Callable[..., object]) -> None:
    raise Unsupported(
        f"--outer keeps gradients where they are, so {getattr(hook, '__name__', hook)} would have nothing to compress. "
        "Remove register_comm_hook, and choose with --outer-codec how weights are compressed."
    )


def _put_agreed(one: FollowedModel, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put copies of the agreed weights into a state dict of a followed model."""
    if not one.holds(module) or one.driver is None or not one.driver.lends:
        return
    with one.driver.agreed():
        own = {key: value for key, value in state.items() if key.startswith(prefix) and torch.is_tensor(value)}
        state.update(copy.deepcopy(own))  # values that were tied still are
    is_between = one.driver.loop.steps_since_sync > 0 and one.driver.loop.is_first
    one.saved.note(state, own, one.driver.attempts, is_between)


def _begin_anew(one: FollowedModel, module: nn.Module, keys: Any) -> None:
    """Treat loaded weights as a new starting point, not as a step of training."""
    if not one.holds(module) or one.driver is None:
        return
    others = len(one.shared.models) - 1
    if others and one.shared.epochs.is_behind and not one.driver.loop.is_newcomer:
        raise StateError(
            f"load_state_dict: this DDP model has its outer loop together with {counted(others, 'other one')}, and in "
            "the middle of an epoch the replicas have different weights of these. Load before the first step or after "
            "an epoch, or start a fixed set of processes, without --elastic."
        )
    one.driver.loop.reset_anchor()
