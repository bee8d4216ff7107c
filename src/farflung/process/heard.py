# SPDX-License-Identifier: Apache-2.0
"""Passes signals on to ranks once: a scheduler may signal all processes of a run, or the launcher alone.

Python writes the number of each signal that one of its handlers hears into a file of the rank's, at once and whatever
the rank is busy with. So the launcher sees which ranks have heard a signal without it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

from farflung.config import environ
from farflung.process.failure import ERROR_FILE

_FILE = "signals"  # and the process's number
_WAIT_S = 0.3  # until all processes have got what was sent to all


def record_signals() -> None:
    """Have the signals that handlers of this rank hear written next to its error file, if a launcher named one."""
    path = environ.text(ERROR_FILE)
    if path and threading.current_thread() is threading.main_thread():
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
        with suppress(OSError):  # then the launcher passes each on
            file = os.open(Path(path).with_name(f"{_FILE}{os.getpid()}"), flags, 0o600)
            signal.set_wakeup_fd(file, warn_on_full_buffer=False)


class SignalForwarder:
    """Passes signals on to the ranks of this machine that have not heard them.

    Args:
        glob: finds files by a pattern in a folder with a folder `attempt_<number>/<local rank>` for each of them.
    """

    def __init__(self, glob: Callable[[str], Iterable[Path]]) -> None:
        self._glob = glob
        self._known: dict[tuple[int, int], int] = {}  # how often a process has heard a signal, with those from here

    def pass_on(self, number: int, processes: Collection[int]) -> None:
        """Send a signal in a moment, from a thread, so that it may be called in a handler."""
        timer = threading.Timer(_WAIT_S, self._send, (number, processes))
        timer.daemon = True
        timer.start()

    def _send(self, number: int, processes: Collection[int]) -> None:
        for process in processes:
            known, heard = self._known.get((process, number), 0), self._count(process, number)
            if heard <= known:
                with suppress(OSError):  # it has ended
                    os.kill(process, number)
                heard = known + 1
            self._known[process, number] = heard

    def _count(self, process: int, number: int) -> int:
        files = self._glob(f"attempt_*/*/{_FILE}{process}")
        return sum(file.read_bytes().count(number) for file in files)
