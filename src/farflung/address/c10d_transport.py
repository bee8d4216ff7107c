# SPDX-License-Identifier: Apache-2.0
"""Replicas that meet over a c10d store: its keys as a `Board`, and groups of gloo and NCCL, each with its own end.

torch waits forever for an answer of its store, even if the machine that serves it has lost power, or a line is cut. A
connection on which an answer was given up must not be used again: the answer may still come, and would be taken for
that of another request. So a request without an answer after `ANSWER_S` seconds is sent again over a new connection,
for as long as the caller has patience.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, TimeoutError as NoAnswer  # up to Python 3.10 not the built-in one
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from farflung.address.board import Board
from farflung.address.keyed_store import KeyedServer, KeyedStore
from farflung.address.run_record import KeyMismatch
from farflung.address.seal import Seal
from farflung.address.transport import Entered, Watch
from farflung.base.causes import Cause
from farflung.base.errors import RankFailure, Unreachable
from farflung.base.torch_internals import bare_group
from farflung.base.words import in_seconds
from farflung.comm.c10d_group import C10dGroup, check_peers, close_connections, transport_said
from farflung.comm.group import Group
from farflung.comm.threads import start_until_exit

if TYPE_CHECKING:
    from farflung.base.torch_internals import Store

_T = TypeVar("_T")

ANSWER_S = 5.0  # for one request, or one attempt to connect; on two busy cores an answer takes up to 0.1 s
PATIENCE_S = 60.0
_PAUSE_S = 0.2  # between two attempts to connect that fail at once
_NOTHING = b"\0nothing"  # no value of a key
_MOST_UNANSWERED = 64
_RELEASE_S = 1.0  # how long the end waits for groups of generations before


class C10dTransport:
    """Groups of replicas that meet over one c10d store.

    Args:
        store: such as a `TCPStore` or a `KeyedServer`, which serve others; or the host and the port of one.
        patience_s, seal: see `StoreBoard`.
    """

    is_lasting = False

    def __init__(
        self, store: Store | KeyedServer | tuple[str, int], patience_s: float = PATIENCE_S, seal: Seal | None = None
    ) -> None:
        given, at = (None, store) if isinstance(store, tuple) else (store, _address_of(store))
        self.board = StoreBoard(_Line(given, at, seal), patience_s=patience_s, seal=seal)
        self.address = "" if at is None else f"{at[0]}:{at[1]}"
        self._releasing: list[threading.Thread] = []

    def connect(self, name: str, rank: int, size: int, watch: Watch) -> Group:
        return GenerationGroup(self, name, rank, size, watch)

    def release(self, held: list[Any]) -> None:
        """Release the process group in a list, which has the only reference to it, in a thread of its own.

        A process group waits for all that it began before it is gone. If a connection closes while gloo is about to
        send over it, that wait has no end.
        """
        self._releasing = [thread for thread in self._releasing if thread.is_alive()]
        self._releasing.append(start_until_exit(held.clear, "release a process group"))

    def check(self) -> None:
        return None  # each request does

    def renew(self) -> None:
        return None  # nothing is purged there

    def close(self) -> None:
        until = time.monotonic() + _RELEASE_S
        for thread in self._releasing:
            thread.join(max(0.0, until - time.monotonic()))


class GenerationGroup(C10dGroup):
    """Members of a generation, as a process group outside torch's default world.

    They connect when they first send something. A wait that fails closes this rank's connections, which ends the waits
    of others in turn.

    Args:
        name: see `Transport.connect`.
    """

    is_concurrent = True

    def __init__(self, transport: C10dTransport, name: str, rank: int, size: int, watch: Watch) -> None:
        self.rank, self.size = rank, size
        self.supported = {"cpu", *(("cuda",) if dist.is_nccl_available() else ())}
        self._transport, self._name, self._watch = transport, name, watch
        # The process group and its store, once it is connected; no other reference stays.
        self._held: list[Any] = []
        # An error on the way into a generation drops a group that nobody has freed.
        weakref.finalize(self, _drop, transport, self._held).atexit = False
        self._num_entered = self._num_made = 0

    @property
    def pg(self) -> dist.ProcessGroup:
        if not self._held:
            board, within_s = self._transport.board, self._watch.connect_s
            try:
                store = board.lend(self._name)
                self._held += [bare_group(store, self.rank, self.size, within_s), store]
                if board.seal is not None:
                    check_peers(self._held[0], partial(board.proof, self._name), within_s)
            except RuntimeError as error:
                raise self.failure(error) from None
        group: dist.ProcessGroup = self._held[0]
        return group

    def enter(self, kind: str, nbytes: int) -> Entered:
        self._num_entered += 1
        return Entered(f"{self._name}#{self._num_entered}", nbytes)

    @contextmanager
    def watching(self, entered: Entered) -> Iterator[Callable[[], None]]:
        began = time.monotonic()
        yield lambda: self._watch.look(entered, time.monotonic() - began)
        self._watch.note_end(entered, time.monotonic() - began)

    def failure(self, error: RuntimeError) -> RankFailure:
        self.abort()
        return self._watch.break_off(f"the transport said: {transport_said(error)}")

    def abort(self) -> None:
        if self._held:
            super().abort()

    def duplicate(self, in_background: bool = False) -> GenerationGroup:
        self._num_made += 1
        return GenerationGroup(self._transport, f"{self._name}.{self._num_made}", self.rank, self.size, self._watch)

    def _block(self, begin: int, end: int) -> GenerationGroup:
        self._num_made += 1
        name = f"{self._name}.{self._num_made}-{begin}"
        return GenerationGroup(self._transport, name, self.rank - begin, end - begin, self._watch)

    def free(self, reusable: bool = True) -> None:
        if not reusable:
            self.abort()
        if self._held:
            held, self._held[:] = self._held[:], []
            self._transport.release(held)

    def leave(self, reason: str, for_good: bool = False, cause: Cause = Cause.OWN) -> None:
        self._watch.break_off(reason)
        self.abort()

    def raise_if_broken(self) -> None:
        self._watch.look(Entered("", 0), 0.0)


def _drop(transport: C10dTransport, held: list[Any]) -> None:
    if held:
        close_connections(held[0])
        transport.release(held)


@dataclass(frozen=True)
class StoreBoard(Board):
    """The keys of one c10d store, or those that begin with a prefix, as a `Board`.

    Args:
        patience_s: how long the store may give no answer before a request ends with `Unreachable`; 0: one attempt. It
            ends at once if nothing listens at its address any more.
        seal: of the run's key, with which the line is sealed; None: it has none.
    """

    line: _Line
    prefix: str = ""
    patience_s: float = PATIENCE_S
    pause_s: float = 0.005
    seal: Seal | None = field(default=None, compare=False)

    def part(self, name: str) -> StoreBoard:
        return replace(self, prefix=f"{self.prefix}{name}/")

    def patient(self, seconds: float) -> StoreBoard:
        return replace(self, patience_s=seconds)

    def unsealed(self) -> StoreBoard:
        return replace(self, line=self.line.unsealed(), seal=None)

    def put(self, key: str, value: bytes) -> None:
        # torch's types know of texts alone.
        self.line.write(lambda store: store.set(self.prefix + key, value), self.patience_s)  # type: ignore[arg-type]

    def put_new(self, key: str, value: bytes) -> bool:
        return self._swap(key, b"", value) == value

    def get(self, key: str) -> bytes | None:
        # `get` of a c10d store would wait, if another one deletes the key meanwhile.
        found = self._swap(key, _NOTHING, _NOTHING)
        return None if found == _NOTHING else found

    def has(self, keys: Iterable[str]) -> bool:
        asked = [self.prefix + key for key in keys]
        return bool(self._ask(lambda store: store.check(asked)))

    def delete(self, *keys: str) -> None:
        if keys:
            self._ask(lambda store: [store.delete_key(self.prefix + key) for key in keys])

    def list(self, prefix: str) -> Sequence[str]:
        keys = self._ask(lambda store: store.list_keys())
        return [key.removeprefix(self.prefix) for key in keys if key.startswith(self.prefix + prefix)]

    def lend(self, name: str) -> Store:
        """Return a c10d store for a process group that meets under this name, over a connection of its own."""
        return _PrefixedStore(self.prefix + name, self.line.another())

    def proof(self, name: str, sender: int, receiver: int) -> bytes:
        """Return what one rank of a group of this run sends another one, to prove that it has the run's key."""
        assert self.seal is not None
        if not self.line.run:
            self.has([])  # connects
        return self.seal.proof(f"{self.line.run} {self.prefix}{name} {sender} {receiver}")

    def _swap(self, key: str, before: bytes, by: bytes) -> bytes:
        """Write `by` over the value `before` (empty: no value), if that is current; return the value afterwards."""
        found: bytes = self._ask(lambda store: store.compare_set(self.prefix + key, before, by))  # type: ignore[arg-type]
        return found

    def _ask(self, act: Callable[[Store], _T]) -> _T:
        return self.line.ask(act, self.patience_s)


