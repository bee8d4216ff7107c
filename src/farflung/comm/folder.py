# SPDX-License-Identifier: Apache-2.0
"""Replicas that meet in a folder that all of them can write to, on one machine or a network file system.

Values are files. Each is written aside and then renamed or linked to its name, so no reader sees a part of one. Readers
open files by name, as listings of a network file system may be late. Nothing is locked, and no file holds code.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from io import BufferedReader
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from torch import Tensor

from farflung.base.errors import ConfigError, RankFailure, Unreachable, Unsupported
from farflung.comm.board import forget
from farflung.comm.fingerprint import bytes_of
from farflung.comm.group import Group, Work
from farflung.comm.transport import Entered, Watch

_T = TypeVar("_T")

PATIENCE_S = 60.0
_ASIDE = ".aside"  # the folder of files that are being written; quoted keys have no dot
_VALUE = ".value"
_ATTEMPTS = 20  # to create a folder that others delete, as it is empty
_AGAIN_S = 0.2  # between two attempts
_ABANDONED_S = 86_400.0  # after which a file aside is that of a process that was killed
_LOOK_S = 0.2  # how often a wait asks its watch
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05  # between two looks for a share
_HEADER_BYTES = 2048  # of a share, at most
_MOST_UNREAD = 16  # collectives by which others may lag behind a rank that broadcasts


class FolderTransport:
    """Groups of replicas that meet in a folder, which exists.

    Raises:
        ConfigError: this process can't write there, or the file system has no hard links.
    """

    def __init__(self, path: str | os.PathLike[str], patience_s: float = PATIENCE_S) -> None:
        root = Path(path).absolute()
        try:
            _try_out(root / _ASIDE)
        except OSError as error:
            raise ConfigError(
                f"Replicas can't meet in the folder {root}: {error.strerror}. It must exist, be writable and be able "
                "to hold hard links."
            ) from None
        self.board = FolderBoard(str(root), patience_s=patience_s)
        self.address = root.as_uri()

    def connect(self, name: str, rank: int, size: int, watch: Watch) -> Group:
        return FolderGroup(self.board, name, rank, size, watch)

    def close(self) -> None:
        return None


def _try_out(aside: Path) -> None:
    """Make the folder of files that are being written, link a file in it, and delete what was abandoned there."""
    aside.mkdir(exist_ok=True)
    first, second = (aside / secrets.token_hex(8) for _ in range(2))
    first.touch()
    try:
        os.link(first, second)
        now = second.stat().st_mtime  # as the file system's clock has it
        for one in aside.iterdir():
            with suppress(FileNotFoundError):  # another process has it renamed meanwhile
                if one.stat().st_mtime < now - _ABANDONED_S:
                    one.unlink()
    finally:
        for one in (first, second):
            one.unlink(missing_ok=True)


@dataclass(frozen=True)
class FolderBoard:
    """The files of a folder, or those whose keys begin with a prefix, as a `Board`.

    Args:
        root: the folder, which a `FolderTransport` has tried out.
        patience_s: how long the file system may fail before a request ends with `Unreachable`; 0: one attempt.
    """

    root: str
    prefix: str = ""
    patience_s: float = PATIENCE_S
    pause_s: float = 0.02

    def part(self, name: str) -> FolderBoard:
        return replace(self, prefix=f"{self.prefix}{name}/")

    def patient(self, seconds: float) -> FolderBoard:
        return replace(self, patience_s=seconds)

    def put(self, key: str, value: bytes) -> None:
        self.write(key, [value])

    def put_new(self, key: str, value: bytes) -> bool:
        try:
            self.write(key, [value], is_new=True)
            return True
        except FileExistsError:
            return self.get(key) == value

    def get(self, key: str) -> bytes | None:
        return self.read(key, lambda file: file.read())

    def has(self, keys: Iterable[str]) -> bool:
        return all(self.read(key, lambda file: True) for key in keys)

    def delete(self, key: str) -> None:
        path = self._path(key)

        def delete() -> None:
            with suppress(FileNotFoundError):
                os.unlink(path)
            with suppress(OSError):  # the first one that is not empty
                for folder in self._folders(path)[:0:-1]:
                    os.rmdir(folder)

        self._ask(delete)

    def list(self, prefix: str) -> Sequence[str]:
        found = self._ask(lambda: self._keys(os.path.dirname(self._path(prefix))))
        return [key.removeprefix(self.prefix) for key in found if key.startswith(self.prefix + prefix)]

    def write(self, key: str, parts: Sequence[bytes | memoryview], is_new: bool = False) -> None:
        """Write a file of these parts aside, and then give it its name."""
        place = os.link if is_new else os.replace
        path, aside = self._path(key), os.path.join(self.root, _ASIDE, secrets.token_hex(8))

        def write() -> None:
            try:
                with open(aside, "wb") as file:
                    file.writelines(parts)
                for attempt in range(_ATTEMPTS):
                    try:
                        return place(aside, path)
                    except FileNotFoundError:
                        if attempt == _ATTEMPTS - 1:
                            raise
                        with suppress(FileNotFoundError):  # others delete empty ones
                            os.makedirs(os.path.dirname(path), exist_ok=True)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(aside)

        self._ask(write)

    def read(self, key: str, act: Callable[[BufferedReader], _T]) -> _T | None:
        """Return what `act` finds in a file; None if there is none."""
        path = self._path(key)

        def read() -> _T | None:
            for _ in range(2):
                try:
                    with open(path, "rb") as file:
                        return act(file)
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ESTALE):
                        raise
                self._renew(path)
            return None

        return self._ask(read)

    def _ask(self, act: Callable[[], _T]) -> _T:
        began = time.monotonic()
        while True:
            try:
                return act()
            except FileExistsError:
                raise
            except OSError as error:
                if time.monotonic() - began >= self.patience_s:
                    at = f" ({error.filename})" if error.filename else ""
                    raise Unreachable(f"The run's folder {self.root} can't be used: {error.strerror}{at}.") from None
            time.sleep(_AGAIN_S)

    def _path(self, key: str) -> str:
        return os.path.join(self.root, *map(_quoted, (self.prefix + key).split("/"))) + _VALUE

    def _folders(self, path: str) -> Sequence[str]:
        """Return the folders above a file, from the root on."""
        names = os.path.relpath(os.path.dirname(path), self.root).split(os.sep)
        return tuple(accumulate(names, os.path.join, initial=self.root))

    def _renew(self, path: str) -> None:
        """Open the folders above a file: a client of NFS then asks its server again whether the file exists."""
        for folder in self._folders(path):
            try:
                os.close(os.open(folder, os.O_RDONLY))
            except FileNotFoundError:
                if folder == self.root:
                    raise
                return

    def _keys(self, top: str) -> Sequence[str]:
        """Return the keys of the files in a folder and those below it."""

        def failed(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):  # it was empty, and another process has deleted it
                raise error

        os.stat(self.root)
        paths = [os.path.join(where, file) for where, _, files in os.walk(top, onerror=failed) for file in files]
        keys = {unquote(os.path.relpath(path, self.root).removesuffix(_VALUE)): path for path in paths}
        whole = replace(self, prefix="")
        return [key for key, path in keys.items() if whole._path(key) == path]  # the others are foreign ones


def _check_device(x: Tensor) -> None:
    if not x.is_cpu:
        raise Unsupported(f"A tensor on {x.device} can't be written to a folder. Train on CPUs, or without --meet.")


def _quoted(name: str) -> str:
    return quote(name, safe="").replace(".", "%2E")


class FolderGroup(Group):
    """Members of a generation that exchange files: one for each rank and collective, its share.

    A rank deletes a share once all others have read it: the header of each share says how many collectives its author
    has read, and so do files of ranks that only read.

    Args:
        name: see `Transport.connect`.
    """

    is_concurrent = True

    def __init__(self, board: FolderBoard, name: str, rank: int, size: int, watch: Watch) -> None:
        self.rank, self.size = rank, size
        self._board, self._name, self._watch = board, name, watch
        self._files, self._at_once = board.part(name), board.part(name).patient(0)
        self._lock = threading.Lock()
        self._num_begun = self._num_said = self._num_made = 0
        self._unread: set[int] = set()  # collectives that this rank has begun and not read
        self._shares: list[int] = []  # of this rank, which exist
        self._read_by = {one: 0 for one in range(size) if one != rank}  # so many collectives, as far as is known

    def supports(self, device: str) -> bool:
        return device == "cpu"

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        _check_device(x)
        rows = out.detach().view(self.size, -1)
        number = self._begin(x)
        rows[self.rank].copy_(x.detach().view(-1))
        return _Reading(self, number, out.nbytes, {one: rows[one] for one in self._read_by})

    def broadcast(self, x: Tensor, src: int) -> Work:
        _check_device(x)
        number = self._begin(x if src == self.rank else None)
        return _Reading(self, number, x.nbytes, {} if src == self.rank else {src: x.detach()})

    def duplicate(self, in_background: bool = False) -> FolderGroup:
        self._num_made += 1
        return FolderGroup(self._board, f"{self._name}.{self._num_made}", self.rank, self.size, self._watch)

    def _block(self, begin: int, end: int) -> FolderGroup:
        self._num_made += 1
        name = f"{self._name}.{self._num_made}-{begin}"
        return FolderGroup(self._board, name, self.rank - begin, end - begin, self._watch)

    def free(self, reusable: bool = True) -> None:
        if not reusable:
            return self._mark_left(f"rank {self.rank} has left")
        with suppress(Unreachable):  # its files are then deleted with the records of the generation
            if self._num_begun and self.size > 1:
                self._say_read()
                if self._have_read(self._num_begun) and not self._unread:
                    forget(self._at_once, "")

    def leave(self, reason: str, for_good: bool = False) -> None:
        self._watch.break_off(reason)
        self._mark_left(f"rank {self.rank} has left ({reason})")

    def raise_if_broken(self) -> None:
        self._watch.look(Entered("", 0), 0.0)

    def finish(self, number: int, nbytes: int, rows: Mapping[int, Tensor]) -> None:
        """Fill `rows`, by rank, with shares of a collective; RankFailure where the wait can't end."""
        missing = dict(rows)

        def is_complete() -> bool:
            for rank, row in [*missing.items()]:
                with suppress(Unreachable):
                    if self._at_once.read(f"{number}.{rank}", partial(self._take, number, rank, row)):
                        del missing[rank]
            return not missing

        entered = Entered(f"{self._name}#{number}", nbytes)
        self._wait(entered, is_complete)
        with self._lock:
            self._unread.discard(number)
        if not rows and self.size > 1:
            self._wait(entered, lambda: self._have_read(number - _MOST_UNREAD))
        if self.size > 1 and self._num_read() >= self._num_said + _MOST_UNREAD // 2:
            self._say_read()

    # ---- shares

    def _begin(self, x: Tensor | None) -> int:
        """Count a collective, and write this rank's share in it, if it has one and there are others."""
        has_share = x is not None and self.size > 1
        with self._lock:
            self._num_begun += 1
            number = self._num_begun
            self._unread.add(number)
            self._shares += [number] * has_share
        if x is not None and has_share:
            self._num_said = num_read = self._num_read()
            plain = bytes_of(x.detach()).numpy().data
            header = json.dumps({**self._described(number, self.rank, x), "read": num_read}).encode()
            digest = blake2b(header, digest_size=16)
            digest.update(plain)
            try:
                self._files.write(f"{number}.{self.rank}", [digest.hexdigest().encode(), b" ", header, b"\n", plain])
            except Unreachable as error:
                raise self._failure(str(error)) from None
        return number

    def _described(self, number: int, rank: int, x: Tensor) -> dict[str, Any]:
        return {"share": f"{self._name}/{number}.{rank}", "dtype": str(x.dtype), "numel": x.numel()}

    def _take(self, number: int, rank: int, row: Tensor, file: BufferedReader) -> bool:
        """Read a share into `row`; RankFailure if it is not what its author has to write there."""
        line, plain = file.read(_HEADER_BYTES).partition(b"\n")[0], bytes_of(row).numpy().data
        said, _, header = line.partition(b" ")
        try:
            found = json.loads(header)
            num_read, expected = int(found.pop("read")), self._described(number, rank, row)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise self._failure(f"rank {rank} has written a share without a header: {file.name}") from None
        size = os.fstat(file.fileno()).st_size
        if found != expected or size != len(line) + 1 + len(plain):
            what = f"{found} in {size} bytes instead of {expected}"
            raise self._failure(f"rank {rank} has written another share than rank {self.rank} waits for: {what}")
        file.seek(len(line) + 1)
        digest = blake2b(header, digest_size=16)
        num_bytes = 0
        while num_bytes < len(plain) and (count := file.readinto(plain[num_bytes:])):
            num_bytes += count
        digest.update(plain)
        if digest.hexdigest().encode() != said:
            raise self._failure(f"the share of rank {rank} is damaged, as its digest shows: {file.name}")
        self._note_read(rank, num_read)
        return True

    # ---- what has been read

    def _num_read(self) -> int:
        with self._lock:
            return min(self._unread, default=self._num_begun + 1) - 1

    def _say_read(self) -> None:
        with suppress(Unreachable):
            self._num_said = num_read = self._num_read()
            self._at_once.put(f"read.{self.rank}", str(num_read).encode())

    def _ask_read(self) -> None:
        for rank in self._read_by:
            with suppress(Unreachable, ValueError):
                self._note_read(rank, int(self._at_once.get(f"read.{rank}") or 0))

    def _note_read(self, rank: int, num_read: int) -> None:
        """Record how many collectives another rank has read, and delete the shares that all have."""
        with self._lock:
            self._read_by[rank] = max(self._read_by[rank], num_read)
            least = min(self._read_by.values())
            over = [number for number in self._shares if number <= least]
            self._shares = self._shares[len(over) :]
        for number in over:
            with suppress(Unreachable):
                self._at_once.delete(f"{number}.{self.rank}")

    def _have_read(self, number: int) -> bool:
        """Return whether all others have read so many collectives."""
        if min(self._read_by.values()) < number:
            self._ask_read()
        return min(self._read_by.values()) >= number

    # ---- waiting

    def _wait(self, entered: Entered, is_over: Callable[[], bool]) -> None:
        began = looked = time.monotonic()
        pause = _FIRST_PAUSE_S
        while not is_over():
            with suppress(Unreachable):
                if left := self._at_once.get("left"):
                    raise self._watch.break_off(left.decode(errors="replace"))
            if time.monotonic() >= looked + _LOOK_S:
                looked = time.monotonic()
                self._watch.look(entered, looked - began)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        if (waited_s := time.monotonic() - began) > _LOOK_S:
            self._watch.note_end(entered, waited_s)

    def _failure(self, reason: str) -> RankFailure:
        self._mark_left(reason)
        return self._watch.break_off(reason)

    def _mark_left(self, reason: str) -> None:
        """End the waits of others in this group."""
        if self.size > 1:
            with suppress(Unreachable):
                self._at_once.put_new("left", reason.encode())


class _Reading:
    """A collective under way: this rank's share is written, and those of others are to be read."""

    def __init__(self, group: FolderGroup, number: int, nbytes: int, rows: Mapping[int, Tensor]) -> None:
        self._group, self._number, self._nbytes = group, number, nbytes
        self._rows: Mapping[int, Tensor] | None = rows  # None: they are filled, and their owner's to change

    def wait(self) -> None:
        if self._rows is not None:
            self._group.finish(self._number, self._nbytes, self._rows)
            self._rows = None
