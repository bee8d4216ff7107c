# SPDX-License-Identifier: Apache-2.0
"""The address of a run: `host:port` of a store that a launcher serves, or `file:///path` of a folder."""

from __future__ import annotations

from urllib.parse import unquote

from farflung.comm.c10d_transport import PATIENCE_S, C10dTransport
from farflung.comm.folder import FolderTransport
from farflung.comm.transport import Transport


def transport_at(address: str, patience_s: float = PATIENCE_S) -> Transport:
    """Return how replicas meet at an address; ConfigError where it is a folder that can't be used."""
    if address.startswith("file://"):
        return FolderTransport(unquote(address.removeprefix("file://")), patience_s)
    host, _, port = address.rpartition(":")
    return C10dTransport((host.strip("[]"), int(port)), patience_s)
