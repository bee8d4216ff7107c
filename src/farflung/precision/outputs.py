# SPDX-License-Identifier: Apache-2.0
"""Accelerate's parts of mixed precision for scripts that put them together themselves."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from farflung.base.enums import DistributedType
from farflung.base.probes import current_accelerator
from farflung.base.tree import convert_to_fp32


class ConvertOutputsToFp32:
    """A function whose half-precision outputs are converted to fp32. It can't be pickled."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> NoReturn:
        raise pickle.PicklingError(
            "A forward pass with mixed precision can't be pickled. Unwrap the model first: accelerator.unwrap_model("
            "model, keep_fp32_wrapper=False)."
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does what `model_forward` does, and converts half-precision outputs to fp32."""
    converting = ConvertOutputsToFp32(model_forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return converting(*args, **kwargs)

    forward.__wrapped__ = converting  # type: ignore[attr-defined]
    return forward


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a loss scaler for this machine's kind of device (`distributed_type` is unused).

    Args:
        kwargs: arguments of `torch.amp.GradScaler`.
    """
    device = current_accelerator()
    return torch.amp.GradScaler("cpu" if device is None else device.type, **kwargs)
