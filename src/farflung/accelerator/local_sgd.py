# SPDX-License-Identifier: Apache-2.0
"""Accelerate's `LocalSGD`: replicas train independently for some optimizer steps, then average their weights."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from torch import nn

from farflung.accelerator import lazy
from farflung.accelerator.accelerator import Accelerator
from farflung.base.checks import check_flag, check_type, check_whole
from farflung.base.errors import StateError

if TYPE_CHECKING:
    from farflung.outer.engine import OuterLoop


class LocalSGD:
    """A context manager around a training loop that averages weights every `local_sgd_steps` optimizer steps.

    Completed optimizer steps count, not calls of `step`. When the block ends, ranks that have no more data wait for the
    others and all average a last time; if an exception leaves the block nothing is sent, and the other ranks get an
    error. Source: Local SGD converges fast and communicates little (arXiv:1805.09767).

    Args:
        accelerator: the one that prepared `model` and its optimizer.
        local_sgd_steps: optimizer steps between two averagings.
        enabled: False makes the context manager do nothing.

    Raises:
        ConfigError: if `enabled`: `local_sgd_steps` is no whole number above zero, or no prepared optimizer trains
            `model`.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        check_type("accelerator", accelerator, Accelerator, "the Accelerator that prepared the model")
        lazy.arguments.check_model(model)
        check_flag("enabled", enabled)
        if enabled:
            check_whole("local_sgd_steps", local_sgd_steps, least=1)
        is_replica = accelerator._run.world.place.member is not None
        self.enabled = enabled and (accelerator.use_distributed or is_replica)
        self.local_sgd_steps = local_sgd_steps
        self._block: AbstractContextManager[OuterLoop, bool | None] | None = None
        self._loop: OuterLoop | None = None
        if self.enabled:
            recipe = lazy.recipes.local_sgd(local_sgd_steps)
            self._outer = partial(accelerator._controller.outer, model, recipe, each_step=False)
            self._outer()  # raises for a model that can't be averaged

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._block = self._outer()
            self._loop = self._block.__enter__()
        return self

    def step(self) -> None:
        """Average if the optimizer has completed `local_sgd_steps` steps since the last time; call it after each step.

        Raises:
            StateError: outside the `with` block.
        """
        if self._loop is not None:
            self._loop.sync_if_due()
        elif self.enabled:
            raise StateError("LocalSGD.step() was called outside its `with` block.")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block, self._block, self._loop = self._block, None, None
        if block is not None:
            block.__exit__(kind, error, trace)
