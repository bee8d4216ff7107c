# SPDX-License-Identifier: Apache-2.0
"""Ties a rank to the launcher that started it, so that none outlives a launcher that is killed; and a launcher that was
started by ssh to the other end of that connection: `python -m farflung.process.tether COMMAND`.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

from farflung.base.signals import handled
from farflung.config import environ

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>; it also holds for a program that takes this process's place

SIGN_S = 5.0  # between two signs of life of the other end
_SILENCE_S = 30.0  # after which the connection is dead
_END_WITHIN_S = 10.0
_LOOK_S = 0.1


def end_with_launcher() -> None:
    """Have the kernel kill this process when its launcher dies, however that happens. Only on Linux.

    The launcher is the parent, and has left its number in a variable, which is removed: processes that this one starts
    are not tied to it. Replicas that come and go find none, as they outlive their launcher.
    """
    launcher = environ.integer(environ.LAUNCHER)
    environ.remove(environ.LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    is_tied = ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0
    # It may have ended before; or its child is another program, which has started this process.
    if is_tied and os.getppid() != launcher and _has_ended(launcher):
        os.kill(os.getpid(), signal.SIGKILL)


def _has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def run_tethered(command: Sequence[str]) -> int:
    """Run a command until it ends, and end it and what it has started when stdin closes or falls silent.

    Each byte on stdin is the number of a signal for it, SIGKILL for its whole group; or 0, a sign of life that is to
    come every `SIGN_S`. A closed connection is a request to end, by SIGTERM and 10 s later by SIGKILL.

    Returns:
        its exit code; 128 + the number of the signal that ended it.
    """
    with handled(lambda request: sys.exit(128 + request.number), (signal.SIGTERM, signal.SIGHUP)):
        return _run(command)


def _run(command: Sequence[str]) -> int:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    heard, end_at = time.monotonic(), inf
    try:
        while process.poll() is None and time.monotonic() < end_at:
            if end_at < inf:
                time.sleep(_LOOK_S)
                continue
            said = os.read(0, 64) if select.select([0], [], [], _LOOK_S)[0] else None
            if said:
                heard = time.monotonic()
            for number in filter(None, said or ()):
                os.killpg(process.pid, number) if number == signal.SIGKILL else process.send_signal(number)
            if said == b"" or time.monotonic() > heard + _SILENCE_S:
                end_at = time.monotonic() + _END_WITHIN_S
                process.terminate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(run_tethered(sys.argv[1:]))
