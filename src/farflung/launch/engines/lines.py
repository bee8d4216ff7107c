# SPDX-License-Identifier: Apache-2.0
"""The lines to launchers on other hosts: what they print becomes one log, and a run ends with its lines.

A launcher there reports in JSON on its stderr, between what its ranks print (`farflung launch --json`).
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import inf
from textwrap import shorten
from typing import Any, Generic, TextIO, TypeVar

import psutil  # type: ignore[import-untyped]

from farflung.base.errors import PEER_LOST
from farflung.config.launch import LaunchSettings
from farflung.launch.codes import BY_SIGNAL, DONE, FAILED, EngineFailure
from farflung.launch.events import say
from farflung.launch.report import show_box
from farflung.process.tether import SIGN_S

GONE = 255  # exit code of ssh where the line or the machine behind it fails
_LOOK_S = 0.05
_OTHERS_END_WITHIN_S, _WITHOUT_GONE_S = 20.0, 5.0  # once a host of a fixed run has failed, or is gone
_END_WITHIN_S, _KILLED_WITHIN_S = 35.0, 5.0  # ranks have half a minute to end
_HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Line:
    """The connection to a host, or to whatever runs a launcher under `process/tether.py` elsewhere."""

    def __init__(self, host: str) -> None:
        self.host, self.said = host, "no reason was given"  # last on stderr, by ssh or a rank
        self.failures: list[dict[str, Any]] = []  # as the launcher has reported them
        self.is_told = False  # the user, that it is gone
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
    def sources(self) -> tuple[Iterable[bytes], Iterable[bytes]]:
        """The lines of stdout and of stderr, as they come."""
        raise NotImplementedError

    def tell(self, number: int = 0) -> None:
        """Send a signal to the launcher; 0: only that somebody is here."""
        raise NotImplementedError

    def kill(self) -> None:
        """End the connection."""
        raise NotImplementedError


class SshLine(Line):
    """The connection that a program makes, ssh."""

    def __init__(self, host: str, command: Sequence[str]) -> None:
        super().__init__(host)
        self.said = "ssh gave no reason"
        pipe = subprocess.PIPE  # a session of its own: Ctrl-C leaves the line open, for what is printed at the end
        self._ssh = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)

    @property
    def code(self) -> int | None:
        return self._ssh.poll()

    @property
    def sources(self) -> tuple[Iterable[bytes], Iterable[bytes]]:
        assert self._ssh.stdout is not None
        assert self._ssh.stderr is not None
        return self._ssh.stdout, self._ssh.stderr

    def tell(self, number: int = 0) -> None:
        assert self._ssh.stdin is not None
        with suppress(OSError):
            self._ssh.stdin.write(bytes([number]))
            self._ssh.stdin.flush()

    def kill(self) -> None:
        self._ssh.kill()


L = TypeVar("L", bound=Line)


class Lines(Generic[L]):
    """All lines of a run."""

    def __init__(self, settings: LaunchSettings, lines: Iterable[L]) -> None:
        self._settings, self._is_elastic = settings, settings.elastic is not None
        self._lock = threading.Lock()  # around what is printed
        self._signal, self._num_asked, self._end_at = 0, 0, inf
        self.all: list[L] = []
        for line in lines:
            self.add(line)

    def add(self, line: L) -> None:
        """Print what comes over one more line."""
        self.all.append(line)
        for source, out in zip(line.sources, (sys.stdout, sys.stderr), strict=True):
            line.readers.append(threading.Thread(target=self._copy, args=(line, source, out), daemon=True))
            line.readers[-1].start()

    def follow(self) -> int:
        """Print what comes until all have ended; return the run's exit code."""
        sign_at = 0.0
        with self._signals():
            while self._goes_on():
                now = time.monotonic()
                if now >= sign_at:
                    sign_at = now + SIGN_S
                    for line in self.all:
                        line.tell()
                self._note_lost()
                if not self._is_elastic and not self._num_asked and any(line.code for line in self.all):
                    is_gone = any(line.is_gone for line in self.all)
                    self._end_at = min(self._end_at, now + (_WITHOUT_GONE_S if is_gone else _OTHERS_END_WITHIN_S))
                if now >= self._end_at:
                    self._end(signal.SIGTERM)
                time.sleep(_LOOK_S)
            for reader in (reader for line in self.all for reader in line.readers):
                reader.join(1.0)
            self._note_lost()
        return self._verdict()

    def _goes_on(self) -> bool:
        return any(line.code is None for line in self.all)

    def _note_lost(self) -> None:
        for line in self.all:
            if self._is_elastic and line.is_gone and not line.is_told and not self._signal:
                line.is_told = True
                words = f"{line.host} is gone: {line.said}; the others continue"
                say(self._settings, "lost", words, is_error=True, host=line.host)

    def _end(self, number: int) -> None:
        """Have all end: by this signal, the next time by SIGKILL, and then by closing the lines."""
        self._num_asked += 1
        for line in self.all:
            if line.code is None and self._num_asked > 2:
                line.kill()
            elif line.code is None:
                line.tell(number if self._num_asked == 1 else signal.SIGKILL)
        self._end_at = time.monotonic() + (_END_WITHIN_S if self._num_asked == 1 else _KILLED_WITHIN_S)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass a request to end on to all hosts."""

        def heed(number: int, frame: Any) -> None:
            self._signal = number
            self._end(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

        before = {number: signal.signal(number, heed) for number in _HEEDED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _verdict(self) -> int:
        """Show in one box why a fixed run has failed, and return the exit code."""
        codes = [line.code for line in self.all if not line.is_gone]
        if self._signal:
            return BY_SIGNAL + self._signal
        if self._is_elastic:
            return next(filter(None, codes), DONE if codes else FAILED)
        failures = [(one, line) for line in self.all for one in line.failures]
        failures.sort(key=lambda pair: (_has_lost_a_peer(pair[0]), pair[0]["failed_at"]))
        gone = next((line for line in self.all if line.is_gone), None)
        if gone is not None:
            title, code = f"{gone.host} is gone", FAILED
            text = f"The line to it has ended: {gone.said}\nWhat runs there ends by itself."
        elif failures:
            first, line = failures.pop(0)
            title, text, code = first["message"], first["report"], line.code or FAILED
        else:
            return next(filter(None, codes), DONE)
        others = [f"{one['message']}: {shorten(str(one['error']), 150, placeholder=' ...')}" for one, _ in failures]
        text = "\n".join([text, *(["", "then:", *others[:3]] if others else [])])
        if not self._settings.json:
            show_box(title, text)
        elif gone is not None:
            say(self._settings, "failed", title, is_error=True, host=gone.host, report=text)
        return code

    def _copy(self, line: Line, source: Iterable[bytes], out: TextIO) -> None:
        """Print what a host prints, a whole line at a time with its name before it."""
        own = self._settings
        for raw in source:
            text = raw.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
            event = _event(text) if out is sys.stderr else None
            if event is None:
                line.said = text if out is sys.stderr else line.said
                self._print(f"[{line.host}] {text}", out)
                continue
            if "report" in event:
                line.failures.append(event)
            if own.json:
                self._print(json.dumps(event | {"host": line.host}), out)
            elif "report" in event and self._is_elastic:
                with self._lock:
                    show_box(event["message"], event["report"])
            elif "report" not in event and "message" in event and not own.quiet:
                self._print(f"[{line.host}] farflung: {event['message']}", out)

    def _print(self, text: str, out: TextIO) -> None:
        with self._lock, suppress(OSError):  # a terminal that was closed
            out.write(f"{text}\n")
            out.flush()


def this_launcher() -> dict[str, Any]:
    """Return what `end_launcher` needs to know of this process."""
    own = psutil.Process()
    return {"pid": own.pid, "begun": own.create_time(), "machine": socket.gethostname()}


def shown_elsewhere(engine: str, name: str, by: Mapping[str, Any]) -> EngineFailure:
    """Return the error that a second follower gets: another launcher holds the run's lines."""
    return EngineFailure(
        f"{name} was started by {engine}: process {by['pid']} on {by['machine']} shows what it prints, and nobody else "
        f"gets it. `farflung watch {name}` shows where it is."
    )


def end_launcher(name: str, by: Mapping[str, Any]) -> str:
    """End the launcher that holds a run's lines; what is at their ends ends with it. Return what was done, in words.

    Raises:
        EngineFailure: it runs on another machine.
    """
    if by["machine"] != socket.gethostname():
        raise EngineFailure(f"{name} was started on {by['machine']}: `farflung cancel {name}` there ends it.")
    try:
        one = psutil.Process(by["pid"])
        if one.create_time() != by["begun"]:
            raise psutil.NoSuchProcess(one.pid)
        one.send_signal(signal.SIGTERM)
    except psutil.NoSuchProcess:
        return f"{name} has ended before"
    return f"{name} ends: process {one.pid} was asked to, and has the hosts end too"


def _event(text: str) -> dict[str, Any] | None:
    """Return what a launcher reports in a line of JSON; None: it is something else."""
    if not text.startswith('{"event": '):
        return None
    with suppress(json.JSONDecodeError):
        event: dict[str, Any] = json.loads(text)
        return event
    return None


def _has_lost_a_peer(failure: Mapping[str, Any]) -> bool:
    return any(words in (failure["error"] or "") for words in PEER_LOST)
