# SPDX-License-Identifier: Apache-2.0
"""During an evaluation a model has the weights of its state dict, which are the same on all ranks."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from typing import Any, Protocol

import torch
from torch import nn

from farflung.base.events import Kind, record
from farflung.comm.frames import user_call
from farflung.comm.recording import WeakHook
from farflung.hosts.patching import around


class Lender(Protocol):
    """Has other weights of a model, for an evaluation."""

    @property
    def lends(self) -> bool:
        """Whether it has any."""

    @property
    def has_own_evaluation(self) -> bool:
        """Whether the optimizer puts other weights into the model for an evaluation, see `evaluates`."""

    def agreed(self, module: nn.Module) -> AbstractContextManager[None]:
        """Have them in one model within a block."""


def evaluates(optimizer: Any) -> bool:
    """Return whether an optimizer is schedule-free: its `eval()` turns the weights of the training."""
    return callable(getattr(optimizer, "eval", None))


class LentWeights:
    """Puts the agreed weights into a model from `eval()` on, and this rank's own back before it trains again.

    Nothing is sent: one rank may evaluate alone. Frameworks go back to train mode in several ways, so a forward pass in
    that mode ends it too. A recipe that keeps no agreed weights leaves the model as it is.

    Args:
        model: maybe wrapped, as by DDP.
        bare: the same, unwrapped.
        trains: called before each forward pass in train mode.
    """

    def __init__(self, model: nn.Module, bare: nn.Module, trains: Callable[[], None] = lambda: None) -> None:
        self._bare = bare
        self._own: ExitStack | None = None
        self.trains = trains
        # Before fully_shard gathers the weights.
        self.hook = model.register_forward_pre_hook(WeakHook(_before_forward, self), prepend=True)

    @property
    def is_on(self) -> bool:
        """Whether the model has other weights now."""
        return self._own is not None

    def change(self, to_train: bool, lender: Lender | None) -> None:
        """Called when the model changes its mode, with the loop or mean whose weights it is to have."""
        if to_train:
            self.end()
        elif self._own is None and lender is not None and lender.lends and not lender.has_own_evaluation:
            self._own = ExitStack()
            self._own.enter_context(lender.agreed(self._bare))

    def end(self) -> None:
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

    def _say(self) -> None:
        """Print a line, once, if the script itself asks for a state dict: it may want to copy its net."""
        caller = user_call(sys._getframe())
        if not self._is_said and caller.path and "-packages" not in caller.path:
            self._is_said = True
            message = (
                f"{caller.at}: between rounds state_dict() has the weights that all replicas last agreed on, "
                "to be saved. Loaded into another model at once it gives this rank's own, as named_parameters() does."
            )
            record(Kind.NOTE, message=message)

    def note(self, state: dict[str, Any], own: dict[str, torch.Tensor], step: int, is_between: bool) -> None:
        """Called with a state dict, the model's own tensors under its keys, and whether this rank says what it has."""
        self._own, self._step = own, step
        self._state = weakref.ref(state) if isinstance(state, OrderedDict) else lambda: None  # a script's own dict
        if is_between:
            self._say()

    def as_own(self, state: Any, step: int) -> Any:
        """Return a state dict with the rank's own weights if `state` is the latest one, made since the last step."""
        if state is None or state is not self._state() or step != self._step:
            return state
        own = OrderedDict(state)
        own.update(self._own)
        own._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]  # as torch keeps it there
        return own


def _before_forward(lent: LentWeights, module: nn.Module, *_: Any) -> None:
    """End an evaluation before a forward pass in train mode."""
    inner = getattr(module, "module", None)  # Lightning leaves DDP's own mode as it was in the evaluation
    if (inner if isinstance(inner, nn.Module) else module).training:
        lent.end()
        lent.trains()


class ModeListener(Protocol):
    """Hears of changes between training and evaluation."""

    def mode_changed(self, module: nn.Module, was_training: bool) -> None:
        """Called after each `module.train` and `module.eval`."""


MODE_LISTENERS: weakref.WeakSet[ModeListener] = weakref.WeakSet()


def follow_modes(listener: ModeListener) -> None:
    """Tell a listener of the changes of all modules from now on, until it is discarded from `MODE_LISTENERS`."""
    _wrap_train()
    MODE_LISTENERS.add(listener)


@cache
def _wrap_train() -> None:
    around(nn.Module, "train", _set_mode)


def _set_mode(train: Callable[..., Any], module: nn.Module, mode: bool = True) -> Any:
    was_training, result = module.training, train(module, mode)
    for listener in list(MODE_LISTENERS):
        listener.mode_changed(module, was_training)
    return result


def end_evaluation(one: Any, module: nn.Module, *_: Any) -> None:
    """Put a rank's own weights back into a model, before others are loaded."""
    if one.holds(module):
        one.evaluation.end()


class EvaluatedModel:
    """A prepared model that may have other weights during an evaluation, which ends before weights are loaded into it.

    Args:
        model: as it was prepared.
        bare: the same, unwrapped.
        trains: see `LentWeights`.
    """

    def __init__(self, model: nn.Module, bare: nn.Module, trains: Callable[[], None] = lambda: None) -> None:
        self.model, self.bare = model, bare
        self.evaluation = LentWeights(model, bare, trains)
        hooked: Any = bare  # whose types are not complete in torch
        end = hooked.register_load_state_dict_pre_hook(WeakHook(end_evaluation, self))
        self.hooks = [self.evaluation.hook, end]

    def holds(self, module: nn.Module) -> bool:
        """Whether `module` is the model, maybe unwrapped."""
        return module is self.model or module is self.bare
