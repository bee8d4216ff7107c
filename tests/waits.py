# SPDX-License-Identifier: Apache-2.0
"""Wait for what another thread or process does, with a limit against hangs."""

import time
from collections.abc import Callable
from typing import TypeVar

from farflung.testing.patience import patience

T = TypeVar("T")


def until(condition: Callable[[], T], said: Callable[[], str] = lambda: "", timeout_s: float = 60.0) -> T:
    """Wait until `condition()` is true; return its value.

    Args:
        said: gives what is shown if it does not become true in time.
        timeout_s: how long it may take on an idle machine.
    """
    deadline = time.monotonic() + patience(timeout_s)
    while not (found := condition()):
        assert time.monotonic() < deadline, said()
        time.sleep(0.02)
    return found
