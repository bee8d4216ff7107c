# SPDX-License-Identifier: Apache-2.0
"""Keeps worker processes of a loader alive at signals that are meant for their rank, which schedulers send to both."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from farflung.process.preemption import SIGNALS


def shielded(init_fn: Callable[[int], None] | None) -> Callable[[int], None] | None:
    """Return a `worker_init_fn` that shields workers as well, if this process handles a scheduler's warning."""
    return Shield(init_fn) if callable(signal.getsignal(signal.SIGUSR1)) else init_fn


@dataclass(frozen=True)
class Shield:
    """Starts a worker that no signal of `SIGNALS` ends, except SIGTERM from its rank, with which torch ends workers."""

    init_fn: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        if hasattr(signal, "sigwaitinfo"):  # not on macOS
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            threading.Thread(target=_wait, args=[os.getppid()], name="farflung shield", daemon=True).start()
        if self.init_fn is not None:
            self.init_fn(worker)


def _wait(rank: int) -> None:
    while True:
        got = signal.sigwaitinfo(SIGNALS)
        if got.si_signo == signal.SIGTERM and got.si_pid == rank:
            os._exit(0)  # as torch's own handler does
