# SPDX-License-Identifier: Apache-2.0
"""A prepared learning-rate scheduler: it ticks when its optimizers have really stepped.

Existing scripts compute a schedule's length as "how many per-device batches will be processed in all", so by default
one optimizer step ticks as often as there are processes. `scheduler_ticks="per_update"` gives torch's own rule.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from farflung.loop.optimizer import AcceleratedOptimizer

Ticks = Literal["per_process", "per_update"]


class AcceleratedScheduler:
    """A scheduler that follows its optimizers.

    Args:
        optimizers: the prepared optimizers to follow.
        step_with_optimizer: False ticks on each call, whatever the optimizers did.
        ticks: how often an update ticks.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        optimizers: Sequence[AcceleratedOptimizer],
        *,
        step_with_optimizer: bool = True,
        ticks: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self.step_with_optimizer = step_with_optimizer
        self._ticks = 1 if isinstance(scheduler, ReduceLROnPlateau) else ticks
        self._total = getattr(scheduler, "total_steps", None)
        self._horizon = horizon_of(scheduler)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Tick when the accumulation window is complete and no optimizer skipped its step, else do nothing."""
        scheduler = self.scheduler
        if self.step_with_optimizer:
            for optimizer in self.optimizers:
                if not optimizer.window_is_complete or (optimizer.step_was_skipped and not optimizer.in_lockstep):
                    return
            if self._horizon is not None and scheduler.last_epoch >= self._horizon:
                self._warn_of_the_end(self._horizon)
            for _ in range(self._ticks):
                # A OneCycleLR raises past its end, and the ticks of the last update may reach over it.
                if self._total is None or scheduler._step_count <= self._total:
                    scheduler.step(*args, **kwargs)
        else:
            scheduler.step(*args, **kwargs)

    def _warn_of_the_end(self, horizon: int) -> None:
        """Say once that the schedule is over while training goes on, and what length would fit."""
        self._horizon = None
        advice = ""
        loop = self.optimizers[0].loop_state if self.optimizers else None
        length = None if loop is None else _length_of(loop.current)
        if loop is not None and length is not None:
            updates = -(-length // loop.num_steps)
            advice = f" One pass over the loader is {updates} updates, so {updates * self._ticks} ticks."
        warnings.warn(
            f"The learning rate schedule was made for {horizon} ticks and is over, but training goes on. Each update "
            f"ticks {self._ticks} times here (scheduler_ticks='per_update' makes that once).{advice}",
            stacklevel=3,
        )

    def get_last_lr(self) -> list[Any]:
        """Return the learning rate of each parameter group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scheduler's state."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not set yet: while being unpickled
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def _length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # None, or a loader over a stream that does not know its length
        return None


def horizon_of(scheduler: Any) -> int | None:
    """Return after how many ticks a schedule has run its course, or None where it has no end or does not tell."""
    if isinstance(scheduler, CosineAnnealingLR):
        return int(scheduler.T_max)
    if isinstance(scheduler, OneCycleLR):
        return int(scheduler.total_steps)
    if isinstance(scheduler, LambdaLR):  # transformers' schedules are partial functions that know their length
        told = [f.keywords.get("num_training_steps") for f in scheduler.lr_lambdas if isinstance(f, partial)]
        return told[0] if told and isinstance(told[0], int) else None
    return None
