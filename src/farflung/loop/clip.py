# SPDX-License-Identifier: Apache-2.0
"""Gradient clipping that happens once, at the end of a window, on gradients of their true size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from farflung.base.checks import check_number, wrong_type
from farflung.base.errors import ConfigError
from farflung.comm.shards import align_gradients, full, largest, local, mesh_over
from farflung.loop.optimizer import AcceleratedOptimizer
from farflung.loop.state import LoopState
from farflung.precision.base import Precision


@dataclass(frozen=True)
class Clipping:
    """Clips gradients where a loop stands; `precision` scales those of `optimizers`."""

    precision: Precision
    state: LoopState
    optimizers: Sequence[AcceleratedOptimizer]

    def norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Clip the gradients' common norm to `max_norm` and return the norm that they had.

        Inside an accumulation window nothing is clipped, because the gradient is not whole yet; NaN is returned then.
        """
        try:
            listed = self._ready(parameters)
            if listed is None:
                return torch.tensor(float("nan"))
            if max_norm >= 0:
                return _clip(listed, max_norm, norm_type)
        except (TypeError, AttributeError, ValueError) as error:
            _explain("clip_grad_norm_", parameters, error, max_norm=max_norm, norm_type=norm_type)
            raise
        raise ConfigError(f"clip_grad_norm_: max_norm is {max_norm}; it must be a number, 0 or more.")

    def value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip each gradient's elements to `[-clip_value, clip_value]`; inside an accumulation window do nothing."""
        try:
            listed = self._ready(parameters)
            if listed is None:
                return
            if clip_value >= 0:
                listed = [parameter for parameter in listed if parameter.grad is not None]
                align_gradients(listed)
                return clip_grad_value_(listed, clip_value) if listed else None  # torch fails if there is none
        except (TypeError, AttributeError, ValueError) as error:
            _explain("clip_grad_value_", parameters, error, clip_value=clip_value)
            raise
        raise ConfigError(f"clip_grad_value_: clip_value is {clip_value}; it must be a number, 0 or more.")

    def _ready(self, parameters: Tensor | Iterable[Tensor]) -> list[Tensor] | None:
        """Return `parameters` with gradients of their true size; None while the window of their optimizers is open."""
        if parameters is None:
            raise TypeError("None is nothing to go through")  # torch's own functions would clip nothing
        if self.precision.scaler is None and self.state.has_one_window:
            return _listed(parameters) if self.state.window.complete else None
        listed = _listed(parameters)
        trained = [parameter for parameter in listed if parameter.grad is not None]
        owners = [optimizer for optimizer in self.optimizers if optimizer.owns(trained)]
        if not all(owner.window_is_complete for owner in owners) or not (owners or self.state.window.complete):
            return None
        unscale(self.precision, owners)
        return listed


def _clip(parameters: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Clip with torch, which takes plain gradients, or shards over one mesh, at a time; return the norm of all."""
    align_gradients(parameters)
    kinds: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault(mesh_over(parameter), []).append(parameter)
    if kinds.keys() <= {None}:
        return clip_grad_norm_(parameters, max_norm, norm_type)
    total = get_total_norm([_norm(kind, norm_type) for kind in kinds.values()], norm_type)
    for kind in kinds.values():
        clip_grads_with_norm_(kind, max_norm, total)
    return total


def _norm(kind: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of the whole gradients of tensors that are plain, or shards over one mesh."""
    gradients = [parameter.grad for parameter in kind if parameter.grad is not None]
    if norm_type == math.inf:  # which torch does not have of a shard without values
        parts = [part for part in map(local, gradients) if part.numel()]
        mine = get_total_norm(parts, norm_type) if parts else torch.zeros((), device=local(kind[0]).device)
        return largest(mine, kind[0])
    return full(get_total_norm(gradients, norm_type))


def _listed(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _explain(call: str, parameters: object, error: Exception, **numbers: object) -> None:
    """Raise what says which argument led to `error`; return if none did."""
    wanted = "tensors, such as model.parameters()"
    if isinstance(parameters, type) or not isinstance(parameters, Iterable):
        raise wrong_type(f"{call}: parameters", parameters, wanted) from error
    stranger = getattr(error, "obj", None) if isinstance(error, AttributeError) else None
    if stranger is not None and not isinstance(stranger, Tensor):
        raise wrong_type(f"{call}: each of parameters", stranger, f"a tensor; give it {wanted}") from error
    for name, value in numbers.items():
        if not isinstance(value, Tensor):
            check_number(f"{call}: {name}", value, finite=False)


def unscale(precision: Precision, optimizers: Iterable[AcceleratedOptimizer]) -> None:
    """Bring the gradients of `optimizers` to their true size, once a step; only under fp16 is there anything to do.

    Not inside an accumulation window, where gradients of other micro-batches are still added to them.
    """
    for prepared in optimizers:
        if prepared.window_is_complete:
            precision.unscale_(prepared.optimizer)
