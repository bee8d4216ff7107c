# SPDX-License-Identifier: Apache-2.0
"""Accelerate's parts of mixed precision for scripts that put them together themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from farflung.base.devices import current_accelerator
from farflung.base.enums import DistributedType
from farflung.base.tree import convert_to_fp32


class ConvertOutputsToFp32:
    """A function whose half-precision outputs are converted to fp32."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> tuple[Callable[..., Any], Any]:
        # A method is pickled by its name, which stands for this object once a model has it as its forward.
        forward = self.model_forward
        return (forward.__func__, forward.__self__) if isinstance(forward, MethodType) else (forward, None)

    def __setstate__(self, state: tuple[Callable[..., Any], Any]) -> None:
        function, owner = state
        self.__init__(function if owner is None else MethodType(function, owner))  # type: ignore[misc]


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does what `model_forward` does, and converts half-precision outputs to fp32."""
    return ConvertOutputsToFp32(model_forward)


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a `torch.amp.GradScaler` for this machine's kind of device (`distributed_type` is unused)."""
    device = current_accelerator()
    return torch.amp.GradScaler("cpu" if device is None else device.type, **kwargs)
