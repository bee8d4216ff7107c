# SPDX-License-Identifier: Apache-2.0
"""Records and values as objects with names that many processes can reach: files of a folder, or objects of a bucket.

An object appears whole, and of several writers one creates it. Nothing is locked, and no object holds code.
"""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from io import BufferedReader, BytesIO
from os.path import commonpath
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias, TypeVar
from urllib.parse import quote, unquote

from farflung.address.board import Board
from farflung.address.seal import Seal, SealError
from farflung.base.errors import Unreachable
from farflung.base.sizes import lie_in_names
from farflung.comm.patience import aloud, waiting
from farflung.comm.threads import side_by_side

if TYPE_CHECKING:
    from typing_extensions import Self

_T = TypeVar("_T")
_Item = TypeVar("_Item")
Act: TypeAlias = Literal["write", "create", "read", "list", "delete"]

PATIENCE_S = 60.0  # how long a request waits for an answer
_FIRST_PAUSE_S, _PAUSES = 0.2, 12  # before a failed request is retried; retries within the patience, at least
_BLOCK = 2**20  # bytes of a file that are read at a time
_NAME = 200  # characters of one part of a name, which may be a file's
_APART_S = 2.0  # between two failed requests of one outage, at most


class Outages:
    """Since when the requests of all parts of a board have failed, of any kind or of one: they share one patience.

    Whoever has waited for an answer in one place thus doesn't wait again in the next one.
    """

    def __init__(self) -> None:
        self._rows: dict[str, tuple[float, float]] = {}  # since when, and the latest failure

    def failed_s(self, act: Act, began: float) -> float:
        """Note that a request has failed, which began at a time; return for how long such ones have."""
        now, longest_s = time.monotonic(), 0.0
        for key in ("any", act):
            since, latest = self._rows.get(key, (began, began))
            since = since if began - latest < _APART_S else began
            self._rows[key] = since, now
            longest_s = max(longest_s, now - since)
        return longest_s

    def silent_s(self) -> float:
        """Return for how long all requests have failed; 0: the last one was answered."""
        since = self._rows.get("any")
        return 0.0 if since is None else time.monotonic() - since[0]

    def succeeded(self, act: Act) -> None:
        self._rows.pop("any", None)
        self._rows.pop(act, None)


@dataclass(frozen=True)
class FileParts:
    """The content of a file as parts of an object, which are read while they are sent.

    Args:
        taken: told of how many bytes were.
    """

    path: Path
    num_bytes: int
    taken: Callable[[int], object]

    def __iter__(self) -> Iterator[bytes]:
        with open(self.path, "rb") as file:
            while block := file.read(_BLOCK):
                yield block
                self.taken(len(block))


class Refused(OSError):
    """The same request will be refused again, unless someone changes a permission, a setting or credentials."""


