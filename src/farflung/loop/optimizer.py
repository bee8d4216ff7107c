# SPDX-License-Identifier: Apache-2.0
"""A prepared optimizer: it steps when its accumulation window is complete, through the precision's scaler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from farflung.base.errors import StateError
from farflung.base.forward import Forward, unchecked
from farflung.base.words import counted
from farflung.comm.recording import uncompiled
from farflung.loop.finite import SkipNonfinite
from farflung.loop.state import LoopState, Window
from farflung.precision.base import Closure, GivenScaler, Precision


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer in the order of its groups, in which a state dict numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class AcceleratedOptimizer(Optimizer):
    """An optimizer that skips `step` and `zero_grad` inside an accumulation window.

    Args:
        optimizer: the one that does the work, and has what is not here.
        device_placement: move the optimizer's state to where its parameters are.
        scaler: scales the losses that this optimizer steps on, and is updated after each step.
        state: the loop whose windows it follows; None: there are none, and each step counts.
        precision: what it steps through; None: `scaler`, if there is one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        *,
        state: LoopState | None = None,
        precision: Precision | None = None,
    ) -> None:
        # Not Optimizer.__init__: this one has no parameters of its own, it only passes for an optimizer.
        state = LoopState() if state is None else state
        self.optimizer = optimizer
        self.loop_state = state
        self.precision = precision or (Precision() if scaler is None else GivenScaler(scaler))
        self.step_was_skipped = False  # the last attempted one, because gradients overflowed
        # Outer loops count with these, in the order of their opening: called after each attempted step, True if done.
        self.attached: list[Callable[[bool], None]] = []
        self.window: Window | None = None  # that it follows; None: the one that was entered last
        # Under an outer loop a skipped step is this replica's own, and schedulers tick nevertheless: the replicas'
        # learning rates must not drift apart.
        self.in_lockstep = False
        self.is_own = False  # its state differs from that of other ranks, since it has trained a replica alone
        self.finite: SkipNonfinite | None = None  # decides whether a step is made
        self.unaveraged: Sequence[tuple[str, Tensor]] = ()  # which must not train; see `Strategy.unaveraged`
        self.finished = state.backwards  # passes that there had been at its last attempted step or clearing
        self.completed_steps: int | None = 0  # over resumes too; None: a checkpoint was loaded that does not say them
        state.adopt(self)
        if device_placement and optimizer.state:  # moves it to the parameters, but for counts of steps on the host
            optimizer.load_state_dict(optimizer.state_dict())

    def step(self, closure: Closure = None) -> Any:
        """Step when the window is complete, else do nothing. As in torch, return the loss of `closure`'s first call."""
        return self._step(closure)

    @uncompiled
    def _step(self, closure: Closure) -> Any:
        if not self.window_is_complete:
            return None
        if self.unaveraged and not self.in_lockstep:
            self._refuse_unaveraged()
        self.finished = self.loop_state.backwards
        losses: list[Any] = []

        def noted() -> Any:
            assert closure is not None
            losses.append(closure())
            return losses[-1]

        make = partial(self.precision.step, self.optimizer, None if closure is None else noted)
        if self.finite is None:
            done = make()
        else:
            is_scaled = self.precision.scaler is not None
            done = self.finite.step(parameters_of(self.optimizer), make, is_scaled, closure is not None)
        self.step_was_skipped = not done
        if [one for one in self.loop_state.optimizers if one.precision is self.precision] == [self]:
            # Others would step on gradients of the scale before.
            self.precision.forget()
        if done and self.completed_steps is not None:
            self.completed_steps += 1
        for step_attempted in self.attached:
            step_attempted(done)
        self.loop_state.step_attempted()
        return losses[0] if losses else None

    def _refuse_unaveraged(self) -> None:
        there = [(name, one) for name, one in self.unaveraged if one.requires_grad and one.grad is not None]
        names = [name for name, one in there if self.owns([one])]
        if names:
            raise StateError(
                f"step: {counted(len(names), 'parameter')} ({', '.join(names[:3])}{', ...' * (len(names) > 3)}) "
                "required no gradient when the model was prepared, so each rank would now train its own values. "
                "Unfreeze them before `prepare`; or call free_memory() and prepare everything again, the model as "
                "unwrap_model() returns it."
            )

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients when the window is complete, else do nothing; None: as the optimizer does by itself."""
        if self.window_is_complete:
            self.finished = self.loop_state.backwards
            self.precision.forget(self.optimizer)
            if set_to_none is None:
                self.optimizer.zero_grad()
            else:
                self.optimizer.zero_grad(set_to_none)

    def train(self) -> None:
        """Turn an optimizer without a schedule to training; do nothing with others."""
        self._turn("train")

    def eval(self) -> None:
        """Turn an optimizer without a schedule to evaluation; do nothing with others."""
        self._turn("eval")

    def _turn(self, mode: str) -> None:
        turn = getattr(self.optimizer, mode, None) or getattr(getattr(self.optimizer, "optimizer", None), mode, None)
        if callable(turn):
            turn()

    @property
    def is_unfinished(self) -> bool:
        """Whether there are gradients that a later step will use: of an open window, or gathered by hand."""
        window = self.window or self.loop_state.window
        if window.size and window.complete:
            return False  # what is left of it after its step is cleared before the next one
        return self.finished != self.loop_state.backwards

    @property
    def window_is_complete(self) -> bool:
        return (self.window or self.loop_state.window).complete

    @property
    def window_items(self) -> float:
        """How many items `backward(num_items=)` has counted on this process in its accumulation window."""
        return (self.window or self.loop_state.window).items

    def owns(self, parameters: Iterable[Tensor]) -> bool:
        mine = set(map(id, parameters_of(self)))
        return any(id(parameter) in mine for parameter in parameters)

    _is_overflow = property(  # the name under which programs for Accelerate set it
        lambda self: self.step_was_skipped, lambda self, value: setattr(self, "step_was_skipped", value)
    )
    state: Any = Forward("optimizer.state", check=unchecked)
    param_groups: Any = Forward("optimizer.param_groups", check=unchecked)
    defaults: Any = Forward("optimizer.defaults", check=unchecked)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet: while being unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "attached": [], "unaveraged": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:  # torch's wants parameters
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"
