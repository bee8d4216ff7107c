# SPDX-License-Identifier: Apache-2.0
"""Probes of an address where replicas meet: how long its requests take, and whether of several writers one creates."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from urllib.parse import unquote

from farflung.address.objects import ObjectBoard
from farflung.address.schemes import objects_at, transport_at
from farflung.base.errors import ConfigError, Unreachable
from farflung.base.words import in_bytes, in_seconds
from farflung.doctor.probe import Found, unknown

LARGE_BYTES = 4_000_000
_TIMES = 5


def measure(address: str, timeout_s: float) -> Found:
    """Measure the requests that replicas send to the address of a folder or a bucket; nothing is left there."""
    probed = f"{address.rstrip('/')}/doctor-{secrets.token_hex(8)}"
    folder = Path(unquote(probed.removeprefix("file://"))) if probed.startswith("file://") else None
    is_new = folder is not None and not folder.parent.exists()
    try:
        if folder is not None:
            folder.parent.mkdir(exist_ok=True)  # no more than `farflung launch` makes
            folder.mkdir()
            transport_at(probed)  # tries out whether the file system has what a board needs
        return _measure(objects_at(probed).patient(timeout_s / 4), address)
    except (Unreachable, ConfigError, OSError) as error:
        return unknown(str(error), f"meet: {error} Look at its name, your credentials and the way to it.")
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            if is_new:
                with suppress(OSError):  # others have come meanwhile
                    folder.parent.rmdir()


def _measure(board: ObjectBoard, address: str) -> Found:
    small, large = b"1" * 100, secrets.token_bytes(LARGE_BYTES)
    todo = []
    keys = [*(f"small/{number}" for number in range(_TIMES)), "large", "once"]
    try:
        put_s = median(_seconds(lambda key=key: board.put(key, small)) for key in keys[:_TIMES])  # type: ignore[misc]
        get_s = median(_seconds(lambda key=key: board.get(key)) for key in keys[:_TIMES])  # type: ignore[misc]
        list_s = median(_seconds(lambda: board.list("small/")) for _ in range(_TIMES))
        written = LARGE_BYTES / _seconds(lambda: board.put("large", large))
        read = LARGE_BYTES / _seconds(lambda: board.get("large"))
        is_whole = board.get("large") == large
        creates_once = board.put_new("once", b"1") and not board.put_new("once", b"2")
    finally:
        try:
            for key in keys:
                board.patient(0).delete(key)
        except Unreachable as error:  # after which the others would fail too
            todo.append(f"meet: {error} Replicas delete what they have read.")
    if not creates_once:
        why = f"meet: {address} overwrites objects that are to be created only if there are none"
        todo.append(f"{why}, so several replicas would take themselves for the one that decides. Use another store.")
    if not is_whole:
        todo.append(f"meet: {address} gave back other bytes than were written.")
    figures = {"address": address, "put_s": put_s, "get_s": get_s, "list_s": list_s, "creates_once": creates_once}
    lines = (
        f"{address}",
        f"put {in_seconds(put_s)}, get {in_seconds(get_s)}, list {in_seconds(list_s)}",
        f"4 MB written at {in_bytes(written)}/s, read at {in_bytes(read)}/s",
        f"creates once: {'yes' if creates_once else 'no'}",
    )
    figures |= {"write_bytes_per_s": written, "read_bytes_per_s": read}
    return Found("\n".join(lines), figures, tuple(todo))


def _seconds(request: Callable[[], object]) -> float:
    began = time.perf_counter()
    request()
    return time.perf_counter() - began
