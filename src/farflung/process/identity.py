# SPDX-License-Identifier: Apache-2.0
"""What tells a process from all others that had, or will have, its number, whatever the clock is set to."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_START_TIME = 19  # of the fields of /proc/PID/stat that follow the name: proc_pid_stat(5)


def process_identity(pid: int) -> str:
    """Return the identity of a process of this machine.

    On Linux it is the machine's start and the tick since then in which the process began: `psutil` reports that tick
    as a time of day, which changes when the clock is set. Other systems keep the time itself.

    Raises:
        ProcessLookupError: there is no such process.
    """
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    if boot:
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            return f"{boot}:{int(fields[_START_TIME])}"
        except (OSError, IndexError):
            raise ProcessLookupError(pid) from None
    import psutil  # type: ignore[import-untyped]  # late, as in launch/network.py

    try:
        return f":{psutil.Process(pid).create_time()}"
    except psutil.Error:
        raise ProcessLookupError(pid) from None


def this_process() -> dict[str, Any]:
    """Return what a file says of this process, so that others find it and no other of its number."""
    process = {"pid": os.getpid(), "identity": process_identity(os.getpid())}
    return {"host": socket.gethostname(), "container": _container(), **process}


def is_here(process: Mapping[str, Any]) -> bool:
    """Return whether a process, as `this_process` told of it, is or was one whose number means that process here."""
    return process["host"] == socket.gethostname() and process.get("container") in (None, _container())


def process_state(pid: int, identity: str | None) -> str:
    """Return whether a process of this machine is `running`, `stopped` or `gone`.

    Args:
        identity: as `process_identity` returned it; None: whichever has this number now.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        is_other = identity is not None and process_identity(pid) != identity
        status = psutil.STATUS_ZOMBIE if is_other else process.status()
    except (ProcessLookupError, psutil.Error):
        return "gone"
    if status == psutil.STATUS_ZOMBIE:
        return "gone"
    return "stopped" if status == psutil.STATUS_STOPPED else "running"


def address_of(pid: int) -> str:
    """Return the container, number and identity of a process, for `has_ended`; empty if it is gone."""
    with suppress(ProcessLookupError):
        return f"{_container()} {pid} {process_identity(pid)}"
    return ""


def has_ended(address: str) -> bool:
    """Return whether a process has ended, given its `address_of`; False if it ran elsewhere, or before a reboot."""
    container, _, process = address.partition(" ")
    number, _, identity = process.partition(" ")
    boot = identity.partition(":")[0]
    is_here = bool(boot) and container == _container() and process_identity(os.getpid()).startswith(f"{boot}:")
    return is_here and process_state(int(number), identity) == "gone"


def _container() -> str:
    """Return the name of the container in which the numbers of processes are those that this one sees."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""
