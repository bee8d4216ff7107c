# SPDX-License-Identifier: Apache-2.0
"""Tests whose body runs on ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from farflung.testing.ranks import run_ranks


def on_ranks(num_ranks: int, each: Any = None, by_rank: Sequence[Any] | None = None, **options: Any) -> Callable:
    """Make a test of what each of some ranks does, with the fixtures and parameters that it names.

    Args:
        each: what it must return on every rank.
        by_rank: or what it must return on each of them.
        options: those of `run_ranks`.
    """

    def decorate(act: Callable[..., Any]) -> Callable[..., None]:
        @wraps(act)
        def test(**given: Any) -> None:
            assert run_ranks(act, num_ranks, *given.values(), **options) == (by_rank or [each] * num_ranks)

        act.__qualname__ += ".__wrapped__"  # by which ranks find it
        return test

    return decorate
