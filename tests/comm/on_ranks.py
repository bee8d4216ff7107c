# SPDX-License-Identifier: Apache-2.0
"""Tests whose body runs on real ranks."""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from farflung.testing.ranks import run_ranks


def on_ranks(size: int | str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let the body of a test run on ranks with its arguments, one of which may be their number.

    Args:
        size: the number of ranks, or the name of the argument that has it.
        options: those of `run_ranks`.
    """

    def decorated(body: Callable[..., None]) -> Callable[..., None]:
        @wraps(body)
        def test(**arguments: Any) -> None:
            number = arguments[size] if isinstance(size, str) else size
            run_ranks(call_body, number, body.__module__, body.__name__, arguments, **options)

        return test

    return decorated


def call_body(module: str, name: str, arguments: dict[str, Any]) -> None:
    """Call what `on_ranks` has wrapped, which each rank finds by its name."""
    getattr(import_module(module), name).__wrapped__(**arguments)
