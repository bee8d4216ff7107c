# SPDX-License-Identifier: Apache-2.0
"""During an evaluation a model has the weights of its state dict, which are the same on all ranks."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from farflung.base.events import tell
from farflung.base.frames import user_call
from farflung.hosts.driver import Driver


class LentWeights:
    """Puts the agreed weights into a model from `eval()` on, and this rank's own back before it trains again.

    Nothing is sent: one rank may evaluate alone. Frameworks go back to train mode in several ways, so a forward pass in
    that mode ends it too. A recipe that keeps no agreed weights leaves the model as it is.
    """

    def __init__(self, ddp: nn.Module) -> None:
        self._own: ExitStack | None = None
        this = weakref.ref(self)

        def before_forward(module: nn.Module, *_: Any) -> None:  # a function, which copies of the model share
            inner: Any = module.module  # Lightning leaves DDP's own mode as it was in the evaluation
            if not torch.compiler.is_compiling() and inner.training and (one := this()) is not None:
                one.end()

        ddp.register_forward_pre_hook(before_forward)

    def change(self, to_train: bool, driver: Driver | None) -> None:
        """Called when the model changes its mode, with the driver of the loop whose weights it is to have."""
        if to_train:
            self.end()
        elif self._own is None and driver is not None and driver.lends:
            self._own = ExitStack()
            self._own.enter_context(driver.agreed())

    def end(self, *_: Any) -> None:
        """Put this rank's own weights back, also before others are loaded in their place."""
        if self._own is not None:
            restoring, self._own = self._own, None
            restoring.close()


class AgreedState:
    """The latest state dict that has the agreed weights in place of a rank's own.

    A script that loads it into another model of its own right away copies its net, as DQN does to its target: that
    model gets the rank's own weights, as it does without an outer loop.
    """

    def __init__(self) -> None:
        self._state: Callable[[], Any] = lambda: None
        self._own: dict[str, torch.Tensor] = {}
        self._step = 0
        self._is_said = False

    def say(self) -> None:
        """Print a line, once, if the script itself asks for a state dict: it may want to copy its net."""
        caller = user_call(sys._getframe())
        if not self._is_said and caller.path and "-packages" not in caller.path:
            self._is_said = True
            tell(
                f"farflung: {caller.at}: between rounds state_dict() has the weights that all replicas last agreed on, "
                "to be saved. Loaded into another model at once it gives this rank's own, as named_parameters() does."
            )

    def note(self, state: dict[str, Any], own: dict[str, torch.Tensor], step: int) -> None:
        """Called with a state dict, and the model's own tensors under its keys."""
        self._state, self._own, self._step = weakref.ref(state), own, step

    def as_own(self, state: Any, step: int) -> Any:
        """Return a state dict with the rank's own weights if `state` is the latest one, made since the last step."""
        if state is None or state is not self._state() or step != self._step:
            return state
        own = OrderedDict(state)
        own.update(self._own)
        own._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]  # as torch keeps it there
        return own


class FollowedModelHook:
    """Calls `act` with a followed model and what a hook of it gets.

    Copies of the model, and files of it as a whole, have the hook too, where it does nothing.
    """

    def __init__(self, act: Callable[..., None] | None = None, one: Any = None) -> None:
        self._act, self._one = act, None if one is None else weakref.ref(one)

    def __call__(self, module: nn.Module, *args: Any) -> None:
        one = None if self._one is None else self._one()
        if self._act is not None and one is not None and one.holds(module):
            self._act(one, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return FollowedModelHook, ()
