# SPDX-License-Identifier: Apache-2.0
"""Signals as requests to this process: several within a short time, as schedulers send them to a whole run, are one.

The only file that sets signal handlers.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from types import FrameType

END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# What schedulers and their users send before the end, or at any time: a launcher passes it on. SIGRTMAX is left out.
WARNINGS = (
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
    *range(getattr(signal, "SIGRTMIN", 0), getattr(signal, "SIGRTMAX", 0)),
)
PREEMPTION = (signal.SIGTERM, signal.SIGUSR1)  # the end, and the warning that Slurm, say, gives before it
REQUEUE = 75  # EX_TEMPFAIL of sysexits.h, for a run that a scheduler ended: start the same command again
_TERMINALS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # nohup, say, has them ignored
_SAME_S = 3.0  # a scheduler signals launcher and ranks, and the launcher passes it on: that is one request


@dataclass(frozen=True)
class Request:
    """A signal that this process got.

    Args:
        number: of the signal.
        count: how many requests of this number there were, with this one.
        at: when, in seconds since 1970.
    """

    number: int
    count: int
    at: float

    @property
    def name(self) -> str:
        """`SIGTERM`, for example."""
        return name_of(self.number)


@contextmanager
def handled(
    act: Callable[[Request], None], numbers: Collection[int] = (signal.SIGINT, signal.SIGTERM)
) -> Iterator[None]:
    """Call `act` in the main thread at each request by one of `numbers`, for the length of a block.

    Signals of one number within 3 s of a request belong to it, but for SIGINT: who presses Ctrl-C twice means it.
    What a terminal sends stays ignored if it was. A process that is forked inside the block gets none of it: there a
    warning does nothing, and other signals end it. In other threads than the main one, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process, began, counts = os.getpid(), dict.fromkeys(numbers, -inf), dict.fromkeys(numbers, 0)

    def called(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if os.getpid() != process:
            if number not in WARNINGS:
                end_by(number)
        elif number == signal.SIGINT or now > began[number] + _SAME_S:
            began[number] = now
            counts[number] += 1
            act(Request(number, counts[number], time.time()))

    before = {}
    for number in numbers:
        if number not in _TERMINALS or signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, called)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is called and threading.current_thread() is threading.main_thread():
                signal.signal(number, handler)


@contextmanager
def preemption(hear: Callable[[Request], None], *, replaces: bool) -> Iterator[None]:
    """Call `hear` when a scheduler is about to end this process, for the length of a block.

    A second SIGTERM ends it at once; SIGUSR1 is a warning, however often it comes.

    Args:
        replaces: take the place of handlers that the script has set.
    """

    def act(request: Request) -> None:
        if request.number == signal.SIGTERM and request.count > 1:
            end_by(signal.SIGTERM)
        hear(request)

    with handled(act, [n for n in PREEMPTION if replaces or signal.getsignal(n) is signal.SIG_DFL]):
        yield


def restore_defaults(numbers: Collection[int]) -> None:
    """Give signals the action that they have in a Python that was just started."""
    for number in numbers:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def heed_children() -> None:
    """Undo that SIGCHLD is ignored, which daemons leave to what they start: no exit code of a child would be known."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        restore_defaults([signal.SIGCHLD])


def end_by(number: int) -> None:
    """Do what Python does at a signal without a handler: end this process by it, SIGINT as KeyboardInterrupt."""
    restore_defaults([number])
    os.kill(os.getpid(), number)


def name_of(number: int) -> str:
    """Return a signal's name, or `signal 40` if it has none."""
    names = [known.name for known in signal.Signals if known == number]
    return names[0] if names else f"signal {number}"