class _PrefixedStore(dist.PrefixStore):  # type: ignore[misc, name-defined]
    """Keeps the store below it, which may be an object of Python that no object of C++ keeps."""

    def __init__(self, prefix: str, store: Any) -> None:
        super().__init__(prefix, store)
        self.below = store


class _Line:
    """A connection to a store, which reconnects after it broke. Threads may share it.

    A write has no answer, so it is repeated over the next connection, unless another request has been answered since.
    """

    def __init__(self, given: Store | KeyedServer | None, at: tuple[str, int] | None, seal: Seal | None = None) -> None:
        self._given, self._at, self._seal = given, at, seal  # the store may be the one that serves
        self._lock = threading.Lock()
        self._store: Any = None if at else given
        self._socket: socket.socket | None = None
        self._dialled: Future[tuple[Store, socket.socket | None]] | None = None
        self._unanswered: list[Callable[[Store], object]] = []
        self._num_written = 0  # of these, over this connection
        self._lost_at: float | None = None
        self.run = ""

    def unsealed(self) -> _Line:
        return _Line(None, self._at)

    def write(self, act: Callable[[Store], object], patience_s: float) -> None:
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

    def ask(self, act: Callable[[Store], _T] | None, patience_s: float) -> _T:
        """Send the pending writes, then a request, and return its answer; without a request, None."""
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
                except (dist.DistError, OSError, NoAnswer) as error:
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
            return self._dial().result(ANSWER_S)[0] if self._at else self._given
        except (dist.DistError, OSError, NoAnswer) as error:
            raise Unreachable(self._why(error, ANSWER_S)) from None

    def _connected(self) -> Store:
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
            run = self._store.compare_set("board", self.run, self.run or secrets.token_hex(8)).decode()
            if self.run and (run != self.run or not self._store.check(["board"])):
                raise _OtherRun
            self.run = run
        store: Store = self._store
        return store

    def _dial(self) -> Future[tuple[Store, socket.socket | None]]:
        """Connect on a thread, as torch may do so without end."""
        assert self._at is not None
        found: Future[tuple[Store, socket.socket | None]] = Future()
        threading.Thread(target=_connect, args=(*self._at, self._seal, found), daemon=True).start()
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


