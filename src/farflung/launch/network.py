# SPDX-License-Identifier: Apache-2.0
"""The network as the launcher sees it: host names, ports, and the interface that leads to the main machine.

gloo announces the address that this machine's host name stands for, which is a loopback address on many systems. So the
launcher names the interface to use: that of the route to the main machine.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from functools import partial

from farflung.base.errors import ConfigError
from farflung.base.events import Kind, record
from farflung.comm.patience import aloud, interruptible, waiting
from farflung.config import environ
from farflung.config.launch import DEFAULT_PORT, LaunchSettings
from farflung.process.sockets import address_on_route_to

NAME_WAIT_S = 60.0  # for the name of another machine, which may start later than this one
_ASK_AGAIN_S = 1.0
# What may become a host: its last part is no number, as an address's would be.
_HOST_NAME = re.compile(r"(?:[\w-]+\.)*(?!\d+\.?$)[\w-]+\.?")


@dataclass(frozen=True)
class Interface:
    """A network interface and one of its addresses."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


def choose_interface(settings: LaunchSettings, host: str) -> Interface:
    """Return the interface through which this machine talks to the others: the one named by the flag, else the one in
    GLOO_SOCKET_IFNAME, else that of the route to `host`, the main machine. Raises ConfigError if there is none.
    """
    there = interfaces()
    wanted = settings.network_interface
    listed = ", ".join(str(one) for k, one in enumerate(there) if one.name not in [other.name for other in there[:k]])
    if wanted is not None:
        found = next((one for one in there if one.name == wanted), None)
        if found is None:
            raise ConfigError(
                f"network_interface is {wanted!r}, and this machine has no such interface; it has {listed}."
            )
        return found
    chosen = environ.text("GLOO_SOCKET_IFNAME")
    if chosen:  # gloo takes the first of several
        address = next((one.address for one in there if one.name == chosen.partition(",")[0]), "")
        return Interface(chosen, address or "GLOO_SOCKET_IFNAME")
    address = resolve_host(host)
    if is_loopback(address) and not (host == "localhost" or is_loopback(host)):
        outward = [one for one in there if not is_loopback(one.address)]
        if settings.machine_rank == 0 and len({one.name for one in outward}) == 1:
            return outward[0]
        raise ConfigError(
            f"is {host!r}, which means {address} on this machine, where others can't reach it. Give machine 0's "
            f"address on the network instead; this machine, number {settings.machine_rank}, has {listed}.",
            "main_process_ip",
        )
    here = _address_towards(address)
    found = next((one for one in there if one.address == here), None)
    if found is None:
        raise ConfigError(
            f"The route from this machine to {host} starts at {here}, which belongs to none of its interfaces "
            f"({listed}). Name one with --network_interface."
        )
    return found


def address_towards(host: str, interface: Interface) -> str:
    """Return the address of this machine, number 0, that the others reach as `host`: that of the route to it.

    If `host` means a loopback address here, it is the interface's.
    """
    address = resolve_host(host)
    return interface.address if is_loopback(address) else _address_towards(address)


def _address_towards(address: str) -> str:
    """Return this machine's own address on the route to `address`. Nothing is sent."""
    try:
        return address_on_route_to(address)
    except OSError as error:
        raise ConfigError(
            f"This machine has no route to main_process_ip ({address}): {error.strerror}. Check the address, and "
            "that the network is up."
        ) from None


def interfaces() -> list[Interface]:
    """Return the interfaces of this machine, once for each of their addresses.

    Whether one is up now is not asked: for a second after it comes up, the kernel still says that it isn't.
    """
    import psutil  # type: ignore[import-untyped]  # here, as it takes the command 15 ms

    return [
        Interface(name, address.address.partition("%")[0])  # fe80::1%eth0 is fe80::1
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]


def loopback_interface() -> str:
    """Return the name of the loopback interface: `lo`, or `lo0`."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def is_loopback(address: str) -> bool:
    """Return whether `address` is one, and leads back to the machine itself."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def resolve_host(host: str, wait_s: float = 0.0) -> str:
    """Return the address of `host`, a name or an address, as this machine sees it.

    A name that does not resolve yet is asked for again for `wait_s` seconds: clusters such as Kubernetes publish the
    name of a machine when it has started. Raises ConfigError when they are over, and at once for what is no name.
    """
    reason, may_come = "", False
    for waited_s in waiting(_ASK_AGAIN_S, wait_s, aloud("this machine", f"for the name of machine 0, {host}")):
        try:
            ask = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
            return str(interruptible(ask, "ask for a name")[0][4][0])
        except (OSError, UnicodeError) as error:
            reason = str(error.strerror) if isinstance(error, OSError) else "no host has such a name"
            may_come = isinstance(error, socket.gaierror) and _HOST_NAME.fullmatch(host) is not None
        if not may_come:
            break
        if waited_s == 0 and wait_s:
            record(Kind.NOTE, message=f"waiting up to {wait_s:.0f} s for the name of machine 0, {host}: {reason}")
    even = f" even after {wait_s:.0f} s" if may_come and wait_s else ""
    raise ConfigError(
        f"is {host!r}, which this machine can't resolve{even}: {reason}. Give the name or the address of "
        "machine 0 alone, such as node0 or 10.0.0.1; the port has a setting of its own.",
        "main_process_ip",
    )


def refuse_busy_port(port: int) -> None:
    """Raise a ConfigError when some program listens on `port` of this machine already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"Port {port} can't be used here: {error.strerror}. Choose another one with --main_process_port, or "
                "leave it out on a single machine to get a free one."
            ) from None


def is_port_in_use(port: int | None = None) -> bool:
    """Return whether some program of this machine listens on `port`, by default on torch's 29500."""
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", DEFAULT_PORT if port is None else port)) == 0


def get_free_port() -> int:
    """Return a port of this machine that no program uses now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
