# SPDX-License-Identifier: Apache-2.0
"""The autograd mode in which the library reads and writes what a script trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def unrecorded() -> Iterator[None]:
    """Record no gradients, and make tensors that may be written later, also under `torch.inference_mode()`.

    As a decorator, `@unrecorded()`, it does so for each call of a function.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def lasting() -> Iterator[None]:
    """Make tensors that may be written later, also under `torch.inference_mode()`; gradients are recorded as before."""
    is_recording = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(is_recording):
        yield