def _address_of(store: Store | KeyedServer) -> tuple[str, int] | None:
    """Return where a TCPStore is served; None if it serves nobody."""
    return (store.host, store.port) if hasattr(store, "host") and hasattr(store, "port") else None


class _Handle(socket.socket):
    """A second descriptor of a socket that torch has opened; it is closed with the last reference."""

    def __del__(self) -> None:
        self.close()


class _OtherRun(OSError):
    """The store is that of another run."""


_OVER = (_OtherRun, ConnectionRefusedError)


def _connect(host: str, port: int, seal: Seal | None, found: Future[tuple[Store, socket.socket | None]]) -> None:
    try:
        if seal is not None:
            keyed = _with_key(host, port, seal)
            return found.set_result((keyed, _Handle(fileno=os.dup(keyed.socket.fileno()))))
        # First so, as torch writes what fails to the screen.
        socket.create_connection((host, port), ANSWER_S).close()
        before = set(_sockets_to(port))
        store = _without_key(host, port)
        new = [one for one in _sockets_to(port) if one not in before]
        for one in new:
            with socket.socket(fileno=os.dup(one)) as handle:
                limit = struct.pack("ll", int(ANSWER_S), int(ANSWER_S % 1 * 1e6))
                handle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        found.set_result((store, _Handle(fileno=os.dup(new[0])) if len(new) == 1 else None))
    except BaseException as error:
        found.set_exception(error)


def _with_key(host: str, port: int, seal: Seal) -> KeyedStore:
    at = f"{host}:{port}"
    try:
        return KeyedStore(host, port, seal, ANSWER_S)
    except (ConnectionResetError, TimeoutError):
        with suppress(dist.DistError):
            _without_key(host, port)
            raise KeyMismatch(at, "it has no key, and one was given") from None
        raise
    except KeyMismatch as error:
        raise KeyMismatch(at, error.why) from None


def _without_key(host: str, port: int) -> Store:
    store: Store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=ANSWER_S))  # type: ignore
    return store


def _sockets_to(port: int) -> list[int]:
    return [int(name) for name in os.listdir("/dev/fd") if _is_socket_to(int(name), port)]


def _is_socket_to(descriptor: int, port: int) -> bool:
    with suppress(OSError):  # it was closed meanwhile, or is not connected
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            with socket.socket(fileno=os.dup(descriptor)) as one:
                return bool(one.getpeername()[1:2] == (port,))
    return False
