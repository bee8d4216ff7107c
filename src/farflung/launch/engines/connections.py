# SPDX-License-Identifier: Apache-2.0
"""The connections to launchers on other hosts: what they print becomes one log, and a run ends with them.

A launcher there reports in JSON on its stderr, between what its ranks print (`farflung launch --json`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import inf
from textwrap import shorten
from typing import Any, ClassVar, Generic, TextIO, TypeVar

from farflung.base.causes import Cause
from farflung.base.signals import WARNINGS, Request, handled
from farflung.config.launch import LaunchSettings
from farflung.launch.codes import BY_SIGNAL, DONE, FAILED, EngineFailure
from farflung.launch.engines.engine import Job
from farflung.launch.events import say
from farflung.launch.report import show_box
from farflung.process.identity import process_identity, process_state
from farflung.process.tether import SIGN_S, mark_of, split_reports

GONE = 255  # exit code of ssh where the connection or the machine behind it fails
_LOOK_S = 0.05
_OTHERS_END_WITHIN_S, _WITHOUT_GONE_S = 20.0, 5.0  # once a host of a fixed run has failed, or is gone
_END_WITHIN_S, _KILLED_WITHIN_S = 35.0, 5.0  # ranks have half a minute to end


class Connection:
    """The connection to a host, or to whatever runs a launcher under `process/tether.py` elsewhere."""

    def __init__(self, host: str) -> None:
        self.host, self.said = host, "no reason was given"  # last on stderr, by ssh or a rank
        self.failures: list[dict[str, Any]] = []  # as the launcher has reported them
        self.is_reported = False  # that it is gone
        self.readers: list[threading.Thread] = []

    @property
    def code(self) -> int | None:
        """How its launcher has ended; None: it runs."""
        raise NotImplementedError

    @property
    def is_gone(self) -> bool:
        """Whether the connection has failed, and not what ran at its end."""
        return self.code is not None and (self.code < 0 or self.code == GONE)

    @property
    def streams(self) -> tuple[Iterable[bytes], Iterable[bytes]]:
        """The lines of stdout and of stderr, as they come."""
        raise NotImplementedError

    def send_signal(self, number: int = 0) -> None:
        """Send a signal to the launcher; 0 is a heartbeat alone."""
        raise NotImplementedError

    def kill(self) -> None:
        """End the connection."""
        raise NotImplementedError


class SshConnection(Connection):
    """The connection that a program makes, ssh."""

    def __init__(self, host: str, command: Sequence[str]) -> None:
        super().__init__(host)
        self.said = "ssh gave no reason"
        pipe = subprocess.PIPE  # a session of its own: Ctrl-C leaves ssh alone, for what is printed at the end
        self._ssh = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)

    @property
    def code(self) -> int | None:
        return self._ssh.poll()

    @property
    def streams(self) -> tuple[Iterable[bytes], Iterable[bytes]]:
        assert self._ssh.stdout is not None
        assert self._ssh.stderr is not None
        return self._ssh.stdout, self._ssh.stderr

    def send_signal(self, number: int = 0) -> None:
        assert self._ssh.stdin is not None
        with suppress(OSError):
            self._ssh.stdin.write(bytes([number]))
            self._ssh.stdin.flush()

    def kill(self) -> None:
        self._ssh.kill()


L = TypeVar("L", bound=Connection)


class Connections(Generic[L]):
    """All connections of a run."""

    def __init__(self, settings: LaunchSettings, connections: Iterable[L], token: str) -> None:
        self._mark = mark_of(token)
        self._settings, self._is_elastic = settings, settings.elastic is not None
        self._lock = threading.Lock()  # around what is printed
        self._signal, self._num_asked, self._end_at = 0, 0, inf
        self.all: list[L] = []
        for connection in connections:
            self.add(connection)

    def add(self, connection: L) -> None:
        """Print what comes over one more connection."""
        self.all.append(connection)
        for source, out in zip(connection.streams, (sys.stdout, sys.stderr), strict=True):
            connection.readers.append(threading.Thread(target=self._copy, args=(connection, source, out), daemon=True))
            connection.readers[-1].start()

    def follow(self) -> int:
        """Print what comes until all have ended; return the run's exit code."""
        sign_at = 0.0
        with handled(self._hear, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *WARNINGS)):
            while self._is_running():
                now = time.monotonic()
                if now >= sign_at:
                    sign_at = now + SIGN_S
                    for connection in self.all:
                        connection.send_signal()
                self._report_lost()
                if not self._is_elastic and not self._num_asked and any(connection.code for connection in self.all):
                    is_gone = any(connection.is_gone for connection in self.all)
                    self._end_at = min(self._end_at, now + (_WITHOUT_GONE_S if is_gone else _OTHERS_END_WITHIN_S))
                if now >= self._end_at:
                    self._end(signal.SIGTERM)
                time.sleep(_LOOK_S)
            for reader in (reader for connection in self.all for reader in connection.readers):
                reader.join(1.0)
            self._report_lost()
        return self._exit_code()

    def _is_running(self) -> bool:
        return any(connection.code is None for connection in self.all)

    def _report_lost(self) -> None:
        for connection in self.all:
            if self._is_elastic and connection.is_gone and not connection.is_reported and not self._signal:
                connection.is_reported = True
                words = f"{connection.host} is gone: {connection.said}; the others continue"
                say(self._settings, "lost", words, is_error=True, host=connection.host)

    def _end(self, number: int) -> None:
        """Have all end: by this signal, the next time by SIGKILL, and then by closing the connections."""
        self._num_asked += 1
        for connection in self.all:
            if connection.code is None and self._num_asked > 2:
                connection.kill()
            elif connection.code is None:
                connection.send_signal(number if self._num_asked == 1 else signal.SIGKILL)
        self._end_at = time.monotonic() + (_END_WITHIN_S if self._num_asked == 1 else _KILLED_WITHIN_S)

    def _hear(self, request: Request) -> None:
        """Pass a warning on to all hosts, and a request to end."""
        if request.number in WARNINGS:
            for connection in self.all:
                connection.send_signal(request.number)
        else:
            self._signal = request.number
            self._end(signal.SIGINT if request.number == signal.SIGINT else signal.SIGTERM)

    def _exit_code(self) -> int:
        """Show in one box why a fixed run has failed, and return the exit code."""
        codes = [connection.code for connection in self.all if not connection.is_gone]
        if self._signal:
            return BY_SIGNAL + self._signal
        if self._is_elastic:
            return next(filter(None, codes), DONE if codes else FAILED)
        failures = [(one, connection) for connection in self.all for one in connection.failures]
        failures.sort(key=lambda pair: (_has_lost_a_peer(pair[0]), pair[0]["failed_at"]))
        gone = next((connection for connection in self.all if connection.is_gone), None)
        if gone is not None:
            title, code = f"{gone.host} is gone", FAILED
            text = f"The connection to it has ended: {gone.said}\nWhat runs there ends by itself."
        elif failures:
            first, connection = failures.pop(0)
            title, text, code = first["message"], first["report"], connection.code or FAILED
        else:
            return next(filter(None, codes), DONE)
        others = [f"{one['message']}: {shorten(str(one['error']), 150, placeholder=' ...')}" for one, _ in failures]
        text = "\n".join([text, *(["", "then:", *others[:3]] if others else [])])
        if not self._settings.json:
            show_box(title, text)
        elif gone is not None:
            say(self._settings, "failed", title, is_error=True, host=gone.host, report=text)
        return code

    def _copy(self, connection: Connection, source: Iterable[bytes], out: TextIO) -> None:
        """Print what a host prints, a whole line at a time with its name before it."""
        own, is_stderr = self._settings, out is sys.stderr
        for is_report, line in split_reports(source, self._mark):
            event = _event(line) if is_report else None
            if event is None:
                if is_stderr:
                    connection.said = line.decode(errors="replace").rstrip()
                self._print(b"[%s] %s\n" % (connection.host.encode(), line.removesuffix(b"\n")), out)
                continue
            if "report" in event:
                connection.failures.append(event)
            if own.json:
                self._print(f"{json.dumps(event | {'host': connection.host})}\n".encode(), out)
            elif "report" in event and self._is_elastic:
                with self._lock:
                    show_box(event["message"], event["report"])
            elif "report" not in event and "message" in event and not own.quiet:
                self._print(f"[{connection.host}] farflung: {event['message']}\n".encode(), out)

    def _print(self, line: bytes, out: TextIO) -> None:
        with self._lock, suppress(OSError, ValueError):  # a terminal that was closed; reading continues
            if hasattr(out, "buffer"):
                out.flush()
                out.buffer.write(line)
            else:
                out.write(line.decode(errors="replace"))
            out.flush()


