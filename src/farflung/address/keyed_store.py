# SPDX-License-Identifier: Apache-2.0
"""The records of a run as a c10d store: `KeyedServer` holds them, `KeyedStore` asks. If the run has a key, only
processes with it can use them.

    hello     magic 16 bytes | digest of the run's key 8, zeros without one | random 32, each side's first bytes
    message   length 4 | lengths and bytes of its parts; with a key sealed by AES-256-GCM, the nonce is its number there

Both directions have a key of their own, the HMAC-SHA256 of both random values under the run's key. So whoever opens
a message has the proof that the other side has the key, now; nothing that was heard before opens.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from farflung.address.run_record import KeyMismatch
from farflung.address.seal import Seal
from farflung.comm.threads import start_until_exit

_MAGIC, _HELLO = b"farflung keyed 1", 56
_NO_KEY = bytes(8)  # in the place of a digest
_HELLO_S, _MOST_HELLOS = 5.0, 64  # how long a client may take to prove that it has the key; of them at a time
_MOST_BYTES, _FIRST_BYTES = 2**26, 2**16  # of a message; of the first one, before which nothing is proved
_PAUSE_S = 0.01


class _Unsealed:
    """The cipher of a run without a key."""

    def encrypt(self, nonce: bytes, content: bytes, _: None) -> bytes:
        return content

    decrypt = encrypt


class _Channel:
    """One connection, once both sides have said hello."""

    def __init__(self, connection: socket.socket, seal: Seal | None, is_server: bool) -> None:
        """Exchange hellos; KeyMismatch if the other side has another key, ConnectionError if it speaks otherwise."""
        self._socket, self._sent, self._received = connection, 0, 0  # numbers of messages
        self._until = time.monotonic() + _HELLO_S if is_server else None  # for the first message
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        mine = secrets.token_bytes(32)
        digest = _NO_KEY if seal is None else seal.digest
        connection.sendall(_MAGIC + digest + mine)
        theirs = self._read(4)  # other protocols may begin with no more
        if _MAGIC.startswith(theirs):
            theirs += self._read(_HELLO - len(theirs))
        if not theirs.startswith(_MAGIC):
            raise ConnectionError("it does not speak as launchers and replicas do")
        if theirs[16:24] != digest:
            which = "no" if theirs[16:24] == _NO_KEY else "a" if seal is None else "another"
            raise KeyMismatch("", f"it has {which} key")
        self._in: Any = _Unsealed()
        self._out: Any = self._in
        if seal is None:
            return
        nonces = theirs[24:] + mine if is_server else mine + theirs[24:]
        of_client, of_server = (seal.cipher(nonces + side) for side in (b"client", b"server"))
        self._in, self._out = (of_client, of_server) if is_server else (of_server, of_client)

    def send(self, *parts: bytes) -> None:
        content = b"".join(struct.pack("!I", len(part)) + part for part in parts)
        sealed = self._out.encrypt(self._sent.to_bytes(12, "big"), content, None)
        self._sent += 1
        self._socket.sendall(struct.pack("!I", len(sealed)) + sealed)

    def receive(self) -> list[bytes]:
        """Return the parts of the next message; ConnectionError if none comes, or it isn't one of this connection."""
        (size,) = struct.unpack("!I", self._read(4))
        if size > (_MOST_BYTES if self._received else _FIRST_BYTES):
            raise ConnectionError("a message is too long")
        try:
            content = self._in.decrypt(self._received.to_bytes(12, "big"), self._read(size), None)
        except OSError:
            raise
        except Exception:  # InvalidTag, or a ValueError for other sizes
            raise ConnectionError("a message was not sealed with the run's key") from None
        self._received += 1
        if self._until is not None:
            self._until = None
            self._socket.settimeout(None)
        parts, at = [], 0
        while at < len(content):
            (size,) = struct.unpack_from("!I", content, at)
            parts.append(content[at + 4 : at + 4 + size])
            at += 4 + size
        return parts

    def _read(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            if self._until is not None:  # one that sends a byte at a time has no more time than others
                if (left_s := self._until - time.monotonic()) <= 0:
                    raise TimeoutError("it has not proved in time that it has the key")
                self._socket.settimeout(left_s)
            piece = self._socket.recv(min(size - len(content), 2**20))
            if not piece:
                raise ConnectionResetError("the connection was closed")
            content += piece
        return bytes(content)


class KeyedServer:
    """Serves records to clients that prove that they have the run's key; the seal's notices name all others.

    Args:
        listener: a socket that listens.
        host: as others call this machine.
        seal: of the run's key; None: it has none. Then a record names whoever has one.
    """

    def __init__(self, listener: socket.socket, host: str, seal: Seal | None) -> None:
        self.host, self.port = host, listener.getsockname()[1]
        self._listener, self._seal = listener, seal
        self._values: dict[bytes, bytes] = {}
        self._lock, self._hellos = threading.Lock(), threading.BoundedSemaphore(_MOST_HELLOS)
        start_until_exit(self._accept, "serve the records of a run", self.close)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                connection, at = self._listener.accept()
            except OSError:  # it was closed, or there are too many open files
                time.sleep(_PAUSE_S)
                continue
            if not self._hellos.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection, str(at[0])), daemon=True).start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        with connection, suppress(OSError):
            try:
                channel = _Channel(connection, self._seal, is_server=True)
                request = channel.receive()
            except ConnectionResetError:
                return None  # nothing was asked
            except (KeyMismatch, OSError) as error:
                return self._refuse(peer, getattr(error, "why", str(error)))
            finally:
                self._hellos.release()
            while self._listener.fileno() >= 0:
                if (answer := self._answer(*request)) is not None:
                    channel.send(*answer)
                request = channel.receive()

    def _refuse(self, peer: str, why: str) -> None:
        if self._seal is not None:
            self._seal.versions.refuse(peer, why)
        else:
            self._values[f"events/first/refused {peer}".encode()] = f"{peer} was refused: {why}".encode()

    def _answer(self, act: bytes, *parts: bytes) -> list[bytes] | None:
        """Return the answer to a request, as c10d's stores define it; None if it has none."""
        key, *others = parts or (b"",)
        with self._lock:
            values = self._values
            if act == b"set":
                (values[key],) = others
                return None
            if act == b"swap":
                expected, desired = others
                if values.get(key, b"") == expected:
                    values[key] = desired
                return [values.get(key, expected)]
            if act == b"add":
                values[key] = str(int(values.get(key, b"0")) + int(others[0])).encode()
                return [values[key]]
            if act == b"delete":
                return [b"1" if values.pop(key, None) is not None else b""]
            if act == b"check":
                return [b"1" if all(part in values for part in parts) else b""]
            return list(values) if act == b"list" else [values.get(key, b"")]


