# SPDX-License-Identifier: Apache-2.0
"""`with accumulate(model)`: count a micro-batch, and leave gradients unsynchronized until its window is complete.

The gradient of a window is the mean of its micro-batches' gradients, also in a last window that is short:
`1/k * sum(g_1 ... g_k)`. Losses that come with their number of items are weighed by it instead: the gradient is that of
`sum(loss) / sum(items)` over the window and all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from farflung.base.checks import check_number, shown, wrong_type
from farflung.base.errors import ConfigError, StateError
from farflung.base.torch_internals import foreach_mul_, sharded_parameters, unreduced_gradient
from farflung.comm.group import Group
from farflung.comm.shards import local, sharded_parts
from farflung.loop.optimizer import parameters_of
from farflung.loop.state import LoopState, Window


class Accumulate:
    """One entry into the accumulation window of models; `no_sync`, if any, keeps their gradients on this process."""

    __slots__ = ("_models", "_no_sync", "_state", "_unsynced")

    def __init__(
        self,
        state: LoopState,
        models: tuple[nn.Module, ...],
        no_sync: Callable[[nn.Module], AbstractContextManager[Any]] | None,
    ) -> None:
        for model in models:
            if not isinstance(model, nn.Module):
                raise wrong_type("accumulate: model", model, "an nn.Module, as in accumulate(model)")
        self._state = state
        self._models = models
        self._no_sync = no_sync
        self._unsynced: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        state = self._state
        window = state.window_of(self._models)
        if state.advance(window):
            if window.divisor != state.num_steps and window.size > 1 and window.scale is None:
                # What the earlier micro-batches left was divided for a window of full length.
                _rescale(window, state, state.num_steps / window.divisor)
        elif self._no_sync is not None and not state.sync_each_batch:
            if len(self._models) == 1:
                self._unsynced = self._no_sync(self._models[0])
                self._unsynced.__enter__()
            else:
                self._unsynced = ExitStack()
                for model in self._models:
                    self._unsynced.enter_context(self._no_sync(model))

    def __exit__(self, *error: Any) -> None:
        if self._unsynced is not None:
            self._unsynced.__exit__(*error)


def explain_loss(loss: object, kwargs: Mapping[str, Any], error: Exception) -> None:
    """Raise what says which fault of `loss` led to `error` in its backward pass; return if it has none."""
    if not isinstance(loss, Tensor):
        advice = ": without .item(), which makes a plain number of it" if isinstance(loss, float) else ""
        raise wrong_type("backward: loss", loss, f"a tensor of one number{advice}") from error
    if not loss.requires_grad:
        raise ConfigError(
            f"backward: loss is {shown(loss)} and has requires_grad=False, so there is nothing to compute. Compute it "
            "from a model that trains, outside of torch.no_grad() and without .detach()."
        ) from error
    if loss.numel() != 1 and kwargs.get("gradient") is None:
        raise ConfigError(
            f"backward: loss is {shown(loss)}; it must be one number: loss.mean(), or loss.sum() with num_items."
        ) from error
    if "second time" in str(error):
        raise StateError(
            "backward: this loss, or a part of it, has been through backward() already, which frees what it was "
            "computed from. Compute it again, or pass retain_graph=True to the first call."
        ) from error


def weighed(loss: Tensor, num_items: float | Tensor, state: LoopState, group: Group | None, waits: bool) -> Tensor:
    """Return a sum of losses so scaled that the window's gradient is that of `sum(losses) / sum(items)` over the ranks.

    The scale is only known with the window's last micro-batch; what the earlier ones left is scaled again then. The
    ranks of `group` average the model's gradients: in the window's last backward pass if that `waits`, else in each.
    """
    window = state.window
    if isinstance(num_items, Tensor) and num_items.numel() == 1:
        num_items = num_items.item()
    elif isinstance(num_items, Tensor):
        raise wrong_type("backward: num_items", num_items, "one number, such as num_items.sum()")
    check_number("backward: num_items", num_items, least=0)
    count = float(num_items)
    if window.size > 1 and window.scale is None:
        raise StateError(
            "backward: an earlier loss of this accumulation window came without num_items. Pass it with every loss of "
            "a window, or with none."
        )
    window.items = window.items + count if window.size else count  # outside `accumulate` each call is a window
    if not window.complete:
        if window.scale is None:
            if not waits and group is not None and group.size > 1:
                count = _summed(count, group, state) / group.size  # averaged at once: one scale must do for all ranks
            window.scale = 1.0 / (max(count, 1.0) * state.num_steps)
        return loss * window.scale
    total = window.items
    if group is not None and group.size > 1:
        # Gradients are averaged: their sum over the ranks is `size` times what that leaves.
        total = _summed(total, group, state) / group.size
    scale = 1.0 / total if total > 0 else 0.0
    if window.scale is not None:
        _rescale(window, state, scale / window.scale)
    window.scale = scale if window.size else None
    return loss * scale


def _summed(value: float, group: Group, state: LoopState) -> float:
    if state.joined is not None:
        return state.joined.sum(value)
    return group.all_gather_small(torch.tensor([value], dtype=torch.float64)).sum().item()


def _rescale(window: Window, state: LoopState, factor: float) -> None:
    """Scale the gradients that a window has accumulated, including those that FSDP has not reduced yet."""
    trained = (parameter for optimizer in state.optimizers for parameter in parameters_of(optimizer))
    gradients = [parameter.grad for parameter in (window.parameters() if window.models else trained)]
    for part in sharded_parts(module for model in window.models for module in model.modules()):
        for kept in sharded_parameters(part):
            gradients += [kept.sharded_param.grad, unreduced_gradient(kept)]
    gathered = {id(gradient): local(gradient) for gradient in gradients if gradient is not None}
    if gathered:
        foreach_mul_(list(gathered.values()), factor)
