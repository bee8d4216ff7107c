# SPDX-License-Identifier: Apache-2.0
"""Members of a generation that exchange objects, if none of them can connect to another one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from io import BufferedReader
from itertools import islice
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from farflung.address.board import forget
from farflung.address.objects import ObjectBoard
from farflung.address.packed import Damaged, packed, packed_bytes, unpack
from farflung.address.run_record import begin, check_pointer, renew_pointer
from farflung.address.seal import SealError
from farflung.address.transport import Entered, Watch
from farflung.base.causes import Cause
from farflung.base.errors import RankFailure, Unreachable
from farflung.base.sizes import HOP_BYTES_OF_REQUESTS, NAMED_BYTES, lie_in_names, saves_by_two_hops
from farflung.comm.group import COMBINE, SUMMED_IN, Group, Op, Work
from farflung.comm.threads import ThreadedCall, side_by_side

# Of a share: an object that all read, or one rank, or each its part; or the name of an object, which a listing has.
_Form: TypeAlias = Literal["whole", "swapped", "parts", "name"]

_LOOK_PAUSES = 10  # of the board, between two questions of a wait to its watch
_LOOK_SHARE = 5  # a question that takes long comes after five times as long at the earliest
_LEAST_PAUSES, _MOST_PAUSES = 0.05, 2.5  # of the board, between two looks for a share
_SIDE_BY_SIDE, _SLOW_S = 8, 0.003  # shares that are read at a time where each read takes longer than that, at least
_AT_ONCE_BYTES = 2 * 2**20  # more of them if they are small: a slow line has to bring them before requests time out
_HEADER_BYTES = 2048  # of a share, at most
_SAYS_BYTES = 32  # of the header of a part, for what its author has read
_KEPT = 6  # shares that all have read, until they are deleted by one request: those of two rounds, as a rule
_MOST_UNREAD = 16  # collectives by which others may lag behind a rank that broadcasts


class ObjectTransport:
    """Groups of replicas that meet at an address if all of them can write and read objects.

    Args:
        board: the objects there.
        address: the address.
    """

    is_lasting = True

    def __init__(self, board: ObjectBoard, address: str) -> None:
        self.board, self.address = board, address
        self._pointer: tuple[ObjectBoard, str] | None = None  # where the run's record is, and what it names

    def of_run(self, settings: bytes) -> ObjectTransport:
        """Return how replicas meet in the run at this address, which begins with these settings if there is none."""
        name = begin(self.board, self.address, settings)
        return self.in_part(name) if name else self

    def in_part(self, name: str) -> ObjectTransport:
        """Return how replicas meet in the run that lies in a part of this address."""
        found = self._below(name)
        found.address, found._pointer = f"{self.address}#{name}", (self.board.patient(0), name)
        return found

    def _below(self, name: str) -> ObjectTransport:
        return ObjectTransport(self.board.part(name), self.address)

    def check(self) -> None:
        if self._pointer is not None:
            check_pointer(*self._pointer)

    def renew(self) -> None:
        if self._pointer is not None:
            renew_pointer(*self._pointer)

    def connect(self, name: str, rank: int, size: int, watch: Watch) -> Group:
        return ObjectGroup(self.board, name, rank, size, watch)

    def close(self) -> None:
        return None


class ObjectGroup(Group):
    """Members of a generation that exchange objects: one for each rank and collective, its share.

    A rank deletes a share once all others have read it: the header of each share says how many collectives its author
    has read, and so do objects of ranks that only read.

    Args:
        name: see `Transport.connect`.
        first: the rank in the generation that is 0 here.
    """

    is_concurrent = True
    is_direct = False
    piece_bytes = 4 * 1024 * 1024  # as each one is a request
    hop_bytes = HOP_BYTES_OF_REQUESTS

    def __init__(self, board: ObjectBoard, name: str, rank: int, size: int, watch: Watch, first: int = 0) -> None:
        self.rank, self.size, self.lists_at_once = rank, size, board.lists_at_once
        self._board, self._name, self._watch, self._first = board, name, watch, first
        self._objects, self._at_once = board.part(name), board.part(name).patient(0)
        self._lock = threading.Lock()
        self._num_begun = self._num_said = self._num_made = 0
        self._unread: set[int] = set()  # collectives that this rank has begun and not read
        self._shares: list[tuple[int, str]] = []  # of this rank, which exist: their collectives and keys
        self._least_s = 0.0  # that the quickest read of the latest collective took
        self._read_by = {one: 0 for one in range(size) if one != rank}  # so many collectives, as far as is known

    def supports(self, device: str) -> bool:
        return device == "cpu"  # from elsewhere tensors are copied to the host

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        is_named = x.nbytes <= NAMED_BYTES and lie_in_names(self.size, self.lists_at_once)
        form: _Form = "name" if is_named else "whole"
        number, written = self._begin([x], form)
        rows = out.detach().view(self.size, -1)
        rows[self.rank].copy_(x.detach().view(-1))
        return _Reading(self, number, written, out.nbytes, {one: rows[one] for one in self._read_by}, form)

    def broadcast(self, x: Tensor, src: int) -> Work:
        number, written = self._begin([x] if src == self.rank else [])
        return _Reading(self, number, written, x.nbytes, {} if src == self.rank else {src: x.detach()})

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        rows, parts = out.detach().view(self.size, -1), x.detach().view(self.size, -1)
        rows[self.rank].copy_(parts[self.rank])
        number, written = self._begin([parts[one] for one in self._read_by], "parts")
        return _Reading(self, number, written, out.nbytes, {one: rows[one] for one in self._read_by}, "parts")

    def swap(self, out: Tensor, x: Tensor, to: int, source: int) -> Work:
        is_own = source == self.rank
        number, written = self._begin([] if is_own else [x], "swapped")
        if is_own:
            out.copy_(x)
        return _Reading(self, number, written, x.nbytes, {} if is_own else {source: out.detach()}, "swapped")

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        if not saves_by_two_hops(x.nbytes, self.size, self.hop_bytes):
            return super().all_reduce(x, op)
        padded = x.new_zeros(self.size, -(-x.numel() // self.size))
        padded.view(-1)[: x.numel()] = x.detach().view(-1)
        return _AllReduce(self, x, padded, op)

    def duplicate(self, in_background: bool = False) -> ObjectGroup:
        self._num_made += 1
        name = f"{self._name}.{self._num_made}"
        return ObjectGroup(self._board, name, self.rank, self.size, self._watch, self._first)

    def _block(self, begin: int, end: int) -> ObjectGroup:
        self._num_made += 1
        name = f"{self._name}.{self._num_made}-{begin}"
        return ObjectGroup(self._board, name, self.rank - begin, end - begin, self._watch, self._first + begin)

    def free(self, reusable: bool = True) -> None:
        if not reusable:
            return self._mark_left(f"rank {self.rank} has left")
        with suppress(Unreachable):  # its objects are then deleted with the records of the generation
            if self._num_begun and self.size > 1:
                self._say_read()
                if self._have_read(self._num_begun) and not self._unread:
                    forget(self._at_once, "")

    def leave(self, reason: str, for_good: bool = False, cause: Cause = Cause.OWN) -> None:
        self._watch.break_off(reason)
        self._mark_left(f"rank {self.rank} has left ({reason})")

    def raise_if_broken(self) -> None:
        self._watch.look(Entered("", 0), 0.0)

    def finish(self, reading: _Reading, rows: Mapping[int, Tensor]) -> None:
        """Fill `rows`, by rank, with shares of a collective; RankFailure if the wait can't end."""
        number, written = reading.number, reading.written
        missing, took_s = dict(rows), list[float]()
        few = _SIDE_BY_SIDE if self._board.num_at_once > 1 or self._least_s > _SLOW_S else 1
        many = max(few, min(self._board.num_at_once, _AT_ONCE_BYTES // max(1, reading.nbytes // self.size)))

        def look(rank: int) -> bool:
            row, began = missing.pop(rank), time.monotonic()
            with suppress(Unreachable, SealError):  # its author is late until it has written one that opens
                if self._read(number, rank, row, reading.form == "parts"):
                    took_s.append(time.monotonic() - began)
                    return True
            missing[rank] = row  # which is looked for again after the others
            return False

        def look_at_names() -> None:
            with suppress(Unreachable):
                for key, file, size in self._at_once.values_below(str(number)):
                    rank = int(key) if key.isdecimal() else -1
                    if rank in missing:
                        self._take(number, rank, missing[rank], f"{number}/{rank}", file, size)
                        del missing[rank]

        def is_complete() -> bool:
            if written is not None and written.is_over:
                written.result()
            if reading.form == "name":
                look_at_names()
            else:
                num_missing, turn = len(missing), iter(list(missing))
                if few < many:
                    side_by_side([partial(look, rank) for rank in islice(turn, few)], few)
                if few == many or len(missing) < num_missing:
                    # Each thread looks until one is late; the next look is soon enough for others that are.
                    side_by_side([lambda: all(map(look, turn))] * min(len(missing), many), many)
            return not missing and (written is None or written.is_over)

        entered = Entered(f"{self._name}#{number}", reading.nbytes)
        try:
            self._wait(entered, is_complete, missing)
        except Unreachable as error:
            raise self._failure(str(error)) from None
        self._least_s = min(took_s, default=self._least_s)
        with self._lock:
            self._unread.discard(number)
        if (not rows or reading.form == "swapped") and self.size > 1:
            self._wait(entered, lambda: self._have_read(number - _MOST_UNREAD))
        if self.size > 1 and self._num_read() >= self._num_said + _MOST_UNREAD // 2:
            self._say_read()

    # ---- shares

    def _begin(self, parts: Sequence[Tensor], form: _Form = "whole") -> tuple[int, ThreadedCall[None] | None]:
        """Count a collective, and begin to write this rank's share in it, if it has one and there are others.

        Args:
            parts: of the share: one for each other rank if it is read in parts, else one or none.
        """
        has_share = bool(parts) and self.size > 1
        with self._lock:
            self._num_begun += 1
            number = self._num_begun
            self._unread.add(number)
        if not has_share:
            return number, None
        num_read = self._num_read()
        self._num_said = self._num_said if form == "swapped" else num_read
        described, host = self._described(number, self.rank, parts[0]), [part.detach().cpu() for part in parts]
        header, width = {**described, "read": num_read}, self._width(described) if form == "parts" else 0
        key = f"{number}.{self.rank}"
        if form == "name":
            key = self._objects.key_with(f"{number}/{self.rank}", b"".join(packed(header, host)))
        with self._lock:
            self._shares.append((number, key))

        def write() -> None:
            contents = [packed(header, [part], width) for part in host]
            if form == "parts":
                self._objects.write_several(key, contents)
            else:
                self._objects.write(key, contents[0] if form != "name" else [b"1"])

        return number, ThreadedCall(write, "write a share", in_thread=self._board.num_at_once > 1)

    def _read(self, number: int, rank: int, row: Tensor, is_cut: bool) -> bool | None:
        """Read the share of a rank, or this rank's part of it, if it is there."""
        key = f"{number}.{rank}"
        take = partial(self._take, number, rank, row, key)
        if not is_cut:
            return self._at_once.read(key, take)
        size = packed_bytes(self._width(self._described(number, rank, row)), row.nbytes)
        return self._at_once.read_one(key, self.rank - (self.rank > rank), size, take)

    def _width(self, described: dict[str, Any]) -> int:
        """Return how many bytes the header of a part has, whatever its author says that it has read."""
        return len(json.dumps(described)) + _SAYS_BYTES

    def _described(self, number: int, rank: int, x: Tensor) -> dict[str, Any]:
        return {"share": f"{self._name}/{number}.{rank}", "dtype": str(x.dtype), "numel": x.numel()}

    def _take(self, number: int, rank: int, row: Tensor, key: str, file: BufferedReader, size: int) -> bool:
        """Read a share of so many bytes into `row`; RankFailure if it is not what its author has to write there."""
        host, num_read, expected = row if row.is_cpu else row.cpu(), 0, self._described(number, rank, row)

        def memory(found: Any) -> list[Tensor]:
            nonlocal num_read
            num_read = found.pop("read", 0) if isinstance(found, dict) else 0
            if found != expected or not isinstance(num_read, int):
                raise Damaged(f"{found} instead of {expected}")
            return [host]

        try:
            unpack(file, size, _HEADER_BYTES, memory)
        except Damaged as error:
            named = f"rank {rank} has written a share that can't be used: {error} ({self._objects.name(key)})"
            raise self._failure(named, rank) from None
        if host is not row:
            row.copy_(host)
        self._note_read(rank, num_read)
        return True

    # ---- what has been read

    def _num_read(self) -> int:
        with self._lock:
            return min(self._unread, default=self._num_begun + 1) - 1

    def _say_read(self) -> None:
        with suppress(Unreachable):
            num_read = self._num_read()
            self._at_once.put(f"read.{self.rank}", str(num_read).encode())
            self._num_said = num_read  # once it is written: otherwise the next collective writes it

    def _ask_read(self) -> None:
        def ask(rank: int) -> None:
            with suppress(Unreachable, ValueError):
                self._note_read(rank, int(self._at_once.get(f"read.{rank}") or 0))

        self._at_once.map(ask, self._read_by)

    def _note_read(self, rank: int, num_read: int) -> None:
        """Record how many collectives another rank has read, and delete the shares that all have."""
        with self._lock:
            self._read_by[rank] = max(self._read_by[rank], num_read)
            least = min(self._read_by.values())
            over = [key for number, key in self._shares if number <= least]
            over = over if len(over) >= _KEPT else []
            self._shares = [one for one in self._shares if one[1] not in over]
        with suppress(Unreachable):
            self._at_once.delete(*over)

    def _have_read(self, number: int) -> bool:
        """Return whether all others have read so many collectives."""
        if min(self._read_by.values()) < number:
            self._ask_read()
        return min(self._read_by.values()) >= number

    # ---- waiting

    def _wait(self, entered: Entered, is_over: Callable[[], bool], missing: Iterable[int] = ()) -> None:
        began, unit_s = time.monotonic(), self._board.pause_s
        pause_s, look_s = _LEAST_PAUSES * unit_s, _LOOK_PAUSES * unit_s
        look_at = began + look_s
        while not is_over():
            if (now := time.monotonic()) >= look_at:
                with suppress(Unreachable):
                    if left := self._at_once.get("left"):
                        raise self._watch.break_off(left.decode(errors="replace"))
                absent = tuple(sorted(self._first + rank for rank in missing))
                self._watch.look(entered._replace(missing=absent), now - began)
                look_at = time.monotonic() + max(look_s, _LOOK_SHARE * (time.monotonic() - now))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSES * unit_s)
        if (waited_s := time.monotonic() - began) > look_s:
            self._watch.note_end(entered, waited_s)

    def _failure(self, reason: str, author: int | None = None) -> RankFailure:
        self._mark_left(reason)
        return self._watch.break_off(reason, None if author is None else self._first + author)

    def _mark_left(self, reason: str) -> None:
        """End the waits of others in this group."""
        if self.size > 1:
            with suppress(Unreachable):
                self._at_once.put_new("left", reason.encode())


@dataclass
class _Reading:
    """A collective under way: this rank's share is being written, and those of others are to be read.

    Args:
        nbytes: of all shares.
        rows: by rank, what is filled; None: it is, and its owner's to change.
    """

    group: ObjectGroup
    number: int
    written: ThreadedCall[None] | None
    nbytes: int
    rows: Mapping[int, Tensor] | None
    form: _Form = "whole"

    def wait(self) -> None:
        if self.rows is not None:
            self.group.finish(self, self.rows)
            self.rows = None


class _AllReduce:
    """An all-reduce under way: each rank reduces a part, and then all read the results.

    Args:
        x: what it fills.
        padded: the values of `x`, `[size, n]`, a row for each rank.
    """

    def __init__(self, group: ObjectGroup, x: Tensor, padded: Tensor, op: Op) -> None:
        self._group, self._x, self._op = group, x, op
        self._came: Tensor | None = torch.empty_like(padded)  # None: `x` is filled
        self._first = group.all_to_all(self._came, padded)

    def wait(self) -> None:
        if (came := self._came) is None:
            return
        self._first.wait()
        x = self._x.detach().view(-1)
        mine = reduce(COMBINE[self._op], came.to(SUMMED_IN.get(x.dtype, x.dtype)).unbind()).to(x.dtype)
        self._group.all_gather(came, mine).wait()
        x.copy_(came.view(-1)[: x.numel()])
        self._came = None
