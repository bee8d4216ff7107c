# SPDX-License-Identifier: Apache-2.0
"""Threads that may not have ended when Python does, and must not be in torch's code then."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

_T = TypeVar("_T")

_EXIT_S = 0.5
_GLOO_S = 0.1


def await_gloo() -> None:
    """Give gloo's worker threads time to let go of their last collective, for which they need Python's lock.

    They do so after the caller has returned, and nothing tells when. If the group is destroyed meanwhile by a thread
    that holds the lock (as a DDP model does that outlives it), both wait for ever; if the interpreter ends meanwhile,
    the process aborts: "terminate called without an active exception".
    """
    names = set()
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread that has ended
            names.add(path.read_bytes())
    if not names or b"pt_gloo_runloop\n" in names:  # systems without this folder don't tell
        time.sleep(_GLOO_S)


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
    left = iter(acts)

    def next_ones() -> None:
        for act in left:
            act()

    others = [ThreadedCall(next_ones, "one of several calls") for _ in range(min(at_once, len(acts)) - 1)]
    next_ones()
    for other in others:
        other.result()
