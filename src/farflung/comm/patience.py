# SPDX-License-Identifier: Apache-2.0
"""Waits for what other processes and machines do: in slices in which signals are heard, and aloud."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from math import inf
from typing import TypeVar

from farflung.base.events import Kind, record
from farflung.base.words import in_seconds
from farflung.comm.threads import ThreadedCall

_T = TypeVar("_T")

_SAY_S, _SAY_AGAIN_S = 10.0, 30.0


def waiting(
    every_s: float, within_s: float = inf, say: Callable[[float], object] | None = None, most_s: float = 0.0
) -> Iterator[float]:
    """Yield how many seconds a wait has lasted: at once, and after each pause, for as long as it may last.

    Args:
        every_s: the length of a pause.
        within_s: how long the wait may last.
        say: called with the seconds after ten of them, and then each thirty.
        most_s: pauses become longer, up to this.
    """
    began, say_at, waited_s = time.monotonic(), _SAY_S, 0.0
    yield waited_s
    while (waited_s := time.monotonic() - began) < within_s:
        time.sleep(min(every_s, within_s - waited_s))
        every_s = max(every_s, min(2 * every_s, most_s))
        waited_s = time.monotonic() - began
        if say is not None and waited_s >= say_at:
            say(waited_s)
            say_at = waited_s + _SAY_AGAIN_S
        yield waited_s


def aloud(who: str, what: str) -> Callable[[float], None]:
    """Return what records, as an event of a launcher, that `who` still waits: `for machine 0 at node0:29500`, say."""
    return lambda waited_s: record(Kind.WAITS, message=f"{who} still waits {what}, after {in_seconds(waited_s)}")


def interruptible(act: Callable[[], _T], name: str) -> _T:
    """Return what a call returns that runs in foreign code, which would hold back signals until it ends.

    A handler that raises leaves the call to its thread, which the end of this process stops. A thread that is not the
    main one hears no signals, and makes the call itself.
    """
    return ThreadedCall(act, name, threading.current_thread() is threading.main_thread()).result()
