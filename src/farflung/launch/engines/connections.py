# SPDX-License-Identifier: Apache-2.0
"""The connections to launchers on other hosts: what they print becomes one log, and a run ends with them.

A launcher there reports in JSON on its stderr, between what its ranks print (`farflung launch --json`).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from textwrap import shorten
from typing import IO, Any, ClassVar, Generic, TextIO, TypeVar

from farflung.base.causes import Cause
from farflung.base.events import Event, Kind, record, words
from farflung.base.signals import handled
from farflung.config.launch import LaunchSettings
from farflung.launch.codes import BY_SIGNAL, DONE, FAILED, EngineFailure
from farflung.launch.engines.engine import Job
from farflung.launch.events import pass_on
from farflung.launch.supervisor import SUPERVISED, Supervisor
from farflung.process.identity import is_here, process_state
from farflung.process.tether import SIGN_S, mark_of, split_reports

GONE = 255  # exit code of ssh if the connection or the machine behind it fails
_OTHERS_END_WITHIN_S, _WITHOUT_GONE_S = 20.0, 5.0  # once a host of a fixed run has failed, or is gone
_READ_WITHIN_S, _REPORT_WITHIN_S = 1.0, 30.0  # once a connection has ended; until a launcher's report was read
_END_WITHIN_S = 35.0  # ranks have half a minute to end
_LOOK_S = 1.0


class Connection:
    """The connection to a launcher under `process/tether.py` elsewhere.

    Args:
        streams: the lines of stdout and of stderr, as they come.

    Attributes:
        name: of what the launcher is.
        host: what stands before its lines.
        last_line: on stderr, by ssh or a rank.
        failures: events, as the launcher has reported them.
        has_reported_end: the launcher has said that it ends.
        is_leaving: it was asked to end, so that its end is no loss.
        code: how the launcher has ended; None: it runs.
    """

    def __init__(self, name: str, streams: tuple[Iterable[bytes], Iterable[bytes]]) -> None:
        self.name, self.host, self.streams = name, name, streams
        self.last_line = "no reason was given"
        self.failures: list[Event] = []
        self.has_reported_end = self.is_leaving = False
        self.code: int | None = None
        self.readers: list[threading.Thread] = []
        self._was_killed, self._ended_at = False, 0.0

    @property
    def is_gone(self) -> bool:
        """Whether the connection has failed, and not the launcher at its end."""
        return self.code is not None and (self.code < 0 or self.code == GONE)

    def poll(self) -> int | None:
        """Return the launcher's exit code once its lines are read; GONE for a 0 that is not the launcher's own."""
        code = self.code_of_line()
        if self.code is not None or code is None:
            return self.code
        is_silent = code == DONE and not self.has_reported_end
        self._ended_at = self._ended_at or time.monotonic()
        read_within_s = _REPORT_WITHIN_S if is_silent else _READ_WITHIN_S  # what is left there may hold streams open
        if time.monotonic() < self._ended_at + read_within_s and any(reader.is_alive() for reader in self.readers):
            return None
        if is_silent:
            self.last_line = (
                "its exit code is 0, but no launcher has reported its end, so the login shell there may have run "
                f"something else (last line: {self.last_line})"
            )
        self.code = GONE if is_silent else code
        return self.code

    def send(self, number: int) -> None:
        """Send a signal to the launcher; 0 is a heartbeat alone. The second SIGKILL closes the connection."""
        if number == signal.SIGKILL and self._was_killed:
            self.close()
        else:
            self.pass_on(number)
        self._was_killed = self._was_killed or number == signal.SIGKILL

    def code_of_line(self) -> int | None:
        """Return how the connection has ended; None: it is open."""
        raise NotImplementedError

    def pass_on(self, number: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class SshConnection(Connection):
    """The connection that a program makes, ssh.

    Args:
        key: the run's, which the tether there takes from its stdin; None: it takes none.
    """

    def __init__(self, host: str, command: Sequence[str], key: bytes | None = None) -> None:
        pipe = subprocess.PIPE  # a session of its own: Ctrl-C leaves ssh alone, for what is printed at the end
        self._ssh = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        assert self._ssh.stdout is not None
        assert self._ssh.stderr is not None
        super().__init__(host, (_read(self._ssh.stdout), _read(self._ssh.stderr)))
        self.last_line = "ssh gave no reason"
        if key is not None:
            assert self._ssh.stdin is not None
            with suppress(OSError):
                os.write(self._ssh.stdin.fileno(), f"{key.hex()}\n".encode())

    def code_of_line(self) -> int | None:
        code = self._ssh.poll()
        if code is not None:
            assert self._ssh.stdin is not None
            self._ssh.stdin.close()
        return code

    def pass_on(self, number: int) -> None:
        assert self._ssh.stdin is not None
        with suppress(OSError, ValueError):  # ValueError: it is closed
            os.write(self._ssh.stdin.fileno(), bytes([number]))

    def close(self) -> None:
        self._ssh.kill()


L = TypeVar("L", bound=Connection)


class Connections(Generic[L]):
    """All connections of a run, and the supervisor of what they lead to.

    Args:
        connect: starts the launcher of a name, and returns the connection to it.
        names: of those that are started at once.

    Attributes:
        all: the last connection of each name, but for those that were to leave.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        token: str,
        connect: Callable[[str], L],
        names: Iterable[str],
        max_restarts: int = 0,
    ) -> None:
        self._settings, self._mark, self._connect = settings, mark_of(token), connect
        self._is_elastic = settings.elastic is not None
        self._lock = threading.Lock()  # around what is printed
        self.all: dict[str, L] = {}
        self.supervisor = Supervisor(self._start, self._ended, _END_WITHIN_S, max_restarts)
        for name in names:
            self.supervisor.add(name)

    @property
    def is_done(self) -> bool:
        """Whether a launcher has ended well."""
        return any(connection.code == DONE for connection in self.all.values())

    def follow(self, look: Callable[[], None] = lambda: None) -> int:
        """Print what comes until all have ended, and call `look` each second; return the run's exit code."""

        def sign() -> None:
            for connection in self.supervisor.running.values():
                connection.send(0)

        with handled(self.supervisor.hear, SUPERVISED):
            self.supervisor.follow({sign: SIGN_S, look: _LOOK_S})
        return self._exit_code()

    def _start(self, name: str) -> L:
        connection = self.all[name] = self._connect(name)
        for source, out in zip(connection.streams, (sys.stdout, sys.stderr), strict=True):
            reader = threading.Thread(target=self._copy, args=(connection, source, out), daemon=True)
            connection.readers.append(reader)
            reader.start()
        return connection

    def _ended(self, connection: L, code: int) -> None:
        """End a fixed run with each of its launchers that fails; start lost replicas again, if they may be."""
        if self.supervisor.signal:
            return
        if not self._is_elastic:
            if code != DONE:
                self.supervisor.end_within(_WITHOUT_GONE_S if connection.is_gone else _OTHERS_END_WITHIN_S)
        elif connection.is_leaving:
            del self.all[connection.name]
        elif connection.is_gone or code > BY_SIGNAL:
            how = f"is gone: {connection.last_line}" if connection.is_gone else f"ended with exit code {code}"
            restarts = not self.is_done and self.supervisor.restart(connection.name, how)
            if not restarts and (connection.is_gone or self.is_done):
                message = f"{connection.host} {how}; the others continue"
                record(Kind.LOST, level=logging.ERROR, message=message, host=connection.host)

    def _exit_code(self) -> int:
        """Show in one box why a fixed run has failed, and return the exit code."""
        if self.supervisor.code is not None:
            return self.supervisor.code
        connections = list(self.all.values())
        codes = [connection.code for connection in connections if not connection.is_gone]
        if self._is_elastic:
            if self.is_done:  # killed replicas are no failure: the others have done their work
                codes = [code for code in codes if code is None or code <= BY_SIGNAL]
            return next(filter(None, codes), DONE if codes else FAILED)
        failures = [(event, connection) for connection in connections for event in connection.failures]

        def order(failure: tuple[Event, L]) -> tuple[bool, float]:
            facts = failure[0].facts
            return Cause(facts.get("cause", Cause.OWN)).is_of_others, facts.get("failed_at", 0.0)

        failures.sort(key=order)
        gone = next((connection for connection in connections if connection.is_gone), None)
        facts: dict[str, Any] = {}
        if gone is not None:
            title, code, facts = f"{gone.host} is gone", FAILED, {"host": gone.host}
            text = f"The connection to it has ended: {gone.last_line}\nWhat runs there ends by itself."
        elif failures:
            first, connection = failures.pop(0)
            title, text, code = words(first), first.facts["report"], connection.code or FAILED
        else:
            return next(filter(None, codes), DONE)
        others = [
            f"{words(event)}: {shorten(str(event.facts.get('error')), 150, placeholder=' ...')}"
            for event, _ in failures[:3]
        ]
        if gone is not None or not self._settings.json:  # which has the launchers' own events
            text = "\n".join([text, *(["", "then:", *others] if others else [])])
            record(Kind.FAILED, message=title, report=text, **facts)
        return code

    def _copy(self, connection: L, source: Iterable[bytes], out: TextIO) -> None:
        """Print what a host prints, a whole line at a time with its name before it."""
        for is_report, line in split_reports(source, self._mark):
            text = line.decode(errors="replace")
            event: Event | None = None
            with suppress(ValueError):  # it is cut off
                event = Event.of_row(json.loads(text)) if is_report else None
            if event is None:
                if out is sys.stderr:
                    connection.last_line = text.rstrip()
                self._print(b"[%s] %s\n" % (connection.host.encode(), line.removesuffix(b"\n")), out)
                continue
            is_failure = "report" in event.facts
            connection.failures += [event] if is_failure else []
            connection.has_reported_end = connection.has_reported_end or event.kind is Kind.ENDED
            if self._settings.json:
                self._print(f"{json.dumps(event.row() | {'host': connection.host})}\n".encode(), out)
            elif is_failure and self._is_elastic:
                with self._lock:
                    record(Kind.FAILED, message=words(event), report=event.facts["report"])
            elif not is_failure and "message" in event.facts and not self._settings.quiet:
                self._print(f"[{connection.host}] farflung: {words(event)}\n".encode(), out)

    def _print(self, line: bytes, out: TextIO) -> None:
        with self._lock:
            pass_on(line, out)


