# SPDX-License-Identifier: Apache-2.0
"""Gradient clipping that happens once, at the end of a window, on gradients of their true size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_ as torch_clip_grad_norm_
from torch.nn.utils import clip_grad_value_ as torch_clip_grad_value_

from laconic.loop.optimizer import AcceleratedOptimizer
from laconic.loop.state import LoopState
from laconic.precision.base import Precision


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float,
    *,
    state: LoopState,
    precision: Precision,
    optimizers: Sequence[AcceleratedOptimizer],
) -> Tensor:
    """Clip the gradients' common norm to `max_norm` and return the norm that they had.

    Inside an accumulation window nothing is clipped, because the gradient is not whole yet; NaN is returned then.
    """
    if not state.sync_gradients:
        return torch.tensor(float("nan"))
    if precision.scaler is not None:
        parameters = _unscaled(parameters, precision, optimizers)
    return torch_clip_grad_norm_(parameters, max_norm, norm_type)


def clip_grad_value_(
    parameters: Tensor | Iterable[Tensor],
    clip_value: float,
    *,
    state: LoopState,
    precision: Precision,
    optimizers: Sequence[AcceleratedOptimizer],
) -> None:
    """Clip each gradient's elements to `[-clip_value, clip_value]`; inside an accumulation window do nothing."""
    if not state.sync_gradients:
        return
    if precision.scaler is not None:
        parameters = _unscaled(parameters, precision, optimizers)
    torch_clip_grad_value_(parameters, clip_value)


def unscale(precision: Precision, optimizers: Iterable[AcceleratedOptimizer]) -> None:
    """Bring the gradients of `optimizers` to their true size, once a step; only under fp16 is there anything to do."""
    for prepared in optimizers:
        precision.unscale_(prepared.optimizer)


def _unscaled(
    parameters: Tensor | Iterable[Tensor], precision: Precision, optimizers: Sequence[AcceleratedOptimizer]
) -> list[Tensor]:
    """Unscale the optimizers that own any of `parameters`; return the parameters as a list."""
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    wanted = {id(parameter) for parameter in listed if parameter.grad is not None}
    owners = [
        optimizer
        for optimizer in optimizers
        if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"])
    ]
    unscale(precision, owners)
    return listed
