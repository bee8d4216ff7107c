# SPDX-License-Identifier: Apache-2.0
"""What a run's key does to objects: nobody without it can read, write or rename one, or put an older one back.

    head: magic 16 bytes | digest of the run's key 8 | salt 16 | writer 8 | number of the write 8
    body: pieces of 1 MiB, each sealed by AES-256-GCM; the nonce is its index, with a mark on the last one

The key of an object is HMAC-SHA256 of its head, size and name under the run's key. So an object does not open under
another name, in another run or in another generation, as the name has both, nor if anything is missing or added at its
end; and names have a tag, so nobody else can invent one.

Source: pieces as in STREAM (Hoang et al., Online Authenticated-Encryption, eprint.iacr.org/2015/189).
"""

from __future__ import annotations

import hmac
import io
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from io import BufferedReader
from itertools import count
from typing import TYPE_CHECKING

from farflung.base.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from typing_extensions import Buffer

RECORD_OF_RUN, PART = "run", "run-[0-9a-f]{8}"  # the record of a run, and the names of parts that hold runs
_UNTAGGED = re.compile(f"({PART}/)?{RECORD_OF_RUN}")  # so that a launcher with another key finds the run
_MAGIC = b"farflung sealed1"
_HEAD, _TAG, _PIECE = 56, 16, 2**20  # bytes
_MOST_NAMES, _MOST_NOTICES = 4096, 100


class SealError(Exception):
    """An object was not sealed with this key under its name, or a later version of it was read before."""


def is_sealed(content: bytes) -> bool:
    """Return whether an object was sealed with some key."""
    return content.startswith(_MAGIC)


class SeenVersions:
    """Which version of each name this process has read last, so that it notices an older one that is put back.

    Writers number what they write. Versions of several writers have the order in which they were read first, as clocks
    may differ.

    Attributes:
        notices: sentences about what those without the key have done, until they are reported.
    """

    def __init__(self) -> None:
        self.notices: list[str] = []
        self._noticed: set[str] = set()
        self._lock, self._numbers, self._writer = threading.Lock(), count(1), secrets.token_bytes(4)
        # By name: the latest number of each writer, the last writer at the end; and when that has changed.
        self._rows: OrderedDict[str, tuple[dict[bytes, int], float]] = OrderedDict()

    def next(self) -> bytes:
        """Return writer and number of a version that is about to be written."""
        return self._writer + (os.getpid() % 2**32).to_bytes(4, "big") + next(self._numbers).to_bytes(8, "big")

    def check(self, name: str, version: bytes, began: float) -> None:
        """Record a version that was read; SealError if it is an older one than one that was known when the read began.

        Args:
            began: by the monotonic clock.
        """
        writer, number = version[:8], int.from_bytes(version[8:], "big")
        with self._lock:
            row, changed = self._rows.setdefault(name, ({}, began))
            self._rows.move_to_end(name)
            if len(self._rows) > _MOST_NAMES:
                self._rows.popitem(last=False)
            if changed > began or (next(reversed(row), b"") == writer and row[writer] == number):
                return
            if number <= row.get(writer, 0):
                raise SealError("an older version of it was put back, or a deleted one")
            row.pop(writer, None)
            self._rows[name] = {**row, writer: number}, time.monotonic()

    def delete(self, name: str) -> None:
        """Record that this process has deleted a name: no version that it has read may come back."""
        with self._lock:
            if name in self._rows:
                row = self._rows[name][0]
                row.pop(b"", None)
                self._rows[name] = {**row, b"": 0}, time.monotonic()

    def notice(self, name: str, why: str) -> None:
        """Record that an object was not taken."""
        self._report(f"someone without this run's key may write there: {name!r} is not taken, as {why}")

    def refuse(self, peer: str, why: str) -> None:
        """Record that a client of this process's server was refused, once for each machine."""
        if self.is_news(peer):
            self._report(f"{peer} was refused at the port of this run: {why}")

    def is_news(self, sentence: str) -> bool:
        """Return whether a sentence is to be reported: each once, and a limited number, so that no disk fills."""
        if sentence in self._noticed or len(self._noticed) >= _MOST_NOTICES:
            return False
        self._noticed.add(sentence)
        if len(self._noticed) == _MOST_NOTICES:
            self.notices.append("From now on this process reports no more objects and machines without this run's key")
        return True

    def _report(self, sentence: str) -> None:
        if self.is_news(sentence):
            self.notices.append(sentence)


