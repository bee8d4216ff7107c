# SPDX-License-Identifier: Apache-2.0
"""`with accumulate(model)`: count a micro-batch, and leave gradients unsynchronized until its window is complete."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import nn

from laconic.loop.state import LoopState


class Accumulate:
    """One entry into the accumulation window, for one or several models.

    Args:
        no_sync: makes the context in which a model's gradients stay on this process, or None where they always do.
    """

    __slots__ = ("_models", "_no_sync", "_stack", "_state")

    def __init__(
        self,
        state: LoopState,
        models: tuple[nn.Module, ...],
        no_sync: Callable[[nn.Module], AbstractContextManager[Any]] | None,
    ) -> None:
        self._state = state
        self._models = models
        self._no_sync = no_sync
        self._stack: ExitStack | None = None

    def __enter__(self) -> None:
        completes = self._state.advance()
        if completes or self._no_sync is None or self._state.sync_each_batch:
            return
        self._stack = ExitStack()
        for model in self._models:
            self._stack.enter_context(self._no_sync(model))

    def __exit__(self, *error: Any) -> None:
        if self._stack is not None:
            self._stack.close()
