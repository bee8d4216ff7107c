# SPDX-License-Identifier: Apache-2.0
"""Start replicas that may be lost, leave and join at any time, each a world of its own, and look after them.

The first launcher serves the store in which they meet; no replica's end takes it along. Each launcher tells there how
its replicas have ended, which are stopped, and that it is alive itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import click
import psutil  # type: ignore[import-untyped]

from farflung.base.errors import ConfigError, Unreachable
from farflung.base.words import counted
from farflung.config import environ
from farflung.config.launch import LaunchSettings
from farflung.launch.agent import newest_checkpoint, read_report
from farflung.launch.network import choose_interface, is_loopback, resolve_host
from farflung.launch.plan import (
    command_line,
    lone_environment,
    make_plan,
    network_variables,
    one_machine,
    torch_is_loaded,
)
from farflung.launch.report import Failure, in_short, show
from farflung.process.failure import ERROR_FILE
from farflung.process.sockets import serve_store

_LOOK_S = 0.05
_BEAT_S = 0.5
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0  # before a replica is started again
_HOUR_S = 3600.0
_END_WITHIN_S = 30.0
_PART_WITHIN_S = 10.0
_FIND_WITHIN = timedelta(seconds=60)  # torch loads, where all launchers start together
_MEET_WITHIN = timedelta(minutes=5)
_RESTARTS = 3


def run_replicas(settings: LaunchSettings, script: str, arguments: Sequence[str]) -> int:
    """Start this machine's replicas, look after them until all have ended, and return the exit code.

    It is 0 if one has finished and none was given up; otherwise that of the last one that was given up, 128 + k for
    signal k.

    Raises:
        ConfigError: the settings can't work on this machine, or there is no run to join.
    """
    own = dataclasses.replace(
        settings,
        elastic=None,
        replicas=None,
        join=None,
        ranks_per_replica=1,
        num_processes=settings.ranks_per_replica,
        main_process_ip=None,
        main_process_port=None,
        max_restarts=None,
    )
    plan = make_plan(own, script, arguments)
    host, _, port = (settings.join or f"{settings.main_process_ip or '127.0.0.1'}:").rpartition(":")
    host = host.strip("[]")
    interface = None if is_loopback(resolve_host(host)) else choose_interface(settings, host)
    meeting = dataclasses.replace(one_machine(host), interface=interface)
    variables = {**plan.variables, **network_variables(meeting, settings)}
    count = settings.replicas or settings.bounds[0]
    store = _store(settings, host, int(port or settings.main_process_port or 0), count, variables)
    where = f"{host}:{store.port}"
    if not settings.quiet:
        said = "" if settings.join else f"; more join with `farflung launch --join {where}`"
        click.echo(f"farflung: {counted(count, 'replica')} of a run at {where}{said}", err=True)
    command = command_line(own, script, arguments, reported=True)
    if settings.ranks_per_replica > 1:
        stated = json.dumps(dataclasses.asdict(own))  # whatever files and variables say
        command = (sys.executable, "-m", "farflung", "launch", "--stated", stated, script, *arguments)
    return _Launcher(settings, command, variables, store, where, count).run()


def _store(settings: LaunchSettings, host: str, port: int, count: int, variables: Mapping[str, str]) -> Any:
    """Serve the store of a run, or find that of the run to join."""
    with torch_is_loaded(variables):
        from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
    if settings.join is not None:
        try:
            store = TCPStore(host, port, is_master=False, timeout=_FIND_WITHIN)
            store.set_timeout(_MEET_WITHIN)
            return store
        except DistError as error:
            raise ConfigError(f"join is {settings.join}, but no run can be reached there: {error}") from None
    try:
        store = serve_store(host, port, timeout=_MEET_WITHIN, wait_for_workers=False)
    except OSError as error:
        raise ConfigError(f"This machine can't listen at {host}:{port}: {error.strerror}.") from None
    least, most = settings.bounds
    store.set("run", json.dumps({"expected": count, "least": least, "most": most, "grace_s": settings.grace_s}))
    return store


class _Launcher:
    """Looks after the replicas of one machine."""

    def __init__(
        self,
        settings: LaunchSettings,
        command: Sequence[str],
        variables: Mapping[str, str],
        store: Any,
        where: str,
        count: int,
    ) -> None:
        board = import_module("farflung.comm.board").Board.of(store, patience_s=0)
        self._notes = import_module("farflung.comm.member_store").LauncherNotes(board)
        self._command, self._variables, self._where = command, variables, where
        self._machine = f"{socket.gethostname()}:{os.getpid()}"
        self._max_restarts = _RESTARTS if settings.max_restarts is None else settings.max_restarts
        self._is_quiet, self._tells = settings.quiet, settings.join is None
        where = "" if self._tells else f" of {self._machine}"
        self._lives = [self._live(f"replica {number}{where}") for number in range(count)]
        self._running: dict[subprocess.Popen[bytes], int] = {}  # with the ids of their members
        self._stopped: set[int] = set()  # of these ids
        self._reports, self._num_started = Path(), 0
        self._has_own_launchers = settings.ranks_per_replica > 1
        self._shown: set[str] = set()  # errors
        self._asked_to_end = 0  # by this signal
        self._code, self._has_finished, self._has_store = 0, False, True
        self._beat_at = 0.0

    def run(self) -> int:
        """Return the exit code once all have ended."""
        with self._reaching_store():
            self._notes.count("launchers", 1)
        with self._signals(), tempfile.TemporaryDirectory(prefix="farflung_") as folder:
            self._reports = Path(folder)
            while self._lives:
                self._lives = [one for one in self._lives if next(one, False)]
                if time.monotonic() >= self._beat_at:
                    self._beat_at = time.monotonic() + _BEAT_S
                    self._beat()
                time.sleep(_LOOK_S)
            self._beat()
            with self._reaching_store():
                self._part()
        if self._asked_to_end:
            return 128 + self._asked_to_end
        return self._code if self._code or self._has_finished else 1

    def _part(self) -> None:
        """Leave; the launcher that serves the store waits a while for others, whose replicas end at the same step."""
        deadline = time.monotonic() + _PART_WITHIN_S
        others = self._notes.count("launchers", -1)
        waits = self._tells and self._has_finished
        while waits and others and not self._asked_to_end and time.monotonic() < deadline:
            time.sleep(_BEAT_S)
            self._beat()
            others = self._notes.count("launchers")

    def _live(self, name: str) -> Iterator[bool]:
        """Start a replica, and again after a while that grows if it is lost, but not if it never met others.

        Yields at each look, until it is not started again.
        """
        restarts: list[float] = []  # of the last hour
        members: list[int] = []  # of its last two processes: others may have yet to read how the last one ended
        while not self._asked_to_end:
            process, report = self._start(name, members)
            while (code := process.poll()) is None:
                yield True
            del self._running[process]
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            was_in = self._note_end(members[-1], code, how)
            if code == 0:
                self._has_finished = True
                if not was_in and self._has_store:
                    self._say(
                        f"warning: {name} has ended well, but no outer loop of it ever met the others. Pass "
                        "membership=launched_membership() to an OuterLoop of your own"
                    )
            if code == 0 or self._asked_to_end:
                return
            how += self._said(name, report, code)
            if self._has_finished:  # the others have done the work
                self._say(f"{name} {how}")
                return
            now = time.monotonic()
            restarts = [at for at in restarts if now - at < _HOUR_S]
            was_killed = code < 0 or code > 128  # so that a launcher under this one says it, too
            if not (was_in or was_killed) or len(restarts) >= self._max_restarts or not self._has_store:
                self._code = 128 - code if code < 0 else code
                self._say(f"{name} {how}; it is not started again")
                return
            wait_s = min(_FIRST_WAIT_S * 2 ** len(restarts), _LONGEST_WAIT_S)
            restarts.append(now)
            which = f"restart {len(restarts)} of {self._max_restarts} within an hour"
            self._say(f"{name} {how}; it starts again in {wait_s:g} s ({which})")
            while time.monotonic() < now + wait_s and not self._asked_to_end:
                yield True

    def _note_end(self, member: int, code: int, how: str) -> bool:
        """Tell how a member's process has ended; return whether it has met others."""
        was_in: bool = False
        with self._reaching_store():
            was_in = bool(self._notes.noted("in", member))
            if code:
                self._notes.note_end(member, how)
            else:
                self._notes.note("left", member, "done")
        return was_in

    def _said(self, name: str, report: Path | None, code: int) -> str:
        """Return in brackets the error that a replica has reported; show all of it, once if several report the same."""
        if report is None or not report.exists():
            return ""
        failure = Failure.of(0, code, read_report(report))
        line = in_short(failure)
        if not self._has_finished and line not in self._shown:
            self._shown.add(line)
            show([failure], checkpoint=newest_checkpoint(self._reports), name=name)
        return f" ({line})" if failure.traceback else ""

    def _start(self, name: str, members: list[int]) -> tuple[subprocess.Popen[bytes], Path | None]:
        """Start a process; return it, and where it leaves its error, which a launcher of its own would show."""
        member, report = 0, None
        with self._reaching_store():
            member = self._notes.count("ids", 1)
            self._notes.note("name", member, name)
            self._notes.note("machine", member, self._machine)
            if len(members) == 2:
                self._notes.forget(members.pop(0))
        members.append(member)
        told = dict(zip(environ.MEMBER_VARIABLES, (self._where, str(member)), strict=True))
        if not self._has_own_launchers:
            self._num_started += 1
            report = self._reports / "run" / f"attempt_{self._num_started}" / "0" / "error.json"
            report.parent.mkdir(parents=True)
            told[ERROR_FILE] = str(report)
        process = subprocess.Popen(self._command, env=lone_environment({**self._variables, **told}))
        self._running[process] = member
        return process, report

    def _beat(self) -> None:
        with self._reaching_store():
            self._notes.count(f"beat/{self._machine}", 1)
            for process, member in self._running.items():
                is_stopped = _is_stopped(process.pid)
                if is_stopped != (member in self._stopped):
                    self._stopped ^= {member}
                    if is_stopped:
                        self._notes.note("stopped", member)
                    else:
                        self._notes.forget(member, "stopped")
            if self._tells:
                for line in self._notes.take_told():
                    self._say(line)

    @contextmanager
    def _reaching_store(self) -> Iterator[None]:
        """Go on without the store where it is gone, and say so once."""
        try:
            yield
        except Unreachable:
            if self._has_store:
                self._has_store = False
                self._say(f"the store at {self._where} is gone; replicas go on, but none is started again")

    def _say(self, line: str) -> None:
        if not self._is_quiet:
            click.echo(f"farflung: {line}", err=True)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass a request to end on to all replicas, and end those that take too long."""

        def pass_on(number: int, frame: FrameType | None) -> None:
            is_first, self._asked_to_end = not self._asked_to_end, number
            for process in self._running:
                with suppress(ProcessLookupError):
                    process.send_signal(number if is_first else signal.SIGKILL)
            signal.setitimer(signal.ITIMER_REAL, _END_WITHIN_S)

        heeded = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, before in heeded.items():
                signal.signal(number, before)


def _is_stopped(pid: int) -> bool:
    """Whether a process, or one that it has started, is stopped."""
    try:
        process = psutil.Process(pid)
        return any(one.status() == psutil.STATUS_STOPPED for one in [process, *process.children(recursive=True)])
    except psutil.Error:
        return False
