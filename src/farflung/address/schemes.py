# SPDX-License-Identifier: Apache-2.0
"""The address of a run: `host:port` of a store that a launcher serves, `file:///path` of a folder, or a bucket's.

Launchers give their replicas the address of a part of it, `file:///path#run-...`: see `run_record`.
"""

from __future__ import annotations

import re
from importlib import import_module
from types import ModuleType
from urllib.parse import unquote

from farflung.address.c10d_transport import C10dTransport
from farflung.address.folder import FolderTransport, folder_at
from farflung.address.object_group import ObjectTransport
from farflung.address.objects import PATIENCE_S, ObjectBoard
from farflung.address.seal import PART, Seal
from farflung.address.transport import Transport
from farflung.base.errors import ConfigError

_IN_PART = re.compile(rf"(.*)#({PART})")


def transport_at(address: str, patience_s: float = PATIENCE_S, seal: Seal | None = None) -> Transport:
    """Return how replicas meet at an address; ConfigError if it is a folder or a bucket that can't be used.

    Args:
        seal: of the run's key; None: it has none.
    """
    if "://" in address:
        return transport_of(address, patience_s, seal)
    host, _, port = address.rpartition(":")
    return C10dTransport((host.strip("[]"), int(port)), patience_s, seal)


def transport_of(address: str, patience_s: float = PATIENCE_S, seal: Seal | None = None) -> ObjectTransport:
    """Return the same for an address of objects, or of a part of it."""
    found = _IN_PART.fullmatch(address)
    where, part = found.groups() if found else (address, "")
    seal = _within(where, seal)
    if path := _path(where):
        there: ObjectTransport = FolderTransport(path, patience_s, seal)
    else:
        there = _of_buckets(where).BucketTransport(where, patience_s, seal)
    return there.in_part(part) if part else there


def objects_at(address: str, seal: Seal | None = None, retries: int = 0) -> ObjectBoard:
    """Return the objects at an address, which nothing has been asked of; ConfigError if it is no folder and no bucket.

    Args:
        retries: of each request to a bucket, before the whole object is read or written again.
    """
    seal = _within(address, seal)
    if path := _path(address):
        return folder_at(path, seal=seal)
    if "://" not in address or address.startswith("tcp://"):
        raise ConfigError(
            f"{address} is not the address of a folder or a bucket, such as file:///path or s3://bucket/run."
        )
    board: ObjectBoard = _of_buckets(address).bucket_at(address, seal=seal, retries=retries)
    return board


def _within(address: str, seal: Seal | None) -> Seal | None:
    """Return the seal for an address, which may be that of a part: its objects were sealed from the root."""
    last = address.rstrip("/").rpartition("/")[2]
    return seal.below(last) if seal is not None and re.fullmatch(PART, last) else seal


def _path(address: str) -> str:
    return unquote(address.removeprefix("file://")) if address.startswith("file://") else ""


def _of_buckets(address: str) -> ModuleType:
    try:
        return import_module("farflung.address.object_store")
    except ImportError:
        raise ConfigError(f"{address} needs obstore: pip install 'farflung[bucket]'.") from None
