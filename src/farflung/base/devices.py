# SPDX-License-Identifier: Apache-2.0
"""Which accelerators this machine has, asked of torch."""

from __future__ import annotations

import torch


def current_accelerator() -> torch.device | None:
    """Return the kind of accelerator that this machine has, or None; torch before 2.7 also names one that is absent."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
