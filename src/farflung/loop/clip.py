# SPDX-License-Identifier: Apache-2.0
"""Gradient clipping that happens once, at the end of a window, on gradients of their true size."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_ as torch_clip_grad_norm_
from torch.nn.utils import clip_grad_value_ as torch_clip_grad_value_

from farflung.loop.state import Follower, LoopState
from farflung.precision.base import Precision


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float,
    *,
    precision: Precision,
    state: LoopState,
) -> Tensor:
    """Clip the gradients' common norm to `max_norm` and return the norm that they had.

    Inside an accumulation window nothing is clipped, because the gradient is not whole yet; NaN is returned then.
    """
    listed = _ready(parameters, precision, state)
    return torch.tensor(float("nan")) if listed is None else torch_clip_grad_norm_(listed, max_norm, norm_type)


def clip_grad_value_(
    parameters: Tensor | Iterable[Tensor], clip_value: float, *, precision: Precision, state: LoopState
) -> None:
    """Clip each gradient's elements to `[-clip_value, clip_value]`; inside an accumulation window do nothing."""
    listed = _ready(parameters, precision, state)
    if listed is not None:
        torch_clip_grad_value_(listed, clip_value)


def unscale(precision: Precision, optimizers: Iterable[Follower]) -> None:
    """Bring the gradients of `optimizers` to their true size, once a step; only under fp16 is there anything to do."""
    for prepared in optimizers:
        precision.unscale_(prepared.optimizer)


def _ready(
    parameters: Tensor | Iterable[Tensor], precision: Precision, state: LoopState
) -> Tensor | Iterable[Tensor] | None:
    """Return `parameters` with gradients of their true size; None while the window of those who train them goes on."""
    if precision.scaler is None and state.has_one_window:
        return parameters if state.window.complete else None
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    trained = [parameter for parameter in listed if parameter.grad is not None]
    owners = [optimizer for optimizer in state.optimizers if optimizer.owns(trained)]
    if not all(owner.window_is_complete for owner in owners) or not (owners or state.window.complete):
        return None
    unscale(precision, owners)
    return listed
