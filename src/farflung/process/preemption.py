# SPDX-License-Identifier: Apache-2.0
"""Where all ranks of a run stop when its scheduler is about to end it: a vote over the store that costs no collective.

A signal reaches ranks at different steps, or only one of them. Each rank counts the boundaries between its steps. When
a rank's watchdog hears of the signal, it publishes n, the number of the rank's next boundary. At that boundary the rank
waits until all have published, and all stop at the largest n. No rank can have passed it, as each waits at its own n,
which is not larger. The wait is short: watchdogs publish whatever their ranks are busy with.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING

from farflung.base.errors import ConfigError

if TYPE_CHECKING:
    from farflung.comm.presence import PresenceStore

REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: start the same command again
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # the end, and the warning that Slurm, say, gives before it
_SAME_S = 3.0  # a scheduler signals launcher and ranks, and the launcher passes it on: that is one request
_LOOK_S = 0.5


class Preemption:
    """Hears this rank's signals, in place of the script's own handlers, and votes on where the run stops.

    A second SIGTERM ends the process at once; SIGUSR1 is a warning, however often it comes.

    Args:
        rank: this one, of `size`.

    Attributes:
        why: which rank got which signal; empty as long as none is known to have got one.
    """

    def __init__(self, rank: int, size: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("save_on_signal: only the main thread hears signals. Make the Accelerator there.")
        self.why = ""
        self._rank, self._process, self._ends_at = rank, os.getpid(), float("inf")
        self._is_alone, self._is_over = size == 1, False
        self._lock = threading.Lock()
        self._passed = 0  # boundaries
        self._next: int | None = None  # the boundary that was published
        self._stop: int | None = None  # where all stop
        self._decided = threading.Event()
        self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}

    def passes(self) -> bool:
        """Pass a boundary between two steps; return whether the run stops at this one."""
        with self._lock:
            self._passed += 1
            has_published = self._next is not None
        if self._is_alone:
            return bool(self.why)
        while has_published and not self._decided.wait(_LOOK_S) and not self._is_over:
            pass
        return self._stop == self._passed

    def look(self, presence: PresenceStore) -> None:
        """Take part in the vote: the watchdog calls this now and then."""
        said = presence.published("signal")
        if self.why and not said:
            presence.publish("signal", self.why)
        self.why = said or self.why
        if not self.why or self._decided.is_set():
            return
        if self._next is None:
            with self._lock:
                self._next = self._passed + 1
            presence.post(str(self._next), "stop")
        stops = presence.posts("stop")
        silent = [rank for rank in range(presence.size) if rank not in stops]
        if not silent:
            self._stop = max(map(int, stops.values()))
        if not silent or presence.ended(silent):  # ranks that have ended were at the end of the work
            self._decided.set()

    def end(self) -> None:
        """Vote no more, as the store is gone or the work is done."""
        self._is_over = True

    def release(self) -> None:
        """Restore the handlers that were there before."""
        self.end()
        for number, before in self._before.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_ours = os.getpid() == self._process  # and not a process that was forked from it
        if number == signal.SIGTERM and (not is_ours or now > self._ends_at):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif is_ours:
            self.why = self.why or f"{signal.Signals(number).name} at rank {self._rank}"
            if number == signal.SIGTERM:
                self._ends_at = min(self._ends_at, now + _SAME_S)
