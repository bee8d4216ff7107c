# SPDX-License-Identifier: Apache-2.0
"""On SIGTERM or SIGUSR1, a replica of an elastic run takes part in one more round, and then ends.

A scheduler that reclaims its machine, or a launcher that was asked to end, gives a process some seconds. A signal
handler can't run a round, so it sets a flag, which the loop checks after each step.
"""

from __future__ import annotations

import _thread
import os
import signal
import time
from contextlib import ExitStack

from farflung.base.signals import Request, end_by, preemption

_WITHIN_S = 20.0  # launchers wait for 30 s


class Leaving:
    """Hears a scheduler's signals, unless the script has handlers of its own for them.

    Args:
        within_s: seconds after which the process ends, however far the round is.

    Attributes:
        is_asked: this replica got the signal.
    """

    def __init__(self, within_s: float) -> None:
        self.is_asked = False
        self._within_s = min(within_s, _WITHIN_S)
        self._handlers = ExitStack()
        self._handlers.enter_context(preemption(self._hear, replaces=False))

    def _hear(self, request: Request) -> None:
        if not self.is_asked:
            self.is_asked = True
            _thread.start_new_thread(self._end, ())  # without threading's locks, which the main thread may hold

    def _end(self) -> None:
        """End this process after a while, even while its main thread waits in code that calls no handler of Python."""
        time.sleep(self._within_s)
        os._exit(128 + signal.SIGTERM)

    def leave(self) -> None:
        """End this process as SIGTERM would have ended it; in the main thread."""
        end_by(signal.SIGTERM)

    def stop(self) -> None:
        """Restore the signals' default action."""
        self._handlers.close()
