# SPDX-License-Identifier: Apache-2.0
"""On SIGTERM or SIGUSR1, a replica that comes and goes takes part in one more round, and then ends.

A scheduler that reclaims its machine, or a launcher that was asked to end, gives a process some seconds. A signal
handler can't run a round, so it sets a flag, which the loop checks after each step.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_WITHIN_S = 20.0  # launchers wait for 30 s
_SAME_S = 1.0  # a scheduler tells launcher and replica, and the launcher tells the replica again: that is one request


class Leaving:
    """Replaces the signals' default action, unless the script has a handler of its own. A second SIGTERM ends at once.

    Args:
        within_s: seconds after which the process ends, however far the round is.

    Attributes:
        is_asked: this replica got the signal.
    """

    def __init__(self, within_s: float) -> None:
        self.is_asked = False
        self._asked_at = 0.0
        self._within_s, self._process = min(within_s, _WITHIN_S), os.getpid()
        for number in _SIGNALS if threading.current_thread() is threading.main_thread() else ():
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if os.getpid() != self._process:  # a worker that was forked from it
            if number == signal.SIGTERM:
                self.leave()
        elif not self.is_asked:
            self.is_asked, self._asked_at = True, now
            _thread.start_new_thread(self._end, ())  # without threading's locks, which the main thread may hold
        elif number == signal.SIGTERM and now > self._asked_at + _SAME_S:
            self.leave()

    def _end(self) -> None:
        """End this process after a while, even if its main thread waits where Python calls no handler."""
        time.sleep(self._within_s)
        os._exit(128 + signal.SIGTERM)

    def leave(self) -> None:
        """End this process as SIGTERM would have ended it; in the main thread."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def stop(self) -> None:
        """Restore the signals' default action."""
        for number in _SIGNALS if threading.current_thread() is threading.main_thread() else ():
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL)