@dataclass(frozen=True)
class ObjectBoard(Board):
    """The objects at an address, or those whose keys begin with a prefix, as a `Board`.

    Args:
        root: the address, as errors name it.
        patience_s: how long requests may fail, one after the other, before `Unreachable` is raised; 0: one attempt.
        is_strict: refused requests are not repeated, as none has succeeded yet. Later on credentials may be about to be
            renewed.
        seal: of the run's key; None: it has none.

    Attributes:
        num_at_once: how many small requests are worth being under way at a time, in threads; 1: answers come at once.
        lists_at_once: a listing takes one request, and has all objects that are there now.
    """

    root: str
    prefix: str = ""
    patience_s: float = PATIENCE_S
    is_strict: bool = False
    outages: Outages = field(default_factory=Outages, compare=False, repr=False, kw_only=True)
    seal: Seal | None = field(default=None, compare=False, kw_only=True)
    num_at_once: ClassVar[int] = 1
    lists_at_once: ClassVar[bool] = False

    def part(self, name: str) -> Self:
        return replace(self, prefix=f"{self.prefix}{name}/")

    def patient(self, seconds: float) -> Self:
        return replace(self, patience_s=seconds)

    def silent_s(self) -> float:
        return self.outages.silent_s()

    def put(self, key: str, value: bytes) -> None:
        self.write(key, [value])

    def put_new(self, key: str, value: bytes) -> bool:
        def decide() -> bool:
            try:
                self.write(key, [value], is_new=True)
                return True
            except FileExistsError:
                if (found := self.get(key)) is None:  # another create is under way, or it was deleted again
                    raise OSError("the store refuses to create an object that it can't read") from None
                return found == value

        return self.ask(decide, "create")

    def get(self, key: str) -> bytes | None:
        with suppress(SealError):
            return self.read(key, lambda file, size: file.read())
        return None

    def list(self, prefix: str) -> Sequence[str]:
        found = self.names_below(quoted(f"{self.prefix}{prefix}".rpartition("/")[0]))
        plain = (name.encode(errors="replace").decode() for name in found)  # a file system has names that are no texts
        keys = [unquote(name.partition(".")[0]) for name in plain]
        ours = [key for key, name in zip(keys, found, strict=True) if self._named(key) == name]
        if self.seal is not None and len(ours) < len(found):
            for name in set(found) - set(map(self._named, ours)):
                self.seal.versions.notice(name, "its name has no tag of the key")
        return [key.removeprefix(self.prefix) for key in ours if key.startswith(self.prefix + prefix)]

    def names_below(self, folder: str) -> Sequence[str]:
        """Return the names of all objects below a folder."""
        found: MutableSequence[str] = []
        while not self.ask(lambda: self.find_names(folder, found), "list"):
            continue  # with the names after the last one received
        return found

    def has(self, keys: Iterable[str]) -> bool:
        keys = [*keys]
        if lie_in_names(len(keys), self.lists_at_once):
            return set(keys) <= set(self.list(f"{commonpath(keys)}/".lstrip("/")))
        with suppress(SealError):
            return all(self.read(key, lambda file, size: True) for key in keys)
        return False

    def map(self, ask: Callable[[_Item], _T], items: Iterable[_Item]) -> Sequence[_T]:
        rows = [*enumerate(items)]
        found: dict[int, _T] = {}
        side_by_side([partial(lambda k, item: found.update({k: ask(item)}), *row) for row in rows], self.num_at_once)
        return [found[k] for k, _ in rows]

    def delete(self, *keys: str) -> None:
        self.delete_names([self.name(key) for key in keys])
        if self.seal is not None:
            for key in keys:
                self.seal.versions.delete(self.seal.scope + self.prefix + key)

    def write(self, key: str, parts: Sequence[bytes | memoryview], is_new: bool = False) -> None:
        """Write an object of these parts; FileExistsError if it `is_new` and exists."""
        sealed = parts if self.seal is None else self.seal.close(self.prefix + key, parts)
        self.write_name(self.name(key), sealed, is_new)

    def read(self, key: str, act: Callable[[BufferedReader, int], _T]) -> _T | None:
        """Return what `act` finds in an object, given the number of its bytes; None if there is no such object.

        Raises:
            SealError: it was not sealed with the run's key; `act` may have read the beginning of one that was changed.
        """
        return self.read_name(self.name(key), self._opened(self.prefix + key, act))

    def write_several(self, key: str, several: Sequence[Sequence[bytes | memoryview]]) -> None:
        """Write contents of one size as one object; `read_one` reads one of them alone."""
        seal, names = self.seal, (f"{self.prefix}{key}/{k}" for k in range(len(several)))
        closed = several if seal is None else [seal.close(name, one) for name, one in zip(names, several, strict=True)]
        self.write_name(self.name(key), [part for one in closed for part in one], is_new=False)

    def read_one(self, key: str, k: int, num_bytes: int, act: Callable[[BufferedReader, int], _T]) -> _T | None:
        """Read one of several contents that have `num_bytes` bytes each, and return what `act` finds in it."""
        size = num_bytes if self.seal is None else self.seal.closed_bytes(num_bytes)
        return self.read_name(self.name(key), self._opened(f"{self.prefix}{key}/{k}", act), (k * size, size))

    def key_with(self, key: str, value: bytes) -> str:
        """Return the key of an object whose name has a small value, so that `values_below` finds it in a listing."""
        sealed = value if self.seal is None else b"".join(self.seal.close(self.prefix + key, [value]))
        text = urlsafe_b64encode(sealed).decode().rstrip("=")
        return "/".join([key, *(text[start : start + _NAME] for start in range(0, len(text), _NAME))])

    def values_below(self, folder: str) -> Iterator[tuple[str, BufferedReader, int]]:
        """Yield each key below a folder that `key_with` was given, its value as a file, and the size in bytes."""
        began = time.monotonic()
        for found in self.list(f"{folder}/"):
            key, _, text = found.removeprefix(f"{folder}/").partition("/")
            with suppress(ValueError, SealError):  # a stranger's name has no value
                value = urlsafe_b64decode(text.replace("/", "") + "==")
                if self.seal is None:
                    yield key, BufferedReader(BytesIO(value)), len(value)
                else:
                    name = f"{self.prefix}{folder}/{key}"
                    yield key, *self.seal.open(name, BufferedReader(BytesIO(value)), len(value), began)

    def _opened(self, name: str, act: Callable[[BufferedReader, int], _T]) -> Callable[[BufferedReader, int], _T]:
        """Return what calls `act` with what was sealed under a name, if there is a key."""
        seal, began = self.seal, time.monotonic()
        return act if seal is None else lambda file, size: act(*seal.open(name, file, size, began))

    @abstractmethod
    def write_name(self, name: str, parts: Iterable[bytes | memoryview], is_new: bool) -> None:
        """Write bytes under a name, as `write` does; a retry reads `parts` again."""

    @abstractmethod
    def read_name(
        self, name: str, act: Callable[[BufferedReader, int], _T], span: tuple[int, int] | None = None
    ) -> _T | None:
        """Read what lies under a name, as `read` does.

        Args:
            span: where what is read begins, and of how many bytes it should be; None: all of it.
        """

    @abstractmethod
    def delete_names(self, names: Sequence[str]) -> None:
        """Delete what lies under names, as `delete` does."""

    @abstractmethod
    def find_names(self, folder: str, found: MutableSequence[str]) -> bool:
        """Find the names of objects below a folder, after those in `found`; return whether it has all of them now."""

    def name(self, key: str) -> str:
        """Return the name of the object of a key."""
        return self._named(self.prefix + key)

    def _named(self, key: str) -> str:
        return quoted(key) + ("" if self.seal is None else self.seal.tag(key))

    def unreachable(self, why: str) -> Unreachable:
        return Unreachable(f"The run's {self.root} can't be used: {why}.")

    def ask(self, request: Callable[[], _T], act: Act = "read") -> _T:
        """Send a request until it does not end with an OSError; Unreachable if it always does.

        Args:
            act: what the request does, for errors to name what is not permitted.
        """
        say = aloud("this process", f"for an answer of the run's {self.root}")
        pauses = waiting(_FIRST_PAUSE_S, say=say, most_s=self.patience_s / _PAUSES)
        began = time.monotonic()
        while True:
            next(pauses)
            try:
                found = request()
                self.outages.succeeded(act)
                return found
            except FileExistsError:
                self.outages.succeeded(act)
                raise
            except OSError as error:
                is_final = self.is_strict and isinstance(error, Refused)
                if self.outages.failed_s(act, began) >= self.patience_s or is_final:
                    at = f" ({error.filename})" if error.filename else ""
                    raise self.unreachable(f"{error.strerror or error}{at}") from None


def try_out(board: ObjectBoard) -> None:
    """Make once all the kinds of requests that a run makes.

    Raises:
        Unreachable: one was refused.
        ValueError: an object was overwritten that was to be created only if there is none.
    """
    probe = replace(board, is_strict=True).part("probe").part(secrets.token_hex(8))
    probe.put("object", b"1")
    probe.put("object", b"2")
    probe.get("object")
    probe.list("")
    probe.get("missing")
    is_created, is_kept = (probe.put_new("new", value) for value in (b"1", b"2"))
    probe.delete("object", "new")
    if not is_created or is_kept:
        raise ValueError(
            "It overwrites objects that are to be created only if there are none. S3, R2, MinIO, Google Cloud "
            "Storage and Azure heed that condition."
        )


@lru_cache(4096)
def quoted(key: str) -> str:
    """Return a name in which no part of a key has a dot, so that it can't be one of ours or of the file system's."""
    return "/".join(quote(part, safe="").replace(".", "%2E") for part in key.split("/"))
