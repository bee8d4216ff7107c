# SPDX-License-Identifier: Apache-2.0
"""The address of a run: `host:port` of a store that a launcher serves, `file:///path` of a folder, or a bucket's."""

from __future__ import annotations

from importlib import import_module
from urllib.parse import unquote

from farflung.base.errors import ConfigError
from farflung.comm.c10d_transport import PATIENCE_S, C10dTransport
from farflung.comm.folder import FolderTransport
from farflung.comm.transport import Transport


def transport_at(address: str, patience_s: float = PATIENCE_S) -> Transport:
    """Return how replicas meet at an address; ConfigError where it is a folder or a bucket that can't be used."""
    if address.startswith("file://"):
        return FolderTransport(unquote(address.removeprefix("file://")), patience_s)
    if "://" in address:
        try:
            of_buckets = import_module("farflung.comm.object_store")  # which may not be installed
        except ImportError:
            raise ConfigError(f"To meet at {address} needs obstore: pip install 'farflung[bucket]'.") from None
        bucket: Transport = of_buckets.BucketTransport(address, patience_s)
        return bucket
    host, _, port = address.rpartition(":")
    return C10dTransport((host.strip("[]"), int(port)), patience_s)
