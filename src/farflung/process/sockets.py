# SPDX-License-Identifier: Apache-2.0
"""The store of a run, which listens at one address alone; and the address of this machine for another one."""

from __future__ import annotations

import resource
import socket
from contextlib import suppress
from typing import Any

_OPEN_FILES = 65_536  # enough for many strangers; some programs ask each number for a file


def allow_connections() -> None:
    """Raise the limit of open files of this process, and of those it starts, as far as it may.

    Whoever reaches a port can connect there and stay silent. gloo ends the process where no file is left for one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def address_on_route_to(address: str) -> str:
    """Return this machine's own address on the route to an IP address. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at one address, and nowhere else; port 0 takes any free one."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=4096)


def serve_store(host: str, port: int, listen: str | None = None, **options: Any) -> Any:
    """Return a `TCPStore` that this process serves at `port` of one address, and nowhere else.

    Args:
        host: as others call this machine.
        port: 0 takes any free one.
        listen: a name or an address of this machine; None: `host`.
        options: those of `TCPStore`.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # here, as the launcher's command needs none

    listener = listening_socket(listen or host, port)
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, master_listen_fd=listener.detach(), **options)
