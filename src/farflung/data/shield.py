# SPDX-License-Identifier: Apache-2.0
"""Keeps worker processes of a loader alive at signals that are meant for their rank, which schedulers send to both."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from typing import Any

from farflung.process.preemption import SIGNALS


@contextmanager
def held_back(context: Any) -> Iterator[None]:
    """Hold signals back from the processes of a `multiprocessing` context that start meanwhile, and their threads."""
    if (context or multiprocessing).get_start_method() != "fork":
        resource_tracker.ensure_running()  # its start, with the first process, would end what follows
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
    rank: int = field(default_factory=os.getpid)  # its process, which makes this

    def __call__(self, worker: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=_wait, args=[self.rank], name="farflung shield", daemon=True).start()
        if self.init_fn is not None:
            self.init_fn(worker)


def _wait(rank: int) -> None:
    while True:
        got = signal.sigwaitinfo(SIGNALS)
        if got.si_signo == signal.SIGTERM and got.si_pid == rank:
            os._exit(0)  # as torch's own handler does