@dataclass(frozen=True, eq=False)
class Seal:
    """Seals and opens objects.

    Args:
        key: the run's, 32 random bytes.
        scope: a prefix of all names: the part of the address where the run lies.

    Raises:
        ConfigError: the package `cryptography` is missing.
    """

    key: bytes = field(repr=False)
    scope: str = ""
    versions: SeenVersions = field(default_factory=SeenVersions, repr=False)
    _cipher: type[AESGCM] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise ConfigError("A run's key needs the package cryptography: pip install 'farflung[key]'.") from None
        object.__setattr__(self, "_cipher", AESGCM)

    @cached_property
    def _names(self) -> bytes:
        return hmac.digest(self.key, b"names", "sha256")

    @cached_property
    def _objects(self) -> bytes:
        return hmac.digest(self.key, b"objects", "sha256")

    @cached_property
    def digest(self) -> bytes:
        """Tells two keys apart, and says nothing else of them."""
        return hmac.digest(self.key, b"digest", "sha256")[:8]

    def below(self, part: str) -> Seal:
        """Return the seal for the objects of a part, whose names are given without it."""
        return replace(self, scope=f"{self.scope}{part}/")

    def at_root(self) -> Seal:
        """Return the seal for another address."""
        return replace(self, scope="", versions=SeenVersions())

    def tag(self, name: str) -> str:
        """Return what the name of an object ends with."""
        if _UNTAGGED.fullmatch(self.scope + name):
            return ""
        return f".{hmac.digest(self._names, (self.scope + name).encode(), 'sha256')[:8].hex()}"

    def close(self, name: str, parts: Sequence[bytes | memoryview]) -> Iterable[bytes | memoryview]:
        """Return the parts of the sealed object, each of which is made when it is written."""
        head, size = _MAGIC + self.digest + secrets.token_bytes(16) + self.versions.next(), sum(map(len, parts))
        return _SealedParts(head, self._of_object(head, name, size), parts, max(0, size - 1) // _PIECE)

    def closed_bytes(self, num_bytes: int) -> int:
        """Return how many bytes an object of `num_bytes` bytes has once it is sealed."""
        return _HEAD + num_bytes + _TAG * max(1, -(-num_bytes // _PIECE))

    def open(self, name: str, file: BufferedReader, size: int, began: float) -> tuple[BufferedReader, int]:
        """Return a sealed object as a file that can be read once, and the number of its bytes.

        Args:
            file: of `size` bytes.
            began: see `SeenVersions.check`.

        Raises:
            SealError: it is not one of this key and name, or an older version of it. Reading it may raise that too.
        """
        try:
            head = file.read(_HEAD)
            if not is_sealed(head):
                raise SealError("it is not sealed with any key")
            if head[16:24] != self.digest:
                raise SealError("it is sealed with another key")
            notice = partial(self.versions.notice, self.scope + name)
            count = max(1, -(-(size - _HEAD) // (_PIECE + _TAG)))
            num_bytes = size - _HEAD - count * _TAG
            if num_bytes < 0:
                raise SealError("it is too short")
            opened = _Opened(self._of_object(head, name, num_bytes), file, count, num_bytes, notice)
            self.versions.check(self.scope + name, head[40:], began)
        except SealError as error:
            self.versions.notice(self.scope + name, str(error))
            raise
        return BufferedReader(opened), num_bytes

    def _of_object(self, head: bytes, name: str, num_bytes: int) -> AESGCM:
        return self.cipher(head + num_bytes.to_bytes(8, "big") + (self.scope + name).encode())

    def proof(self, label: str) -> bytes:
        """Return 32 bytes that nobody without the key can tell, of their own for each label."""
        return hmac.digest(self._objects, b"proof " + label.encode(), "sha256")

    def cipher(self, label: bytes) -> AESGCM:
        """Return a cipher with a key of its own for each label."""
        return self._cipher(hmac.digest(self._objects, label, "sha256"))


@dataclass(frozen=True)
class _SealedParts:
    """The parts of a sealed object. A retry reads them again."""

    head: bytes
    cipher: AESGCM
    parts: Sequence[bytes | memoryview]
    last: int

    def __iter__(self) -> Iterator[bytes | memoryview]:
        yield self.head
        for number, piece in enumerate(_pieces(self.parts)):
            out = memoryview(bytearray(len(piece) + _TAG))
            self.cipher.encrypt_into(_nonce(number, number == self.last), piece, None, out)
            yield out


class _Opened(io.RawIOBase):
    """The bytes of a sealed object. The first piece is opened at once, so nobody acts on what does not open."""

    def __init__(
        self, cipher: AESGCM, file: BufferedReader, count: int, num_bytes: int, notice: Callable[[str], None]
    ) -> None:
        self._cipher, self._file, self._count, self._size, self._notice = cipher, file, count, num_bytes, notice
        self._sealed = memoryview(bytearray(min(_PIECE, num_bytes) + _TAG))  # fresh memory takes longer than AES
        self._next, self._left = 0, memoryview(b"")
        self._left = self._piece(memoryview(bytearray(min(_PIECE, self._size))))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        into = memoryview(buffer).cast("B")
        if not self._left and self._next < self._count:
            size = min(_PIECE, self._size)
            if len(into) >= size:
                return len(self._piece(into[:size]))
            self._left = self._piece(memoryview(bytearray(size)))
        num_bytes = min(len(self._left), len(into))
        into[:num_bytes], self._left = self._left[:num_bytes], self._left[num_bytes:]
        return num_bytes

    def _piece(self, into: memoryview) -> memoryview:
        sealed = self._sealed[: len(into) + _TAG]
        sealed = sealed[: self._file.readinto(sealed)]
        try:
            nonce = _nonce(self._next, self._next == self._count - 1)
            self._cipher.decrypt_into(nonce, sealed, None, into)
        except Exception:  # InvalidTag, or a ValueError for other sizes
            why = "it was not sealed under this name, or was changed"
            self._notice(why)
            raise SealError(why) from None
        self._next, self._size = self._next + 1, self._size - len(into)
        return into


def _nonce(number: int, is_last: bool) -> bytes:
    return number.to_bytes(8, "big") + is_last.to_bytes(4, "big")


def _pieces(parts: Sequence[bytes | memoryview]) -> Iterator[bytes | bytearray | memoryview]:
    """Cut the bytes of `parts`, one after the other. The last piece may be shorter, and the only one empty."""
    held, is_cut = bytearray(), False
    for part in parts:
        rest = memoryview(part)
        while rest:
            if not held and len(rest) >= _PIECE:
                yield rest[:_PIECE]
                rest, is_cut = rest[_PIECE:], True
                continue
            room = _PIECE - len(held)
            held += rest[:room]
            rest = rest[room:]
            if len(held) == _PIECE:
                yield held
                held, is_cut = bytearray(), True
    if held or not is_cut:
        yield held
