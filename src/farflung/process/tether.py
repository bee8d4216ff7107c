# SPDX-License-Identifier: Apache-2.0
"""Ties a rank to the launcher that started it, so that none outlives a launcher that is killed; and a launcher that was
started by ssh to the other end of that connection: its arguments are `--reports TOKEN COMMAND`. `--key` after
TOKEN has it read the run's key from stdin.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from math import inf
from typing import NoReturn

from farflung.base.signals import handled, heed_children, restore_defaults
from farflung.config import environ
from farflung.process.identity import process_state

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>; it also holds for a program that takes this process's place

SIGN_S = 5.0  # between two heartbeats of the other end
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
    if is_tied and os.getppid() != launcher and process_state(launcher, None) == "gone":
        os.kill(os.getpid(), signal.SIGKILL)


def mark_of(token: str) -> bytes:
    """Return what stands before a launcher's report on stderr. Only the other end of the connection knows the token."""
    return b"\x1e" + token.encode() + b" "


def split_reports(lines: Iterable[bytes], mark: bytes) -> Iterator[tuple[bool, bytes]]:
    """Undo `_merged`: yield each line of a stream, and whether it is a report or what was printed, as it was."""
    held = b""
    for line in lines:
        printed, is_report, report = line.partition(mark)
        held += printed
        if is_report:
            yield True, report
        else:
            yield False, held
            held = b""
    if held:
        yield False, held


def _merged(mark: bytes, printed: int, reported: int) -> list[threading.Thread]:
    """Start threads that write to stderr what is printed, with lines of `reported` between, each whole and marked."""
    lock = threading.Lock()

    def copy(source: int, mark: bytes) -> None:
        with os.fdopen(source, "rb", buffering=-1 if mark else 0) as pipe:
            while data := pipe.readline() if mark else pipe.read(65536):
                with lock, suppress(OSError):  # nobody reads; the command must not wait for that
                    rest = memoryview(mark + data)
                    while rest:
                        rest = rest[os.write(2, rest) :]

    threads = [threading.Thread(target=copy, args=each, daemon=True) for each in ((printed, b""), (reported, mark))]
    for thread in threads:
        thread.start()
    return threads


def run_tethered(command: Sequence[str], token: str, has_key: bool = False) -> int:
    """Run a command until it ends, and end it and what it has started when stdin closes or falls silent.

    Each byte on stdin is the number of a signal for it, SIGKILL for its whole group; or 0, a heartbeat that is to
    come every `SIGN_S`. A closed connection is a request to end, by SIGTERM and 10 s later by SIGKILL.

    Args:
        token: have the command report to a pipe of its own, whose lines come on stderr after `mark_of(token)`.
        has_key: the first line on stdin is the run's key, for a variable of the command: others see its arguments.

    Returns:
        its exit code; 128 + the number of the signal that ended it.
    """
    # What starts this may block SIGINT, as a worker of Ray does, or ignore it, as a shell does for what is in its
    # background; and so would the command.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    restore_defaults([signal.SIGINT])
    heed_children()
    with handled(lambda request: sys.exit(128 + request.number), (signal.SIGTERM, signal.SIGHUP)):
        (printed, stderr), (reported, reports) = os.pipe(), os.pipe()
        variables = {**environ.snapshot(), environ.REPORTS: str(reports)} | ({environ.KEY: _line()} if has_key else {})
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=stderr, pass_fds=[reports], env=variables, start_new_session=True
        )
        os.close(stderr)
        os.close(reports)
        merged = _merged(mark_of(token), printed, reported)
        try:
            return _run(process)
        finally:
            for thread in merged:  # until all is written, but not for processes that the command has left behind
                thread.join(1.0)


def _line() -> str:
    """Read a line from stdin, and nothing of what follows it."""
    found = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        found += byte
    return found.decode()


def _run(process: subprocess.Popen[bytes]) -> int:
    heard, end_at = time.monotonic(), inf
    try:
        while process.poll() is None and time.monotonic() < end_at:
            is_ending = end_at < inf
            received = os.read(0, 64) if select.select([] if is_ending else [0], [], [], _LOOK_S)[0] else None
            if received:
                heard = time.monotonic()
            for number in filter(None, received or ()):
                os.killpg(process.pid, number) if number == signal.SIGKILL else process.send_signal(number)
            if not is_ending and (received == b"" or time.monotonic() > heard + _SILENCE_S):
                end_at = time.monotonic() + _END_WITHIN_S
                process.terminate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    return code if code >= 0 else 128 - code


def main() -> NoReturn:
    """Run the command in this process's arguments."""
    has_key = sys.argv[3] == "--key"
    sys.exit(run_tethered(sys.argv[3 + has_key :], sys.argv[2], has_key))