class KeyedStore(dist.Store):  # type: ignore[misc, name-defined]  # torch.distributed has no types for it
    """A client of a `KeyedServer`, with the methods of c10d's stores that we and process groups use.

    Raises:
        KeyMismatch: the server has another key, or one side alone has any.
        OSError: it gives no answer.
    """

    def __init__(self, host: str, port: int, seal: Seal | None, timeout_s: float) -> None:
        super().__init__()
        self.socket = socket.create_connection((host, port), timeout_s)
        self._timeout, self._lock = timedelta(seconds=timeout_s), threading.Lock()
        try:
            self._channel = _Channel(self.socket, seal, is_server=False)
        except KeyMismatch as error:
            raise KeyMismatch(f"{host}:{port}", error.why) from None

    def __del__(self) -> None:
        if hasattr(self, "socket"):
            self.socket.close()

    def abort(self) -> None:
        """Close the connection; what was written and not sent yet is lost, so that it can't come later."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def set(self, key: str, value: bytes | str) -> None:
        with self._lock:
            self._channel.send(b"set", key.encode(), _bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._ask(b"get", key)[0]

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._ask(b"swap", key, expected, desired)[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(b"add", key, str(amount))[0])

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(b"check", *keys)[0])

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(b"delete", key)[0])

    def list_keys(self) -> list[str]:
        return [key.decode() for key in self._ask(b"list")]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        within = timeout or self._timeout
        until = time.monotonic() + within.total_seconds()
        while not self.check(keys):
            if time.monotonic() > until:
                raise dist.DistStoreError(f"nobody has written {', '.join(keys)} within {within}")
            time.sleep(_PAUSE_S)

    def _ask(self, act: bytes, *parts: bytes | str) -> list[bytes]:
        with self._lock:
            self._channel.send(act, *map(_bytes, parts))
            return self._channel.receive()


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value
