# SPDX-License-Identifier: Apache-2.0
"""Time limits for tests that guard against hangs, not against slow or busy machines: they grow with both."""

from __future__ import annotations

import os
import time
from functools import lru_cache

_LOOPS = 300_000
_LOOPS_S = 0.03  # what they take one idle core of a server of 2023, with Python 3.11
_VALID_S = 5.0


def patience(seconds: float) -> float:
    """Return how long to wait here and now for what takes up to `seconds` on an idle machine.

    What counts is the larger of two measurements: how long a fixed piece of work takes at this moment, and how many
    processes there have been for each core in the last minute.
    """
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * max(1.0, _work_s(int(time.monotonic() / _VALID_S)) / _LOOPS_S, load)


@lru_cache(maxsize=1)
def _work_s(moment: int) -> float:
    """Measure the work once in a moment of `_VALID_S`, as tests ask often."""
    start = time.perf_counter()
    total = 0
    for number in range(_LOOPS):
        total += number * number % 7
    return time.perf_counter() - start
