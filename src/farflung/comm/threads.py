# SPDX-License-Identifier: Apache-2.0
"""Threads that may never end, and must not be in torch's code when Python does."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

_T = TypeVar("_T")

_EXIT_S = 1.0


def start_until_exit(act: Callable[[], None], name: str, stop: Callable[[], None] | None = None) -> threading.Thread:
    """Start a daemon thread, which the end of the process stops, and then waits for a moment.

    One that came back from C++ while Python ends would have to vanish in the middle of it, and the process would abort.
    """

    def run() -> None:
        try:
            act()
        finally:
            atexit.unregister(leave)

    def leave() -> None:
        if stop is not None:
            stop()
        if thread.is_alive():
            thread.join(_EXIT_S)

    thread = threading.Thread(target=run, name=name, daemon=True)
    atexit.register(leave)
    thread.start()
    return thread


class ThreadedCall(Generic[_T]):
    """A call that is made in a thread of its own, or at once."""

    def __init__(self, act: Callable[[], _T], name: str, in_thread: bool = True) -> None:
        self._future: Future[_T] = Future()

        def run() -> None:
            try:
                self._future.set_result(act())
            except BaseException as error:
                self._future.set_exception(error)

        if in_thread:
            start_until_exit(run, name)
        else:
            run()

    @property
    def is_over(self) -> bool:
        """Whether the call has returned, or raised."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> _T:
        """Wait for the call, and return or raise what it did; `concurrent.futures.TimeoutError` if it takes longer."""
        return self._future.result(timeout_s)


def side_by_side(acts: Sequence[Callable[[], object]], at_once: int) -> None:
    """Make some calls, so many of them at a time in threads; raise what the first one of them has raised."""
    left = list(acts)

    def next_ones() -> None:
        while left:
            left.pop(0)()

    num_threads = min(at_once, len(left)) - 1
    others = [ThreadedCall(next_ones, "one of several calls") for _ in range(num_threads)]
    next_ones()
    for other in others:
        other.result()
