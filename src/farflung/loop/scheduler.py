# SPDX-License-Identifier: Apache-2.0
"""A prepared learning-rate scheduler: it ticks when its optimizers have really stepped.

Existing scripts compute a schedule's length as "how many per-device batches will be processed in all", so by default
one optimizer step ticks as often as there are processes with batches of their own: the ranks of tensor parallelism
share theirs. `scheduler_ticks="per_update"` gives torch's own rule.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import length_hint
from typing import Any, Literal

import torch.distributed as dist
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from farflung.base.torch_internals import sequence_of
from farflung.base.words import counted
from farflung.loop.optimizer import AcceleratedOptimizer
from farflung.process.world import current_world

Ticks = Literal["per_process", "per_update"]


class AcceleratedScheduler:
    """A scheduler that follows its optimizers.

    Args:
        optimizers: the prepared optimizers to follow, or the one.
        step_with_optimizer: False ticks on each call, whatever the optimizers did.
        split_batches: an update ticks once; otherwise as often as there are processes.
        ticks: how often an update ticks, or what returns that in each; None: as `split_batches` says.
        warns: whether this process warns of a schedule that does not fit; one of all is enough.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        optimizers: Sequence[AcceleratedOptimizer] | AcceleratedOptimizer,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        ticks: int | Callable[[], int] | None = None,
        warns: bool = True,
    ) -> None:
        if ticks is None:
            world = current_world()
            ticks = 1 if split_batches or world is None else world.size
        self.scheduler = scheduler
        self.optimizers = [optimizers] if isinstance(optimizers, AcceleratedOptimizer) else list(optimizers)
        self.step_with_optimizer = step_with_optimizer
        self._ticks = 1 if isinstance(scheduler, ReduceLROnPlateau) else ticks
        self._total = getattr(scheduler, "total_steps", None)
        self._horizon = horizon_of(scheduler)
        self._warns = warns
        self._was_below_zero = False
        self._rates = getattr(scheduler, "get_last_lr", list)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Tick when the accumulation window is complete and no optimizer skipped its step, else do nothing."""
        scheduler = self.scheduler
        if self.step_with_optimizer:
            for optimizer in self.optimizers:
                if not optimizer.window_is_complete or (optimizer.step_was_skipped and not optimizer.in_lockstep):
                    return
            if self._horizon is not None and scheduler.last_epoch >= self._horizon and self._per_update:
                self._warn(f"ended after {counted(self._horizon, 'step')}, but training continues")
                self._horizon = None
            for _ in range(self._per_update):
                # A OneCycleLR raises past its end, and the ticks of the last update may reach over it.
                if self._total is None or scheduler.last_epoch < self._total:
                    scheduler.step(*args, **kwargs)
        else:
            scheduler.step(*args, **kwargs)
        if not self._was_below_zero:
            rates = [rate for rate in self._rates() if isinstance(rate, float) and rate < 0]
            if rates:
                self._was_below_zero = True
                self._warn(f"gives {min(rates):.3g} after {counted(scheduler.last_epoch, 'step')}, a rate below zero")

    @property
    def _per_update(self) -> int:
        return self._ticks() if callable(self._ticks) else self._ticks

    def _warn(self, what: str) -> None:
        """Warn on the main process of what is wrong with the schedule, and name a length that would fit."""
        if not self._warns:
            return
        advice, ticks = "", self._per_update
        loop = self.optimizers[0].loop_state if self.optimizers else None
        length = -1 if loop is None else length_hint(loop.current, -1)  # -1: no loader, or one that doesn't know it
        if loop is not None and length >= 0:
            updates = -(-length // loop.num_steps)
            steps = counted(updates * ticks, "step")
            advice = f" One epoch of the loader is {counted(updates, 'update')}, so {steps}: make it that long."
        times = "once" if ticks == 1 else f"{ticks} times"
        per_update = "" if ticks == 1 else " (once with scheduler_ticks='per_update')"
        warnings.warn(
            f"The learning rate schedule {what}. Each update steps it {times} here{per_update}.{advice}", stacklevel=3
        )

    def get_last_lr(self) -> list[Any]:
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not set yet: while being unpickled
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def horizon_of(scheduler: Any) -> int | None:
    """Return after how many ticks a schedule has run its course, or None if it has no end or does not tell."""
    for kind, name in ((CosineAnnealingLR, "T_max"), (OneCycleLR, "total_steps"), (PolynomialLR, "total_iters")):
        if isinstance(scheduler, kind):
            return int(getattr(scheduler, name))
    if isinstance(scheduler, LinearLR):  # one that rises is a warm-up, after which training continues at the full rate
        return int(scheduler.total_iters) if scheduler.end_factor < scheduler.start_factor else None
    if isinstance(scheduler, SequentialLR):
        schedulers, milestones = sequence_of(scheduler)
        last = horizon_of(schedulers[-1])
        return None if last is None else int(milestones[-1]) + last
    if isinstance(scheduler, LambdaLR):
        num_steps = _variables(scheduler.lr_lambdas[0]).get("num_training_steps")  # as transformers' schedules call it
        return num_steps if isinstance(num_steps, int) else None
    return None


def planned_updates(schedulers: Iterable[LRScheduler], num_members: int = 1) -> int | None:
    """Return for how many updates a run's longest schedule is made, once the first is done; None: no schedule tells.

    A schedule that has not ticked by then counts epochs; one that has ticked more often than there are processes
    continues another run.

    Args:
        num_members: replicas that come and go, each in processes of its own.
    """
    most_ticks = num_members * (dist.get_world_size() if dist.is_initialized() else 1)
    horizons = [(horizon_of(scheduler), scheduler.last_epoch) for scheduler in schedulers]
    return max((end // ticks for end, ticks in horizons if end is not None and 0 < ticks <= most_ticks), default=None)


def _variables(function: Any) -> dict[str, Any]:
    """Return what a function was made with: the keywords of a partial one, the outer variables of a closure."""
    if isinstance(function, partial):
        return function.keywords
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return dict(inspect.getclosurevars(function).nonlocals) if code is not None and cells else {}
