# SPDX-License-Identifier: Apache-2.0
"""Starts and supervises replicas that may fail, leave and join at any time, each a world of its own.

The first launcher serves the store in which they meet, so no replica's end affects it; or they meet in a folder or in a
bucket. Each launcher records there how its replicas have ended, which of them are stopped, and that it is alive itself.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]

from farflung.base.causes import Cause
from farflung.base.events import EVENTS, FILES_ONLY, Event, Kind, record
from farflung.base.signals import WARNINGS, Request, handled
from farflung.config import environ
from farflung.config.launch import LaunchSettings
from farflung.launch.agent import newest_checkpoint, read_report
from farflung.launch.codes import BY_SIGNAL, CODES, ENGINE, FAILED, HUNG, REQUEUE
from farflung.launch.plan import lone_environment
from farflung.launch.report import Failure, in_short, show
from farflung.process.failure import ERROR_FILE
from farflung.process.heard import SignalForwarder
from farflung.process.identity import process_identity

if TYPE_CHECKING:
    from farflung.comm.member_store import LauncherNotes
    from farflung.comm.transport import Transport

_LOOK_S = 0.05
_ASK_S = 0.5
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0  # before a replica is started again
_HOUR_S = 3600.0
_END_WITHIN_S = 30.0
_PART_WITHIN_S = 10.0
_RESTARTS = 3
_SIGNALS = (signal.SIGINT, signal.SIGTERM, *WARNINGS)


def supervise(
    settings: LaunchSettings,
    command: Sequence[str],
    variables: Mapping[str, str],
    transport: Transport,
    count: int,
) -> int:
    """Supervise the replicas of this machine until all have ended; return the exit code."""
    return _Launcher(settings, command, variables, transport, count).run()


def machine_name() -> str:
    """Return the name of this launcher in the store."""
    own = zlib.crc32(f"{uuid.getnode()} {process_identity(os.getpid())}".encode())  # containers share names and ids
    return f"{socket.gethostname()}:{os.getpid()}.{own & 0xFFFF:04x}"


class _Launcher:
    """Supervises the replicas of one machine."""

    def __init__(
        self,
        settings: LaunchSettings,
        command: Sequence[str],
        variables: Mapping[str, str],
        transport: Transport,
        count: int,
    ) -> None:
        self._store = import_module("farflung.launch.run_store").RunStore(transport)
        self._command, self._variables, self._where = command, variables, transport.address
        self._machine = machine_name()
        self._max_restarts = _RESTARTS if settings.max_restarts is None else settings.max_restarts
        self._settings, self._is_served = settings, "://" not in transport.address
        self._heartbeat_s = settings.heartbeat_s or transport.board.heartbeat_s
        self._tells = transport.board.get("first") == self._machine.encode()  # and so prints all events
        where = "" if self._tells else f" of {self._machine}"
        self._lives = [self._live(f"replica {number}{where}") for number in range(count)]
        self._running: dict[subprocess.Popen[bytes], int] = {}  # with the ids of their members
        self._stopped: set[int] = set()  # of these ids
        self._reports, self._num_started = Path(), 0
        self._has_own_launchers = settings.ranks_per_replica > 1
        self._shown: set[str] = set()  # errors
        self._asked_to_end = 0  # by this signal
        self._kill_at, self._num_ends = inf, 0
        self._code, self._has_finished, self._is_over = 0, False, False
        self._untold: dict[int, tuple[int, str]] = {}  # how members' processes have ended, while the store is away
        self._beat_at = 0.0

    def run(self) -> int:
        """Return the exit code once all have ended."""
        self._store.ask(lambda notes: notes.note_launcher(self._machine), None)
        with tempfile.TemporaryDirectory(prefix="farflung_") as folder, handled(self._hear, _SIGNALS):
            self._reports, self._courier = Path(folder), SignalForwarder(Path(folder))
            while self._lives:
                if time.monotonic() > self._kill_at:
                    self._kill_at = inf
                    for process in self._running:
                        process.kill()
                self._lives = [one for one in self._lives if next(one, False)]
                if time.monotonic() >= self._beat_at:
                    self._beat_at = time.monotonic() + self._heartbeat_s
                    self._beat()
                time.sleep(_LOOK_S)
            self._beat()
            self._part()
        if self._asked_to_end:
            return REQUEUE if self._asked_to_end == signal.SIGUSR1 else BY_SIGNAL + self._asked_to_end
        return self._code if self._code or self._has_finished or self._is_over else FAILED

    def _part(self) -> None:
        """Leave. The launcher that serves the store waits a while for others, whose replicas end at the same step."""
        deadline = time.monotonic() + _PART_WITHIN_S
        self._store.ask(lambda notes: notes.forget_launcher(self._machine), None)
        others = self._store.ask(lambda notes: notes.num_launchers(), 0)
        waits = self._tells and self._is_served and self._has_finished
        while waits and others and not self._asked_to_end and time.monotonic() < deadline:
            time.sleep(_ASK_S)
            self._beat()
            others = self._store.ask(lambda notes: notes.num_launchers(), 0)

    def _live(self, name: str) -> Iterator[bool]:
        """Start a replica; if it is lost, restart it after a growing pause, unless it never met the others.

        Yields between checks, until the replica has ended for good.
        """
        restarts: list[float] = []  # of the last hour
        members: list[int] = []  # of its last two processes: others may not have read yet how the last one ended
        while not self._asked_to_end:
            while (member := self._store.ask(lambda notes: self._enroll(notes, name, members), None)) is None:
                if self._asked_to_end:
                    return
                if self._store.is_gone:
                    self._give_up(name, "", ENGINE)
                    return
                yield True
            members.append(member)
            process, report = self._start(member, name)
            while (code := process.poll()) is None:
                yield True
            del self._running[process]
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            was_in, is_late = self._note_end(member, code, how)
            if code == 0:
                self._has_finished = True
                if not was_in:
                    message = f"warning: {name} has finished, but none of its outer loops ever met the others. Pass "
                    message += "membership=launched_membership() to an OuterLoop of your own"
                    record(Kind.WARNING, name, message=message)
            if is_late:
                self._is_over = True
                record(Kind.REFUSED, name, why="the others have finished the work")
            if code == 0 or is_late or self._asked_to_end:
                return
            text, cause = self._said(name, report, code)
            how += text
            if self._has_finished:  # so the work is done
                record(Kind.NOTE, name, message=f"{name} {how}")
                return
            now = time.monotonic()
            restarts = [at for at in restarts if now - at < _HOUR_S]
            was_killed = code < 0 or code > 128  # a launcher under this one reports a signal by such a code
            if not (was_in or was_killed) or len(restarts) >= self._max_restarts or self._store.is_gone:
                is_hung = self._has_own_launchers and code == HUNG
                self._give_up(name, how, HUNG if is_hung else CODES[cause])
                return
            wait_s = min(_FIRST_WAIT_S * 2 ** len(restarts), _LONGEST_WAIT_S)
            restarts.append(now)
            limits = {"restart": len(restarts), "max_restarts": self._max_restarts, "wait_s": wait_s}
            record(Kind.RESTARTED, name, how=how, **limits)
            while time.monotonic() < now + wait_s and not self._asked_to_end:
                yield True

    def _give_up(self, name: str, how: str, code: int) -> None:
        self._code = code
        record(Kind.FAILED, name, how=how)

    def _enroll(self, notes: LauncherNotes, name: str, members: list[int]) -> int:
        """Give a process that is about to start an id of its own; delete the records of the last but one before it."""
        member = notes.enroll(name, self._machine)
        while len(members) > 1:
            notes.forget(members.pop(0))
        return member

    def _note_end(self, member: int, code: int, how: str) -> tuple[bool, bool]:
        """Record how a member's process has ended; return whether it had met others, and whether it came too late."""
        self._untold[member] = code, how
        found: tuple[bool, bool] = self._store.ask(lambda notes: self._tell_ends(notes)[member], (True, False))
        return found

    def _tell_ends(self, notes: LauncherNotes) -> dict[int, tuple[bool, bool]]:
        """Record the ends of members' processes that are not in the store yet; return what `_note_end` does, by id."""
        told = {}
        for member, (code, how) in list(self._untold.items()):
            told[member] = bool(notes.get("in", member)), notes.get("left", member) == "too late"
            if code:
                notes.note_end(member, how)
            else:
                notes.put("left", member, "done")
            del self._untold[member]
        return told

    def _said(self, name: str, report: Path | None, code: int) -> tuple[str, Cause]:
        """Return the error of a replica in brackets, and its cause; show all of it, once if several report the same."""
        if report is None or not report.exists():
            return "", Cause.OWN
        failure = Failure.of(0, code, read_report(report))
        line = in_short(failure)
        if not self._has_finished and line not in self._shown:
            self._shown.add(line)
            show([failure], checkpoint=newest_checkpoint(self._reports), name=name)
        return f" ({line})" if failure.traceback else "", failure.cause

    def _start(self, member: int, name: str) -> tuple[subprocess.Popen[bytes], Path | None]:
        """Start a process; return it, and the file for its error, or None if its own launcher shows that."""
        report = None
        told = dict(zip(environ.MEMBER_VARIABLES, (self._where, str(member)), strict=True))
        if not self._has_own_launchers:
            self._num_started += 1
            report = self._reports / "run" / f"attempt_{self._num_started}" / "0" / "error.json"
            report.parent.mkdir(parents=True)
            told[ERROR_FILE] = str(report)
        process = subprocess.Popen(self._command, env=lone_environment({**self._variables, **told}))
        self._running[process] = member
        record(Kind.PROCESS, level=FILES_ONLY, member=member, name=name, pid=process.pid)
        return process, report

    def _beat(self) -> None:
        for event in self._store.ask(self._heartbeats, []):
            EVENTS.log(logging.INFO, event)

    def _heartbeats(self, notes: LauncherNotes) -> list[Event]:
        """Record that this launcher is alive, and the states of its replicas; return events for it to record."""
        notes.beat(self._machine, self._heartbeat_s)
        self._tell_ends(notes)
        for process, member in self._running.items():
            is_stopped = _is_stopped(process.pid)
            if is_stopped != (member in self._stopped):
                self._stopped ^= {member}
                if is_stopped:
                    notes.put("stopped", member)
                else:
                    notes.forget(member, "stopped")
        if not self._is_served:  # where another launcher may take the place of the first one
            first = notes.read("first")
            self._tells = first == self._machine
            if not self._tells and self._store.heartbeats.silent_machine_s(first):
                notes.board.put("first", self._machine.encode())
        return notes.receive() if self._tells else notes.receive(self._machine)

    def _hear(self, request: Request) -> None:
        """Pass a warning on; forward a request to end to all replicas, and kill those that take too long."""
        is_warning = request.number in WARNINGS
        if request.number == signal.SIGUSR1 or not is_warning:
            self._asked_to_end = self._asked_to_end or request.number
        if is_warning:
            self._courier.pass_on(request.number, [process.pid for process in self._running])
            return
        self._num_ends += 1
        for process in self._running:
            with suppress(ProcessLookupError):
                process.send_signal(request.number if self._num_ends == 1 else signal.SIGKILL)
        self._kill_at = time.monotonic() + _END_WITHIN_S


def _is_stopped(pid: int) -> bool:
    """Return whether a process, or one that it has started, is stopped."""
    try:
        process = psutil.Process(pid)
        return any(one.status() == psutil.STATUS_STOPPED for one in [process, *process.children(recursive=True)])
    except psutil.Error:
        return False
