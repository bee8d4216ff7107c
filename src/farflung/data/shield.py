# SPDX-License-Identifier: Apache-2.0
"""Keeps worker processes of a loader alive at signals that are meant for their rank, which schedulers send to both."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from farflung.process.preemption import SIGNALS


@contextmanager
def held_back() -> Iterator[None]:
    """Hold signals back from processes that start meanwhile: their threads inherit that, whatever starts them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def handles_warnings() -> bool:
    """Return whether this process handles a scheduler's warning, and its workers need a shield."""
    return callable(signal.getsignal(signal.SIGUSR1)) and hasattr(signal, "sigwaitinfo")  # not on macOS


@dataclass(frozen=True)
class Shield:
    """A `worker_init_fn` of workers that `SIGNALS` don't end, unless their rank sends SIGTERM, as torch does."""

    init_fn: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=_wait, args=[os.getppid()], name="farflung shield", daemon=True).start()
        if self.init_fn is not None:
            self.init_fn(worker)


def _wait(rank: int) -> None:
    while True:
        got = signal.sigwaitinfo(SIGNALS)
        if got.si_signo == signal.SIGTERM and got.si_pid == rank:
            os._exit(0)  # as torch's own handler does
