# SPDX-License-Identifier: Apache-2.0
"""Replicas that meet in a bucket: of S3, what speaks its protocol, Google Cloud Storage, Azure or Hugging Face.

obstore sends the requests, with each cloud's own variables for credentials and endpoints. Its retries are off unless
files are sent: a request is repeated here, so that callers without patience get an answer at once.
"""

from __future__ import annotations

import io
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from io import BufferedReader
from itertools import islice
from threading import Event
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import obstore
from obstore import exceptions as errors
from obstore.store import from_url

from farflung.address.hub import MAKE_KEYS, of_gateway
from farflung.address.object_group import ObjectTransport
from farflung.address.objects import PATIENCE_S, Act, FileParts, ObjectBoard, Refused, try_out
from farflung.address.seal import Seal
from farflung.base.errors import ConfigError, Unreachable
from farflung.comm.patience import interruptible

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore
    from typing_extensions import Buffer

_T = TypeVar("_T")

_SMALL, _PART = 256 * 1024, 5 * 1024 * 1024  # bytes of a request that needs no long time limit, and of one part
_ANSWER_S, _PART_S = timedelta(seconds=10), timedelta(seconds=160)  # _SIDE_BY_SIDE parts at 1 Mbit/s
_CONNECT_S = timedelta(seconds=5)
_SIDE_BY_SIDE = 4  # parts of one object
_MOST_PARTS = 10_000  # of one object, by all stores
_CHUNK = 2  # names of a listing that are got at a time


class BucketTransport(ObjectTransport):
    """Groups of replicas that meet in a bucket.

    Args:
        address: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix` or `hf://namespace/bucket/prefix`.
        patience_s: how long requests may fail.
        seal: see `ObjectBoard`.

    Raises:
        ConfigError: the bucket can't be used; or it ignores that an object is to be created only if there is none,
            so that several replicas would all take themselves for the one that decides.
    """

    def __init__(self, address: str, patience_s: float = PATIENCE_S, seal: Seal | None = None) -> None:
        board = bucket_at(address, patience_s, seal)
        try:
            try_out(board)
        except (Unreachable, ValueError) as error:
            raise ConfigError(f"Replicas can't meet at {board.root}. {error}") from None
        super().__init__(board, board.root)


def bucket_at(address: str, patience_s: float = PATIENCE_S, seal: Seal | None = None, retries: int = 0) -> BucketBoard:
    """Return the objects at an address, which nothing has been asked of; ConfigError if it is none."""
    address = address.rstrip("/")
    if re.search(r"[?#]|/\.{1,2}(/|$)", address):  # which URLs end or change the path with, so that two are one place
        raise ConfigError(
            f"{address} can't be used: names with `?`, `#` or `..` in them would be another place. Write %3F "
            "and %23, or give another name."
        )

    kind, (where, config) = BucketBoard, (address, dict[str, str]())
    if address.startswith("hf://"):
        kind, (where, config) = HubBoard, of_gateway(address)

    def made(answer_s: timedelta, **more: str) -> ObjectStore:
        # Only an endpoint that someone has given can be one of http://.
        client: ClientConfig = {"timeout": answer_s, "connect_timeout": _CONNECT_S, "allow_http": True}
        known: Any = config | more
        return from_url(where, config=known, client_options=client, retry_config={"max_retries": retries})

    try:
        quick, slow = made(_ANSWER_S), made(_PART_S)
        single = made(_ANSWER_S, aws_disable_bulk_delete="true") if where.startswith("s3") else quick
        return kind(address, patience_s=patience_s, quick=quick, slow=slow, single=single, seal=seal)
    except (errors.BaseError, ValueError) as error:
        raise ConfigError(f"{address} can't be used. {_words(error)}.") from None


