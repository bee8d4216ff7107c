# SPDX-License-Identifier: Apache-2.0
"""Records of a run in a c10d store: every request has an answer, or ends with `Unreachable`.

torch waits without end for an answer of its store, also where the machine that serves it has lost power, or a line is
cut. And a connection on which an answer was given up must not be used again: the answer may come yet, and would be
taken for that to another request. So a request that has none after `ANSWER_S` seconds is made again over a new
connection, until there was none for as long as the caller has patience.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from farflung.base.errors import Unreachable
from farflung.base.words import in_seconds

_T = TypeVar("_T")

ANSWER_S = 5.0  # for one request, or one attempt to connect; on two busy cores an answer takes up to 0.1 s
PATIENCE_S = 60.0
_PAUSE_S = 0.2  # between two attempts to connect that fail at once
_NONE = "-"  # no value of a key
_MOST_UNANSWERED = 64


@dataclass(frozen=True)
class Board:
    """The keys of one c10d store, or those that begin with a prefix.

    Args:
        patience_s: how long the store may give no answer before a request ends with `Unreachable`; 0: one attempt. It
            ends at once where nothing listens at its address any more.
    """

    line: _Line
    prefix: str = ""
    patience_s: float = PATIENCE_S

    @classmethod
    def of(cls, store: Any, patience_s: float = PATIENCE_S) -> Board:
        """Return a board over a c10d store, which may serve others; a board as it is."""
        return store if isinstance(store, Board) else cls(_Line(store, _address_of(store)), patience_s=patience_s)

    @classmethod
    def at(cls, host: str, port: int, patience_s: float = PATIENCE_S) -> Board:
        """Return a board over the TCPStore that is served at an address."""
        return cls(_Line(None, (host, port)), patience_s=patience_s)

    def part(self, name: str) -> Board:
        """Return the keys that begin with this name, as a board of their own."""
        return replace(self, prefix=f"{self.prefix}{name}/")

    def patient(self, seconds: float) -> Board:
        """Return the same keys for callers with another patience."""
        return replace(self, patience_s=seconds)

    def put(self, key: str, value: str) -> None:
        """Write a value, which must not be empty; it may come a moment later."""
        self.line.write(lambda store: store.set(self.prefix + key, value), self.patience_s)

    def append(self, key: str, value: str) -> None:
        """Write behind what is there; twice, where the store was out of reach in between."""
        self.line.write(lambda store: store.append(self.prefix + key, value), self.patience_s)

    def get(self, key: str) -> str:
        """Return what is there, empty if nothing is."""
        # `get` of a c10d store would wait, if another one deletes the key meanwhile; and torch's store without libuv
        # takes 0.2 s to give an empty value back.
        text = self.swap(key, _NONE, _NONE)
        return "" if text == _NONE else text

    def swap(self, key: str, before: str, by: str) -> str:
        """Write `by` if `before` is there (empty: nothing), and return what is there then."""
        return str(self._ask(lambda store: store.compare_set(self.prefix + key, before, by).decode()))

    def add(self, key: str, change: int) -> int:
        """Add to a number, and return it; twice, where the store was out of reach in between."""
        return int(self._ask(lambda store: store.add(self.prefix + key, change)))

    def has(self, keys: Iterable[str]) -> bool:
        """Whether all of these keys are there."""
        return bool(self._ask(lambda store: store.check([self.prefix + key for key in keys])))

    def delete(self, key: str) -> None:
        self._ask(lambda store: store.delete_key(self.prefix + key))

    def listed(self) -> list[str]:
        """Return all keys."""
        found = self._ask(lambda store: store.list_keys())
        return [key.removeprefix(self.prefix) for key in found if key.startswith(self.prefix)]

    def lend(self, name: str) -> Any:
        """Return a c10d store for a process group that meets under this name, over a connection of its own."""
        return dist.PrefixStore(self.prefix + name, self.line.another())  # type: ignore[attr-defined]

    def _ask(self, act: Callable[[Any], _T]) -> _T:
        return self.line.ask(act, self.patience_s)


class _Line:
    """A connection to a store, made again where it broke. Threads may share it.

    What is written has no answer, so it is written again over the next connection, unless an answer to something else
    has come since.
    """

    def __init__(self, given: Any, at: tuple[str, int] | None) -> None:
        self._given, self._at = given, at  # the store may be the one that serves
        self._lock = threading.Lock()
        self._store: Any = None if at else given
        self._socket: socket.socket | None = None
        self._dialled: Future[tuple[Any, socket.socket | None]] | None = None
        self._unanswered: list[Callable[[Any], object]] = []
        self._num_written = 0  # of these, over this connection
        self._lost_at: float | None = None
        self._run = ""

    def write(self, act: Callable[[Any], object], patience_s: float) -> None:
        with self._lock:
            self._unanswered.append(act)
            is_long = len(self._unanswered) >= _MOST_UNANSWERED
        try:
            self.ask((lambda store: store.check(["board"])) if is_long else None, patience_s)
        except Unreachable:
            with self._lock, suppress(ValueError):
                self._unanswered.remove(act)
                self._num_written = 0
            raise

    def ask(self, act: Callable[[Any], _T] | None, patience_s: float) -> _T:
        """Return an answer, once all that was written has gone before it; without a question, None."""
        while True:
            began = time.monotonic()
            with self._lock:
                is_old = self._store is not None
                try:
                    store = self._connected()
                    for write in self._unanswered[self._num_written :]:
                        write(store)
                        self._num_written += 1
                    if act is None:
                        return None  # type: ignore[return-value]
                    found = act(store)
                    self._unanswered, self._num_written, self._lost_at = [], 0, None
                    return found
                except (dist.DistError, OSError) as error:
                    self._drop()
                    self._lost_at = self._lost_at or began
                    silent_s = time.monotonic() - self._lost_at
                    if is_old and silent_s < ANSWER_S and self._at is not None:
                        continue  # it was this connection alone, or else the next one tells
                    if self._at is None or isinstance(error, _OVER) or silent_s >= patience_s:
                        raise Unreachable(self._why(error, silent_s), isinstance(error, _OVER)) from None
            time.sleep(_PAUSE_S)

    def another(self) -> Any:
        """Return a store over a connection of its own."""
        try:
            return self._given if self._at is None else self._dial().result(ANSWER_S)[0]
        except (dist.DistError, OSError) as error:
            raise Unreachable(self._why(error, ANSWER_S)) from None

    def _connected(self) -> Any:
        if self._socket is not None:  # torch would write to the screen that it was closed
            with suppress(BlockingIOError):
                self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                raise ConnectionResetError
        if self._store is None:
            self._dialled = self._dialled or self._dial()
            try:
                self._store, self._socket = self._dialled.result(ANSWER_S)
            finally:
                if self._dialled.done():
                    self._dialled = None
            # Another run may be served at this address by now.
            run = self._store.compare_set("board", self._run, self._run or secrets.token_hex(8)).decode()
            if self._run and (run != self._run or not self._store.check(["board"])):
                raise _OtherRun
            self._run = run
        return self._store

    def _dial(self) -> Future[tuple[Any, socket.socket | None]]:
        """Connect on a thread, as torch may do so without end."""
        assert self._at is not None
        found: Future[tuple[Any, socket.socket | None]] = Future()
        threading.Thread(target=_connect, args=(*self._at, found), daemon=True).start()
        return found

    def _drop(self) -> None:
        if self._at is not None:
            if self._socket is not None:  # what was written and not sent yet must not come after what is written later
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self._socket.close()
            self._store = self._socket = None
        self._num_written = 0

    def __del__(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _why(self, error: BaseException, silent_s: float) -> str:
        at = "" if self._at is None else f" at {self._at[0]}:{self._at[1]}"
        if isinstance(error, _OtherRun):
            return f"The store of this run{at} is gone: another run is served there now."
        if isinstance(error, ConnectionRefusedError) or self._at is None:
            return f"The store of this run{at} is gone: the launcher that serves it has probably ended."
        return f"The store of this run{at} has given no answer for {in_seconds(silent_s)}."


def _address_of(store: Any) -> tuple[str, int] | None:
    """Return where a TCPStore is served, None for stores of other kinds."""
    return (store.host, store.port) if hasattr(store, "host") and hasattr(store, "port") else None


class _Handle(socket.socket):
    """A second descriptor of a socket that torch has opened; it is closed with the last reference."""

    def __del__(self) -> None:
        self.close()


class _OtherRun(OSError):
    """The store is that of another run."""


_OVER = (_OtherRun, ConnectionRefusedError)


def _connect(host: str, port: int, found: Future[tuple[Any, socket.socket | None]]) -> None:
    try:
        # First so, as torch writes what fails to the screen.
        socket.create_connection((host, port), ANSWER_S).close()
        before = set(_sockets_to(port))
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=ANSWER_S))  # type: ignore[attr-defined]
        new = [one for one in _sockets_to(port) if one not in before]
        for one in new:
            with socket.socket(fileno=os.dup(one)) as handle:
                limit = struct.pack("ll", int(ANSWER_S), int(ANSWER_S % 1 * 1e6))
                handle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        found.set_result((store, _Handle(fileno=os.dup(new[0])) if len(new) == 1 else None))
    except BaseException as error:
        found.set_exception(error)


def _sockets_to(port: int) -> list[int]:
    """Return this process's descriptors of connections to a port."""
    return [int(name) for name in os.listdir("/dev/fd") if _is_socket_to(int(name), port)]


def _is_socket_to(descriptor: int, port: int) -> bool:
    with suppress(OSError):  # it was closed meanwhile, or is not connected
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            with socket.socket(fileno=os.dup(descriptor)) as one:
                return bool(one.getpeername()[1:2] == (port,))
    return False
