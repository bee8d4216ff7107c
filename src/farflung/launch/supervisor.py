# SPDX-License-Identifier: Apache-2.0
"""Follows children to their end: processes of this machine, or launchers elsewhere.

What a signal to this launcher does, how long an end may take and how often a child is started again is decided here.
"""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from math import inf
from typing import Generic, Protocol, TypeVar

from farflung.base.events import Kind, record
from farflung.base.signals import WARNINGS, Request
from farflung.comm.patience import waiting
from farflung.config.launch import LaunchSettings
from farflung.launch.codes import BY_SIGNAL, REQUEUE

SUPERVISED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *WARNINGS)
_RESTARTS, _HOUR_S = 3, 3600.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0  # before a child is started again
_LOOK_S = 0.05
_KILLED_WITHIN_S = 5.0


class Child(Protocol):
    """A process, or the connection to a launcher elsewhere."""

    @property
    def name(self) -> str:
        """The name, which those that are started in its place share."""

    def poll(self) -> int | None:
        """Return its exit code, -k for signal k; None: it runs."""

    def send(self, number: int) -> None:
        """Send it a signal, if it still runs. SIGKILL comes again until it has ended."""


C = TypeVar("C", bound=Child)


def max_restarts(settings: LaunchSettings) -> int:
    """Return how often a child is started again within an hour, after waits that double."""
    return _RESTARTS if settings.max_restarts is None else settings.max_restarts


class Supervisor(Generic[C]):
    """Starts children, passes signals on to them, and ends those that take too long to end.

    Args:
        start: starts the child of this name; None: it can't be started yet.
        ended: called with a child that has ended and its exit code.
        max_restarts: of each child within an hour.
        grace_s: between a request to end and SIGKILL.
        last: the signals after which no child is started.

    Attributes:
        running: the children, by name.
        due: when the others are to start, by the monotonic clock; by name.
        signal: the first of `last` that came; 0: none.
    """

    def __init__(
        self,
        start: Callable[[str], C | None],
        ended: Callable[[C, int], None],
        grace_s: float,
        max_restarts: int = 0,
        last: Collection[int] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    ) -> None:
        self.running: dict[str, C] = {}
        self.due: dict[str, float] = {}
        self.signal = 0
        self._start, self._ended = start, ended
        self._grace_s, self._max_restarts, self._last = grace_s, max_restarts, last
        self._restarts: defaultdict[str, list[float]] = defaultdict(list)  # when, within the last hour
        self._sent, self._end_at = 0, inf  # the last signal to end that was sent to all, and when the next is due

    def add(self, name: str) -> None:
        """Start a child, now or as soon as it can be started."""
        self.due[name] = 0.0
        self._start_due()

    def restart(self, name: str, how: str) -> bool:
        """Start a child again in a while, if it may be; `how`: it has ended, in words, for the event that tells."""
        now = time.monotonic()
        past = self._restarts[name] = [at for at in self._restarts[name] if now - at < _HOUR_S]
        if self.signal or self._sent or len(past) >= self._max_restarts:
            return False
        wait_s = min(_FIRST_WAIT_S * 2 ** len(past), _LONGEST_WAIT_S)
        past.append(now)
        self.due[name] = now + wait_s
        record(Kind.RESTARTED, name, how=how, restart=len(past), max_restarts=self._max_restarts, wait_s=wait_s)
        return True

    def follow(self, acts: Mapping[Callable[[], None], float]) -> None:
        """Return once all have ended and none is to start; call each of `acts` at its interval in seconds."""
        act_at = dict.fromkeys(acts, 0.0)
        for _ in waiting(_LOOK_S):
            if not (self.running or self.due):
                return
            self._start_due()
            for name, child in list(self.running.items()):
                code = child.poll()
                if code is not None:
                    del self.running[name]
                    self._ended(child, code)
            if time.monotonic() >= self._end_at:
                self.end()
            for act, every_s in acts.items():
                if time.monotonic() >= act_at[act]:
                    act_at[act] = time.monotonic() + every_s
                    act()

    def hear(self, request: Request) -> None:
        """Pass a warning on to all children; end them all at other signals."""
        if request.number in self._last:
            self.signal = self.signal or request.number
        if request.number not in WARNINGS:
            self.end(signal.SIGINT if request.number == signal.SIGINT else signal.SIGTERM)
        else:
            self._send(request.number)

    def end(self, number: int = signal.SIGTERM) -> None:
        """End all children by this signal; by SIGKILL if they were to end before, or the grace period is over."""
        self._end_at = time.monotonic() + (_KILLED_WITHIN_S if self._sent else self._grace_s)
        self._sent = signal.SIGKILL if self._sent else number
        self._send(self._sent)

    def end_within(self, wait_s: float) -> None:
        """End all children in `wait_s` seconds, unless they are to end before."""
        if not self._sent:
            self._end_at = min(self._end_at, time.monotonic() + wait_s)

    @property
    def code(self) -> int | None:
        """The exit code of a launcher that a signal has ended; None: none has."""
        return (REQUEUE if self.signal == signal.SIGUSR1 else BY_SIGNAL + self.signal) if self.signal else None

    def _send(self, number: int) -> None:
        for child in list(self.running.values()):
            child.send(number)

    def _start_due(self) -> None:
        for name, at in list(self.due.items()):
            if self.signal:
                del self.due[name]
            elif time.monotonic() >= at and (child := self._start(name)) is not None:
                del self.due[name]
                self.running[name] = child
                if self._sent:  # a signal came while it was started
                    child.send(self._sent)
