# SPDX-License-Identifier: Apache-2.0
"""The store of an elastic run as one of its launchers reaches it, over a line that may be cut for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import TypeVar

from farflung.address.member_store import Heartbeats, LauncherNotes
from farflung.address.transport import Transport
from farflung.base.errors import Unreachable
from farflung.base.events import Kind, record
from farflung.comm.threads import ThreadedCall

_Answer = TypeVar("_Answer")

_ASK_AGAIN_S = 1.0
_LAST_S = 1.0  # for an answer, once this launcher is to end
_CUT_OFF_S = 600.0  # after which a launcher restarts no replica
_SAY_AGAIN_S = 30.0  # that it is cut off still


class RunStore:
    """The store of a run. Each change of whether it can be reached is an event.

    Args:
        is_ending: whether this launcher was asked to end, and so waits for no answer that doesn't come at once.

    Attributes:
        heartbeats: of the run's launchers.
        is_gone: it has probably ended, or has been away for too long; if it answers again, it is there again.
    """

    def __init__(self, transport: Transport, is_ending: Callable[[], bool] = lambda: False) -> None:
        self.is_gone = False
        self._is_ending = is_ending
        self._transport = transport
        self._renewing: ThreadedCall[None] | None = None
        self._notes = LauncherNotes(transport.board.patient(0))
        self.heartbeats = Heartbeats(self._notes)
        self._address = transport.address
        self._cut_at: float | None = None  # since when it can't be reached, by the monotonic clock; None: it can
        self._ask_at = self._say_at = 0.0

    def ask(self, act: Callable[[LauncherNotes], _Answer], otherwise: _Answer) -> _Answer:
        """Return what `act` finds in the store, or `otherwise` if the store can't be reached."""
        if time.monotonic() < self._ask_at or (self._cut_at is not None and self._is_ending()):
            return otherwise
        began = time.monotonic()
        try:
            found = self._answer(act)
        except Unreachable as error:
            self._lose(began, error)
            return otherwise
        if self._cut_at is not None:
            record(Kind.REACHED, address=self._address, cut_s=began - self._cut_at)
            self._cut_at, self.is_gone = None, False
        return found

    def _answer(self, act: Callable[[LauncherNotes], _Answer]) -> _Answer:
        """Make a request in a thread, as a signal is to end this launcher even while no answer comes."""

        def request() -> _Answer:
            self._transport.check()
            return act(self._notes)

        call, began = ThreadedCall(request, "ask the run's store"), time.monotonic()
        while not (self._is_ending() and time.monotonic() > began + _LAST_S):
            with suppress(FutureTimeout):
                return call.result(_LAST_S / 4)
        raise Unreachable(f"The store of this run at {self._address} has given no answer for {_LAST_S:g} s.")

    def renew(self) -> None:
        """Write again what is needed for as long as the run lasts, in the background."""

        def act() -> None:
            with suppress(Unreachable):
                self._transport.renew()
                LauncherNotes(self._transport.board).renew()

        if self._renewing is None or self._renewing.is_over:
            self._renewing = ThreadedCall(act, "renew records")

    def _lose(self, since: float, error: Unreachable) -> None:
        now = time.monotonic()
        self._ask_at = now + _ASK_AGAIN_S
        was_gone, is_first = self.is_gone, self._cut_at is None
        self._cut_at = since if self._cut_at is None else self._cut_at
        self.is_gone = was_gone or error.is_gone or now > self._cut_at + _CUT_OFF_S
        if self.is_gone:
            if not was_gone:
                record(Kind.CUT_OFF, address=self._address, is_gone=True, why=str(error))
        elif is_first:
            self._say_at = now + _SAY_AGAIN_S
            record(Kind.CUT_OFF, address=self._address, since=time.time() - (now - since))
        elif now >= self._say_at:
            self._say_at = now + _SAY_AGAIN_S
            record(Kind.CUT_OFF, address=self._address, cut_s=now - self._cut_at, gives_up_s=_CUT_OFF_S)
