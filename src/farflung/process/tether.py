# SPDX-License-Identifier: Apache-2.0
"""Ties a rank to the launcher that started it, so that none outlives a launcher that is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from farflung.config import environ

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>; it also holds for a program that takes this process's place


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