class ForegroundEngine(Generic[L]):
    """What engines share whose launcher stays in the foreground: it holds the connections, and the run ends with it."""

    outlives_launch: ClassVar[bool] = False
    _job: Job
    _connections: Connections[L]  # once it is submitted

    def follow(self) -> int:
        """Print what comes over the connections until all have ended."""
        if by := self._job.handle:
            raise EngineFailure(
                f"{self._job.name} was started by {self._job.settings.engine or 'ssh'}: process {by['pid']} on "
                f"{by['machine']} shows what it prints, and nobody else gets it. `farflung watch {self._job.name}` "
                "shows where it is."
            )
        return self._connections.follow()

    def cancel(self) -> str:
        """End the launcher that holds the connections, if it runs on this machine, and so what it has started."""
        name, by = self._job.name, self._job.handle
        if by["machine"] != socket.gethostname():
            raise EngineFailure(f"{name} was started on {by['machine']}: `farflung cancel {name}` there ends it.")
        if process_state(by["pid"], by.get("identity"), by.get("begun", 0.0)) == "gone":
            return f"{name} has ended before"
        os.kill(by["pid"], signal.SIGTERM)
        return f"{name} ends: process {by['pid']} was asked to, and has the hosts end too"


def this_launcher() -> dict[str, Any]:
    """Return the handle by which `cancel` finds this process."""
    pid = os.getpid()
    return {"pid": pid, "identity": process_identity(pid), "begun": time.time(), "machine": socket.gethostname()}


def _event(report: bytes) -> dict[str, Any] | None:
    """Return what a launcher reports; None for what is cut off, or lacks what its kind needs."""
    with suppress(ValueError):
        event = json.loads(report)
        is_whole = isinstance(event, dict) and ("report" not in event or {"message", "error", "failed_at"} <= {*event})
        return event if is_whole else None
    return None


def _has_lost_a_peer(failure: Mapping[str, Any]) -> bool:
    return failure.get("cause") in (Cause.PEER.value, Cause.LATE.value)
