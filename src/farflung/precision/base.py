# SPDX-License-Identifier: Apache-2.0
"""What the training loop asks of a precision, and the plain answer: numbers stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.base.torch_internals import overflowed
from farflung.config.handlers import AutocastKwargs

Closure = Callable[[], Any] | None


class Precision(Protocol):
    """How numbers are kept. One object a session; it remembers which optimizers' gradients are unscaled."""

    @property
    def name(self) -> str:
        """`no`, `bf16`, `fp16` or `fp8`."""

    @property
    def dtype(self) -> torch.dtype | None:
        """What forward passes compute in, where that is not what the model is in."""

    @property
    def scaler(self) -> Any:
        """The `torch.amp.GradScaler`, or None."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Make the forward pass of `model` compute in this precision; the module stays the same object."""

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context that computes in this precision."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return `loss` as `backward` should see it."""

    def unscale_(self, optimizer: Optimizer) -> None:
        """Bring the gradients of `optimizer` back to their true size. A second call before `step` does nothing."""

    def step(self, optimizer: Optimizer, closure: Closure = None) -> bool:
        """Step `optimizer`; return False when the step was skipped because gradients overflowed."""

    def state_dict(self, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Return what a later process needs to go on, plain data; optimizers are told by their places."""

    def load_state_dict(self, state: dict[str, Any], optimizers: Sequence[Optimizer]) -> None:
        """Take over what `state_dict` returned, for the same optimizers; KeyError where it is something else."""


class Full:
    """fp32, or whatever the model is in."""

    name = "no"
    dtype: torch.dtype | None = None
    scaler: Any = None

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        return nullcontext()

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def unscale_(self, optimizer: Optimizer) -> None:
        return None

    def step(self, optimizer: Optimizer, closure: Closure = None) -> bool:
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return True

    def state_dict(self, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], optimizers: Sequence[Optimizer]) -> None:
        return None


class GivenScaler(Full):
    """Numbers as they are, but for losses that a script scales with a `torch.amp.GradScaler` of its own.

    Args:
        scaler: unscales gradients where a step needs it, and is updated after each step.
    """

    name = "fp16"

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler

    def scale(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss)  # type: ignore[no-any-return]

    def unscale_(self, optimizer: Optimizer) -> None:
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer, closure: Closure = None) -> bool:
        if closure is None:
            self.scaler.step(optimizer)
        else:
            self.scaler.step(optimizer, closure)
        done = not overflowed(self.scaler, optimizer)
        self.scaler.update()
        return done
