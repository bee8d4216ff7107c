# SPDX-License-Identifier: Apache-2.0
"""Sockets that listen at one address alone; torch's store listens on every interface unless it is given one."""

from __future__ import annotations

import socket


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at `port` of the address that `host` stands for, and nowhere else.

    Args:
        host: a name or an address of this machine.
        port: 0 takes any free one.

    Raises:
        OSError: the address is not one of this machine's, or the port is in use.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=4096)
