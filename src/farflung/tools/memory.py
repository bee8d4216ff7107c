# SPDX-License-Identifier: Apache-2.0
"""Memory: giving it back, and finding the batch size that fits."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch

from farflung.base.checks import check_callable, check_whole
from farflung.base.errors import WrongType

# How torch says that memory is out, on each kind of device; and cuDNN when no plan of it fits.
_OUT_OF_MEMORY = (
    " out of memory.",
    "MPS backend out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give back the device memory that torch keeps for later.

    Args:
        garbage_collection: first make Python free what only circles of references hold, which takes a while.
    """
    if garbage_collection:
        gc.collect()
    device = torch.accelerator.current_accelerator(check_available=True)
    empty_cache = None if device is None else getattr(torch.get_device_module(device), "empty_cache", None)
    if empty_cache is not None:
        empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Return a None for each of `objects` and free what nobody else holds: `a, b = release_memory(a, b)`."""
    released = [None] * len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return released


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return whether `exception` says that memory is out, or that cuDNN does not take the sizes that it was given."""
    if not isinstance(exception, RuntimeError) or len(exception.args) != 1:
        return False
    return any(words in str(exception.args[0]) for words in _OUT_OF_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Make `function(batch_size, ...)` be called with smaller and smaller batch sizes until memory suffices.

    The size that was found stays for later calls. It is also a decorator:
    `@find_executable_batch_size(starting_batch_size=64)`.

    Args:
        function: its first parameter is the batch size, which callers leave out.
        starting_batch_size: the first to be tried.
        reduce_batch_size_fn: returns the next one; by default nine tenths of the one before.

    Raises:
        WrongType: more arguments than the function has parameters besides the batch size, when it is called.
        RuntimeError: not even a batch of one fits, when it is called.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    check_callable("find_executable_batch_size: function", function, "train(batch_size)")
    check_whole("find_executable_batch_size: starting_batch_size", starting_batch_size, least=0)
    wanted = function
    batch_size = starting_batch_size

    @functools.wraps(wanted)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        clear_device_cache(garbage_collection=True)
        parameters = list(inspect.signature(wanted).parameters)
        if len(parameters) < len(args) + 1:
            name = getattr(wanted, "__name__", "function")
            raise WrongType(f"{name} is given its batch size by find_executable_batch_size; call it without one.")
        cause: Exception | None = None
        while batch_size > 0:
            try:
                return wanted(batch_size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
                cause = error.with_traceback(None)
                cause.__context__ = cause.__cause__ = None
            # Outside the handler: its traceback holds what the failed call had in memory.
            clear_device_cache(garbage_collection=True)
            batch_size = int(batch_size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise RuntimeError("No executable batch size found, reached zero.") from cause

    return call
