# SPDX-License-Identifier: Apache-2.0
"""Keeps the library's own work out of what a script has recorded: graphs of autograd and of torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch

from farflung.base.torch_internals import kept_uncompiled

_Function = TypeVar("_Function", bound=Callable[..., Any])


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


def uncompiled(function: _Function) -> _Function:
    """Return `function` as Python runs it, also where a compiled function calls it: no graph can hold a round."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    kept: _Function = kept_uncompiled(call)
    return kept
