# SPDX-License-Identifier: Apache-2.0
"""What the training loop asks of a precision, whose plain answer is that numbers stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.base.torch_internals import overflowed
from farflung.config.handlers import AutocastKwargs

Closure = Callable[[], Any] | None


class Precision:
    """How numbers are kept: as they are, unless a subclass says otherwise.

    One object a session; it remembers which optimizers' gradients are unscaled.
    """

    name = "no"  # or `bf16`, `fp16`, `fp8`
    dtype: torch.dtype | None = None  # what forward passes compute in, if that is not what the model is in
    autocasts = False  # forward passes compute in `dtype`; a script may set it to False
    scaler: Any = None  # the `torch.amp.GradScaler`, or None

    def wrap(self, model: nn.Module) -> nn.Module:
        """Make the forward pass of `model` compute in this precision; the module stays the same object."""
        return model

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context that computes in this precision."""
        return nullcontext()

    def scale(self, loss: Tensor) -> Tensor:
        """Return `loss` as `backward` should see it."""
        return loss

    def unscale_(self, optimizer: Optimizer) -> None:
        """Bring the gradients of `optimizer` back to their true size. A second call before `step` does nothing."""

    def step(self, optimizer: Optimizer, closure: Closure = None) -> bool:
        """Step `optimizer`; return False when the step was skipped because gradients overflowed."""
        optimizer.step(*([] if closure is None else [closure]))  # not every optimizer takes one
        return True

    def forget(self, optimizer: Optimizer | None = None) -> None:
        """Forget that gradients of `optimizer` were unscaled, if no step has used them; None: forget all optimizers.

        An optimizer made later may get the id of one that is gone.
        """

    def state_dict(self, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Return what a later process needs to continue, plain data; optimizers are identified by their index."""
        return {}

    def load_state_dict(self, state: dict[str, Any], optimizers: Sequence[Optimizer]) -> None:
        """Take over what `state_dict` returned, for the same optimizers; KeyError if it is something else."""


def wrap_forward(module: nn.Module, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the forward pass of `module` by `wrapper(forward)`."""
    plain = module.forward
    if isinstance(plain, MethodType) and plain.__self__ is module:
        # A method, so that a copy of the module computes with the weights of the copy.
        module.forward = MethodType(wrapper(plain.__func__), module)
    else:
        module.forward = wrapper(plain)


class GivenScaler(Precision):
    """Numbers as they are, but for losses that a script scales with a `torch.amp.GradScaler` of its own.

    The scaler unscales gradients if a step needs it, and is updated after each step.
    """

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler

    def step(self, optimizer: Optimizer, closure: Closure = None) -> bool:
        self.scaler.step(optimizer, *([] if closure is None else [closure]))
        done = not overflowed(self.scaler, optimizer)
        self.scaler.update()
        return done
