# SPDX-License-Identifier: Apache-2.0
"""Replicas that meet over a store that a launcher serves: its keys as a `Board`, and groups of gloo and NCCL.

The machine that serves it may lose power, and a line may be cut. A connection on which an answer was given up must not
be used again: the answer may still come, and would be taken for that of another request. So a request without an answer
after `ANSWER_S` seconds is sent again over a new connection, for as long as the caller has patience.
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from farflung.address.board import Board
from farflung.address.keyed_store import KeyedServer, KeyedStore
from farflung.address.objects import PATIENCE_S
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
_PAUSE_S = 0.2  # between two attempts to connect that fail at once
_NOTHING = b"\0nothing"  # no value of a key
_MOST_UNANSWERED = 64
_RELEASE_S = 1.0  # how long the end waits for groups of generations before


class C10dTransport:
    """Groups of replicas that meet over one c10d store.

    Args:
        store: a `KeyedServer`, or the host and the port of one.
        patience_s, seal: see `StoreBoard`.
    """

    is_lasting = False

    def __init__(
        self, store: KeyedServer | tuple[str, int], patience_s: float = PATIENCE_S, seal: Seal | None = None
    ) -> None:
        host, port = store if isinstance(store, tuple) else (store.host, store.port)
        self.board = StoreBoard(_Line(host, port, seal), patience_s=patience_s, seal=seal)
        self.address = f"{host}:{port}"
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
            except (RuntimeError, OSError) as error:  # OSError: the line to the store was cut
                raise self.failure(error) from None
        group: dist.ProcessGroup = self._held[0]
        return group

    def enter(self, kind: str, nbytes: int) -> tuple[Entered, float]:
        self._num_entered += 1
        return Entered(f"{self._name}#{self._num_entered}", nbytes), time.monotonic()

    @contextmanager
    def watching(self, entered: tuple[Entered, float]) -> Iterator[Callable[[], None]]:
        (collective, started), began = entered, time.monotonic()
        yield lambda: self._watch.look(collective, time.monotonic() - began)
        self._watch.note_end(collective, time.monotonic() - started)  # values may have travelled before the wait

    def failure(self, error: RuntimeError | OSError) -> RankFailure:
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

    def put(self, key: str, value: bytes) -> None:
        self.line.write(lambda store: store.set(self.prefix + key, value), self.patience_s)

    def put_new(self, key: str, value: bytes) -> bool:
        return self._swap(key, b"", value) == value

    def get(self, key: str) -> bytes | None:
        # `get` of a c10d store would wait, if another one deletes the key meanwhile.
        found = self._swap(key, _NOTHING, _NOTHING)
        return None if found == _NOTHING else found

    def has(self, keys: Iterable[str]) -> bool:
        asked = [self.prefix + key for key in keys]
        return self._ask(lambda store: store.check(asked))

    def delete(self, *keys: str) -> None:
        if keys:
            self._ask(lambda store: [store.delete_key(self.prefix + key) for key in keys])

    def list(self, prefix: str) -> Sequence[str]:
        keys = self._ask(lambda store: store.list_keys())
        return [key.removeprefix(self.prefix) for key in keys if key.startswith(self.prefix + prefix)]

    def silent_s(self) -> float:
        return self.line.silent_s

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
        return self._ask(lambda store: store.compare_set(self.prefix + key, before, by))

    def _ask(self, act: Callable[[KeyedStore], _T]) -> _T:
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

    def __init__(self, host: str, port: int, seal: Seal | None) -> None:
        self._host, self._port, self._seal = host, port, seal
        self._lock = threading.Lock()
        self._store: KeyedStore | None = None
        self._unanswered: list[Callable[[KeyedStore], object]] = []
        self._num_written = 0  # of these, over this connection
        self._lost_at: float | None = None
        self._asked_at: float | None = None  # when what has no answer yet was asked
        self.run = ""

    @property
    def silent_s(self) -> float:
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    def write(self, act: Callable[[KeyedStore], object], patience_s: float) -> None:
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

    def ask(self, act: Callable[[KeyedStore], _T] | None, patience_s: float) -> _T:
        """Send the pending writes, then a request, and return its answer; without a request, None."""
        while True:
            began = time.monotonic()
            with self._lock:
                is_old = self._store is not None
                self._asked_at = self._asked_at or began
                try:
                    store = self._connected()
                    for write in self._unanswered[self._num_written :]:
                        write(store)
                        self._num_written += 1
                    if act is None:
                        self._asked_at = None
                        return None  # type: ignore[return-value]
                    found = act(store)
                    self._unanswered, self._num_written, self._lost_at, self._asked_at = [], 0, None, None
                    return found
                except OSError as error:
                    self._drop()
                    self._lost_at = self._lost_at or began
                    silent_s = time.monotonic() - self._lost_at
                    if is_old and silent_s < ANSWER_S:
                        continue  # it was this connection alone, or else the next one tells
                    if isinstance(error, _OVER) or silent_s >= patience_s:
                        raise Unreachable(self._why(error, silent_s), isinstance(error, _OVER)) from None
            time.sleep(_PAUSE_S)

    def another(self) -> KeyedStore:
        """Return a store over a connection of its own."""
        began = time.monotonic()
        while True:
            try:
                store = self._opened()
                store.check(["board"])  # the server soon closes a connection that asks nothing
                return store
            except OSError as error:
                silent_s = time.monotonic() - began
                if isinstance(error, _OVER) or silent_s >= ANSWER_S:
                    raise Unreachable(self._why(error, silent_s), isinstance(error, _OVER)) from None
            time.sleep(_PAUSE_S)

    def _opened(self) -> KeyedStore:
        try:
            return KeyedStore(self._host, self._port, self._seal, ANSWER_S)
        except KeyMismatch:
            if self.run:  # it had this key before
                raise _OtherRun from None
            raise

    def _connected(self) -> KeyedStore:
        if self._store is None:
            self._store = self._opened()
            # Another run may be served at this address by now.
            run = self._store.compare_set("board", self.run, self.run or secrets.token_hex(8)).decode()
            if self.run and (run != self.run or not self._store.check(["board"])):
                raise _OtherRun
            self.run = run
        return self._store

    def _drop(self) -> None:
        if self._store is not None:
            self._store.abort()
        self._store, self._num_written = None, 0

    def _why(self, error: BaseException, silent_s: float) -> str:
        at = f" at {self._host}:{self._port}"
        if isinstance(error, _OtherRun):
            return f"The store of this run{at} is gone: another run is served there now."
        if isinstance(error, ConnectionRefusedError):
            return f"The store of this run{at} is gone: the launcher that serves it has probably ended."
        return f"The store of this run{at} has given no answer for {in_seconds(silent_s)}."


class _OtherRun(OSError):
    """The store is that of another run."""


_OVER = (_OtherRun, ConnectionRefusedError)
