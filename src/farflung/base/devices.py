# SPDX-License-Identifier: Apache-2.0
"""Which accelerators this machine has, asked of torch."""

from __future__ import annotations

import torch


def current_accelerator() -> torch.device | None:
    """Return the kind of accelerator that this machine has, or None; torch before 2.7 also names one that is absent."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def has_device(kind: str) -> bool:
    """Say whether torch has devices of this kind, which a library of their vendor may have brought it."""
    module = getattr(torch, kind, None)
    try:
        return module is not None and bool(module.is_available())
    except (AttributeError, RuntimeError):  # a driver that finds no device may raise instead
        return False


def get_current_device_type() -> tuple[str, str]:
    """Return the kind of this machine's accelerators and the word for several of them, without touching any.

    Where there is none, they are `cuda` and `MULTI_GPU`.
    """
    for kind in ("mlu", "sdaa", "musa", "npu", "hpu", "xpu", "neuron"):
        if has_device(kind):
            return kind, f"MULTI_{kind.upper()}"
    return "cuda", "MULTI_GPU"
