# SPDX-License-Identifier: Apache-2.0
"""The address of a run: `host:port` of a store that a launcher serves, `file:///path` of a folder, or a bucket's.

Launchers give their replicas the address of a part of it, `file:///path#run-...`: see `run_record`.
"""

from __future__ import annotations

import re
from importlib import import_module
from types import ModuleType
from urllib.parse import unquote

from farflung.base.errors import ConfigError
from farflung.comm.c10d_transport import PATIENCE_S, C10dTransport
from farflung.comm.folder import FolderTransport, folder_at
from farflung.comm.object_group import ObjectTransport
from farflung.comm.objects import ObjectBoard
from farflung.comm.run_record import PART
from farflung.comm.transport import Transport

_IN_PART = re.compile(rf"(.*)#({PART})")


def transport_at(address: str, patience_s: float = PATIENCE_S) -> Transport:
    """Return how replicas meet at an address; ConfigError if it is a folder or a bucket that can't be used."""
    if "://" in address:
        return transport_of(address, patience_s)
    host, _, port = address.rpartition(":")
    return C10dTransport((host.strip("[]"), int(port)), patience_s)


def transport_of(address: str, patience_s: float = PATIENCE_S) -> ObjectTransport:
    """Return the same for an address of objects, or of a part of it."""
    found = _IN_PART.fullmatch(address)
    where, part = found.groups() if found else (address, "")
    if path := _path(where):
        there: ObjectTransport = FolderTransport(path, patience_s)
    else:
        there = _of_buckets(where).BucketTransport(where, patience_s)
    return there.in_part(part) if part else there


def objects_at(address: str) -> ObjectBoard:
    """Return what lies at an address, for those that may read; ConfigError if it is no folder and no bucket."""
    if path := _path(address):
        return folder_at(path)
    if "://" not in address or address.startswith("tcp://"):
        raise ConfigError(
            f"{address} is not the address of a folder or a bucket, such as file:///path or s3://bucket/run."
        )
    board: ObjectBoard = _of_buckets(address).bucket_at(address)
    return board


def _path(address: str) -> str:
    return unquote(address.removeprefix("file://")) if address.startswith("file://") else ""


def _of_buckets(address: str) -> ModuleType:
    try:
        return import_module("farflung.comm.object_store")
    except ImportError:
        raise ConfigError(f"To meet at {address} needs obstore: pip install 'farflung[bucket]'.") from None
