# SPDX-License-Identifier: Apache-2.0
"""Where all ranks of a run stop when its scheduler is about to end it: a vote over the store that costs no collective.

A signal reaches ranks at different steps, or only one of them. Each rank counts the boundaries between its steps. When
the signal is known, each rank's watchdog publishes the number of its rank's next boundary, and the rank waits at
boundaries until all numbers are there. Then all ranks stop at the largest one. No rank can be past it, as each waits
no later than at its own. The wait is short: watchdogs publish even while their ranks compute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

from farflung.base.errors import ConfigError
from farflung.base.events import Kind, record
from farflung.base.signals import Request, preemption
from farflung.comm.presence import PresenceStore


class PreemptionVote:
    """Hears this rank's signals, and votes on where the run stops.

    A second SIGTERM ends the process at once; SIGUSR1 is a warning, however often it comes.

    Args:
        rank: this one, of `size`.
        hear: called at a signal; then handlers that the script has set stay. None: this one takes their place.

    Attributes:
        why: which rank got which signal; empty as long as none is known to have got one.
        passed: how many boundaries this rank has passed.
    """

    def __init__(self, rank: int, size: int, hear: Callable[[], None] | None = None) -> None:
        if hear is None and threading.current_thread() is not threading.main_thread():
            raise ConfigError("save_on_signal: only the main thread hears signals. Make the Accelerator there.")
        self.why, self.passed = "", 0
        self._rank, self._is_alone, self._hear_too = rank, size == 1, hear
        self._has_published = False
        self._stop: int | None = None  # the boundary where all stop
        self._decided = threading.Event()
        self._handlers = ExitStack()
        self._handlers.enter_context(preemption(self._hear, replaces=hear is None))

    def passes(self) -> bool:
        """Pass a boundary between two steps; return whether the run stops at this one."""
        self.passed += 1  # before it looks at `why`, as the watchdog sets that before it looks here
        if not self.why or self._is_alone:
            return bool(self.why)
        self._decided.wait()
        return self._stop == self.passed

    def look(self, presence: PresenceStore) -> None:
        """Take part in the vote: the watchdog calls this now and then."""
        if reason := presence.published("signal"):
            self.why = reason
        elif self.why:  # never set to what it was: a handler may set it in between
            presence.publish("signal", self.why)
        if not self.why or self._decided.is_set():
            return
        if not self._has_published:
            presence.post(str(self.passed + 1), "stop")
            self._has_published = True
        stops = presence.posts("stop")
        silent = [rank for rank in range(presence.size) if rank not in stops]
        if not silent:
            self._stop = max(map(int, stops.values()))
        if not silent or presence.ended(silent):  # ranks that have ended were at the end of the work
            self.end()

    def end(self) -> None:
        """Vote no more: it is decided, or the store is gone, or the work is done."""
        self._decided.set()

    def release(self) -> None:
        """Restore the handlers that were there before."""
        self.end()
        self._handlers.close()

    def _hear(self, request: Request) -> None:
        if self._hear_too is not None:
            self._hear_too()
        elif not self.why and not self.passed:
            message = (
                f"{request.name} came before the end of any step, where the run is saved. A loop without a "
                "prepared loader must call accelerator.stop_if_signalled() at the end of each step."
            )
            record(Kind.WARNING, message=message)
        self.why = self.why or f"{request.name} at rank {self._rank}"
