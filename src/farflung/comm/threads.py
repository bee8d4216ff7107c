# SPDX-License-Identifier: Apache-2.0
"""Threads that may never end, and must not be in torch's code when Python does."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

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
