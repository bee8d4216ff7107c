# SPDX-License-Identifier: Apache-2.0
"""The store of an elastic run as one of its launchers reaches it, over a line that may be cut for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from farflung.base.errors import Unreachable
from farflung.base.words import in_seconds
from farflung.comm.member_store import Heartbeats, LauncherNotes
from farflung.comm.transport import Transport

_Answer = TypeVar("_Answer")

_ASK_AGAIN_S = 1.0
_CUT_OFF_S = 600.0  # after which a launcher no longer asks
_SAY_AGAIN_S = 30.0  # that it is cut off still


class RunStore:
    """The store of a run. Each change of whether it can be reached is a line.

    Args:
        say: prints a line.

    Attributes:
        heartbeats: of the run's launchers.
        is_gone: it will not come back, or has been away for too long.
    """

    def __init__(self, transport: Transport, say: Callable[[str], None]) -> None:
        self.is_gone = False
        self._notes = LauncherNotes(transport.board.patient(0))
        self.heartbeats = Heartbeats(self._notes)
        self._where, self._say = transport.address, say
        self._cut_at = self._ask_at = 0.0  # since when it can't be reached, in seconds since 1970; 0: it can
        self._say_at = 0.0

    def ask(self, act: Callable[[LauncherNotes], _Answer], otherwise: _Answer) -> _Answer:
        """Return what `act` finds in the store, or `otherwise` where the store can't be reached."""
        if self.is_gone or time.time() < self._ask_at:
            return otherwise
        began = time.time()
        try:
            found = act(self._notes)
        except Unreachable as error:
            self._lose(began, error.is_gone)
            return otherwise
        if self._cut_at:
            self._say(f"reaches the run's store at {self._where} again, after {in_seconds(began - self._cut_at)}")
            self._cut_at = 0.0
        return found

    def _lose(self, since: float, is_gone: bool) -> None:
        now = time.time()
        self._ask_at = now + _ASK_AGAIN_S
        self.is_gone = is_gone or (self._cut_at > 0 and now > self._cut_at + _CUT_OFF_S)
        if self.is_gone:
            self._say(f"the run's store at {self._where} is gone; replicas train on, but none is started again")
        elif not self._cut_at:
            self._cut_at = since
            clock = time.strftime("%H:%M:%S", time.localtime(since))
            self._say_at = now + _SAY_AGAIN_S
            self._say(f"cut off from the run's store at {self._where} since {clock}; replicas train on")
        elif now >= self._say_at:
            self._say_at = now + _SAY_AGAIN_S
            cut_s, limit_s = in_seconds(now - self._cut_at), in_seconds(_CUT_OFF_S)
            self._say(f"still cut off from the run's store at {self._where}, for {cut_s}; it gives up after {limit_s}")
