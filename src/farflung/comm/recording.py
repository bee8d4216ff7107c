# SPDX-License-Identifier: Apache-2.0
"""Keeps the library's own work out of what a script records and copies: graphs, and hooks of its models."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import nn

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


class WeakHook:
    """A hook of a module: calls `act` with its owner, as long as that lives, the module, and what the hook gets.

    Copies of the module, and files of it as a whole, have the hook too, where it does nothing.
    """

    def __init__(self, act: Callable[..., object] | None = None, owner: Any = None) -> None:
        self._act, self._owner = act, None if owner is None else weakref.ref(owner)

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if torch.compiler.is_compiling() or self._act is None or self._owner is None:
            return
        if (owner := self._owner()) is not None:
            self._act(owner, module, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return WeakHook, ()
