# SPDX-License-Identifier: Apache-2.0
"""Keeps worker processes of a loader alive at signals that are meant for their rank, which schedulers send to both."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

from farflung.base.signals import PREEMPTION

InitFn = Callable[[int], None]


def is_needed() -> bool:
    """Return whether this process handles a scheduler's warning, which would end its workers."""
    return callable(signal.getsignal(signal.SIGUSR1)) and hasattr(signal, "sigwaitinfo")  # not on macOS


@contextmanager
def blocked(context: Any) -> Iterator[None]:
    """Block `PREEMPTION` in processes of a `multiprocessing` context that start meanwhile, and in their threads."""
    if (context or multiprocessing).get_start_method() != "fork":
        resource_tracker.ensure_running()  # its start, with the first process, would end what follows
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignoring(init_fn: InitFn | None) -> InitFn:
    """Return a `worker_init_fn` of workers that ignore `PREEMPTION`, but end at SIGTERM of this process, torch's."""
    return partial(_ignore, init_fn, os.getpid())


def _ignore(init_fn: InitFn | None, rank: int, worker: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION)
    threading.Thread(target=_wait, args=[rank], name="farflung worker signals", daemon=True).start()
    if init_fn is not None:
        init_fn(worker)


def _wait(rank: int) -> None:
    while True:
        got = signal.sigwaitinfo(PREEMPTION)
        if got.si_signo == signal.SIGTERM and got.si_pid == rank:
            os._exit(0)  # as torch's own handler does