class ForegroundEngine(Generic[L]):
    """What engines share whose launcher stays in the foreground: it holds the connections, and the run ends with it."""

    outlives_launch: ClassVar[bool] = False
    _job: Job
    _connections: Connections[L]  # once it is submitted

    def follow(self) -> int:
        if by := self._job.handle:
            raise EngineFailure(
                f"{self._job.name} was started by {self._job.engine}: process {by['pid']} on "
                f"{by['host']} shows what it prints, and nobody else gets it. `farflung watch {self._job.name}` "
                "shows where it is."
            )
        return self._connections.follow(self._look)

    def _look(self) -> None:
        """See about the run, once a second."""

    def cancel(self) -> str:
        """End the launcher that holds the connections, if it runs on this machine, and so what it has started."""
        name, by = self._job.name, self._job.handle
        if not is_here(by):
            raise EngineFailure(f"{name} was started on {by['host']}: `farflung cancel {name}` there ends it.")
        if process_state(by["pid"], by.get("identity")) == "gone":
            return f"{name} has ended before"
        try:
            os.kill(by["pid"], signal.SIGTERM)
        except PermissionError:
            raise EngineFailure(
                f"{name} is of another user, as its process {by['pid']} is: only that user can end it."
            ) from None
        return f"{name} ends: process {by['pid']} was asked to, and has the hosts end too"


def _read(pipe: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a pipe, and close it."""
    with pipe:
        yield from pipe