@dataclass(frozen=True)
class BucketBoard(ObjectBoard):
    """The objects of a bucket, below a prefix.

    Args:
        quick, slow: obstore's stores of the bucket, for small requests and for large ones.
        single: for requests that delete one object.
        has_no_bulk: the store has no request that deletes several, as was found.
    """

    quick: ObjectStore = field(kw_only=True)
    slow: ObjectStore = field(kw_only=True)
    single: ObjectStore = field(kw_only=True)
    has_no_bulk: Event = field(default_factory=Event, compare=False, repr=False, kw_only=True)
    pause_s: ClassVar[float] = 0.2
    heartbeat_s: ClassVar[float] = 10.0
    grace_s: ClassVar[float] = 60.0
    num_at_once: ClassVar[int] = 32
    lists_at_once: ClassVar[bool] = True
    missing: ClassVar[str] = ""  # what the store says of an object that doesn't exist, and of nothing else

    def delete_names(self, names: Sequence[str]) -> None:
        def delete_all() -> bool:
            try:
                obstore.delete(self.quick, list(names))
                return True
            except FileNotFoundError:
                return False  # from a store that takes one at a time
            except errors.BaseError as error:
                if _status(str(error)) not in _UNABLE:
                    raise
                self.has_no_bulk.set()
                return False

        def delete(name: str) -> None:
            with suppress(FileNotFoundError):
                obstore.delete(self.single, name)

        if len(names) > 1 and not self.has_no_bulk.is_set() and self.ask(delete_all, "delete"):
            return
        for name in names:
            self.ask(partial(delete, name), "delete")

    def write_name(self, name: str, parts: Iterable[bytes | memoryview], is_new: bool) -> None:
        content = parts if isinstance(parts, FileParts) else list(parts)
        size = content.num_bytes if isinstance(content, FileParts) else sum(map(len, content))
        is_small = size <= _SMALL
        how: dict[str, Any] = {"use_multipart": False}
        if is_new:
            how["mode"] = "create"
        elif not is_small:
            how = {"chunk_size": max(_PART, -(-size // _MOST_PARTS)), "max_concurrency": _SIDE_BY_SIDE}
        store = self.quick if is_small else self.slow
        act: Act = "create" if is_new else "write"
        self.ask(lambda: obstore.put(store, name, content, **how), act)

    def read_name(
        self, name: str, act: Callable[[BufferedReader, int], _T], span: tuple[int, int] | None = None
    ) -> _T | None:
        start, most = span or (0, _SMALL)

        def read() -> _T | None:
            first: Buffer = b""
            size = 0
            try:
                found = obstore.get(self.quick, name, options={"range": (start, start + min(most, _SMALL))})
                first, size = found.bytes(), found.meta["size"] if span is None else most
            except FileNotFoundError as error:
                if self.missing not in str(error):
                    raise
                return None
            except errors.GenericError as error:
                if " 416 " not in str(error):  # an empty object has no such range
                    raise
            return act(BufferedReader(_Body(self._parts(name, first, start, start + size))), size)

        return self.ask(read)

    def find_names(self, folder: str, found: MutableSequence[str]) -> bool:
        # In small chunks, so that no page is asked for again after a later one has failed.
        before, after = len(found), found[-1] if found else None
        try:
            for chunk in obstore.list(self.quick, folder, offset=after, chunk_size=_CHUNK):
                found.extend(one["path"] for one in chunk)
        except errors.BaseError:
            if len(found) == before:
                raise
            return False  # a store that answers page by page can be reached
        return True

    def ask(self, request: Callable[[], _T], act: Act = "read") -> _T:
        def translated() -> _T:
            try:
                return request()
            except (FileNotFoundError, errors.BaseError) as error:
                if act == "create" and isinstance(error, (errors.AlreadyExistsError, errors.PreconditionError)):
                    raise FileExistsError from None  # of other requests, a conflict that passes
                why, remedy = _words(error), self._remedy(str(error), act)
                raise Refused(f"{why}. {remedy}") if remedy else OSError(why) from None

        return super().ask(lambda: interruptible(translated, "ask a bucket"), act)

    def _remedy(self, said: str, act: Act) -> str:
        """Return what to do about an error of the store; empty if asking again may be enough."""
        for pattern, remedy in _REMEDIES:
            if re.search(pattern, said):
                return remedy
        status = _status(said)
        if status in ("401", "403"):
            permission = _PERMISSIONS.get(self.root.partition(":")[0], {}).get(act, f"one to {act} objects")
            return f"The credentials may lack a permission: {permission}"
        if status in _PASSING or (status[0] == "5" and status not in _UNABLE):
            return ""
        return f"It can't create an object only if there is none. {_CONDITIONAL}" if act == "create" else _CHECK

    def _parts(self, name: str, first: Buffer, start: int, end: int) -> Iterator[Buffer]:
        """Return the bytes of an object from `start` on, given the first of them, which have come already."""
        yield first
        starts = iter(range(start + _SMALL, end, _PART))

        def get(at: int) -> Buffer:
            return obstore.get_range(self.slow, name, start=at, end=min(at + _PART, end))

        if end > start + _SMALL:
            with ThreadPoolExecutor(_SIDE_BY_SIDE) as threads:
                coming = deque(threads.submit(get, at) for at in islice(starts, _SIDE_BY_SIDE))
                while coming:
                    yield coming.popleft().result()
                    coming.extend(threads.submit(get, at) for at in islice(starts, 1))


class HubBoard(BucketBoard):
    """The objects of a Storage Bucket of the Hugging Face Hub, below a prefix.

    The gateway redirects a read to another host, whose errors say nothing of the object or of the keys. An account may
    make some thousand requests in five minutes, so there are fewer of them than elsewhere.
    """

    pause_s = 1.0
    heartbeat_s = 20.0
    grace_s = 120.0
    missing = "NoSuchKey"

    def _remedy(self, said: str, act: Act) -> str:
        status = _status(said)
        if act == "read" and status in ("401", "403", "404"):
            return ""
        if status in ("401", "403"):
            return f"The keys may be of a token that may not {act} objects here: {MAKE_KEYS}"
        return super()._remedy(said, act)


_STATUS = re.compile(r"status code: (\d+)")
_PASSING = {"408", "409", "425", "429"}  # of those below 500; and RequestTimeout, which is a 400
_UNABLE = {"400", "405", "501", "505"}
# What stores say, and what to do about it: error codes of S3, which others share, and obstore's own words.
_REMEDIES = (
    ("RequestTimeout|IncompleteBody|BadDigest", ""),
    (
        "ExpiredToken|TokenRefreshRequired|InvalidToken",
        "The credentials have expired, and nothing renews those in variables: start this again with new ones",
    ),
    (
        "AuthorizationHeaderMalformed|PermanentRedirect|IllegalLocationConstraint|redirect without LOCATION",
        "AWS_REGION is probably not the region of the bucket",
    ),
    (
        "InvalidAccessKeyId|SignatureDoesNotMatch|NotSignedUp",
        "Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and that AWS_ENDPOINT_URL is where they belong",
    ),
    ("RequestTimeTooSkewed", "Set the clock of this machine"),
    ("NoSuchBucket|ContainerNotFound", "Create the bucket first, or correct its name"),
    (
        r"169\.254\.|metadata\.google",
        "No credentials are in this environment. Profiles in ~/.aws are not read, whatever AWS_PROFILE says: "
        '`eval "$(aws configure export-credentials --format env)"` exports one',
    ),
)
_CONDITIONAL = "S3, R2, MinIO, Google Cloud Storage and Azure do"
_CHECK = "Check the address, and the variables for credentials and endpoint"
_PERMISSIONS: dict[str, dict[str, str]] = {
    "s3": {
        "write": "s3:PutObject",
        "create": "s3:PutObject",
        "read": "s3:GetObject, or s3:ListBucket, without which S3 refuses to say that an object does not exist",
        "list": "s3:ListBucket",
        "delete": "s3:DeleteObject",
    },
    "gs": {
        "write": "storage.objects.create, and storage.objects.delete to overwrite",
        "create": "storage.objects.create",
        "read": "storage.objects.get",
        "list": "storage.objects.list",
        "delete": "storage.objects.delete",
    },
    "az": dict.fromkeys(("write", "create", "read", "list", "delete"), "the role Storage Blob Data Contributor"),
}


class _Body(io.RawIOBase):
    """The bytes of an object as a file that can be read once."""

    def __init__(self, parts: Iterator[Buffer]) -> None:
        self._parts, self._left = parts, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        if not self._left:
            self._left = memoryview(next(self._parts, b""))
        into = memoryview(buffer)
        count = min(len(self._left), len(into))
        into[:count], self._left = self._left[:count], self._left[count:]
        return count


def _status(said: str) -> str:
    """Return the status code of an answer, which is not that of each object that it concerns."""
    found = _STATUS.search(said)
    return "403" if "AccessDenied" in said else found[1] if found else "500"


def _words(error: Exception) -> str:
    """Return what a store has said, without its XML and what obstore has for those that debug it."""
    text = str(error)
    line = text.partition("\n")[0].partition(": <?xml")[0].partition(": <Error")[0].rstrip(".")
    if sent := re.search(
        r"Error performing (\S+ \S+) in \S+(?:, after .*?)? - (?:Server returned non-2xx status code: )?(.*)", line
    ):
        line = f"{sent[1]}: {sent[2]}"
    code, message = (re.search(rf"<{name}>(.*?)</{name}>", text) for name in ("Code", "Message"))
    return line + (f": {message[1].rstrip('.')}" if message else "") + (f" ({code[1]})" if code else "")
