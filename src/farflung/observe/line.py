# SPDX-License-Identifier: Apache-2.0
"""Probes of the lines between machines: whether each reaches each, round trips, bandwidth, and how clocks differ.

Machine 0 serves a c10d store, in which each machine writes what it is and where it listens. Then each one in turn
connects to each other one, at any port as gloo does, and writes down what it has measured.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from farflung.base.errors import Unreachable
from farflung.base.words import in_rate, in_seconds, numbered
from farflung.comm.board import Board
from farflung.comm.c10d_transport import C10dTransport
from farflung.comm.threads import start_until_exit
from farflung.observe.probe import Found, unknown
from farflung.process.sockets import serve_store

_PING, _FILL = b"p", b"f"
_TIME, _COUNT = struct.Struct("!d"), struct.Struct("!Qd")
_ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: what was not sent yet is dropped when a connection closes
_PINGS_S = 0.6  # longer than what an earlier measurement has left in the buffers of a line
_FILL_S = 2.0
_SLOW_START = 0.25  # of the time, in which TCP finds out how much the line takes
_BLOCK = bytes(64 * 1024)
_MARGIN_S = 2.0
_POLL_S = 0.02
_MOST_SKEW_S = 1.0


@dataclass(frozen=True)
class Site:
    """A machine's place among those that are measured."""

    rank: int
    size: int
    host: str  # of machine 0, as the others call it
    port: int
    listen: str | None  # the address at which machine 0 serves the store
    address: str  # of this machine, for the others
    interface: str

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]


def measure(site: Site, facts: Mapping[str, str], timeout_s: float) -> Found:
    """Find the other machines, compare `facts` with theirs, and measure the lines between all of them."""
    with ExitStack() as stack:
        try:
            if site.rank == 0:
                _served = serve_store(site.host, site.port, site.listen, wait_for_workers=False)
            listener = stack.enter_context(_listening(site.address))
        except OSError as error:
            why = f"{site.listen or site.address}: {error.strerror}"
            return unknown(why, f"lines: this machine, number {site.rank}, can't listen at {why}.")
        start_until_exit(lambda: _answer_all(listener, timeout_s), "answer the other machines")
        own = {"address": site.address, "port": listener.getsockname()[1], "interface": site.interface, "facts": facts}
        try:
            return _measure(site, own, timeout_s)
        except Unreachable as error:
            at = f"{site.host}:{site.port}"
            why = f"machine {site.rank} does not reach machine 0 at {at}, over {site.interface}"
            fix = "Start the doctor on all machines at about the same time, and open the port in the firewall."
            return unknown(f"{why}. {error}", f"lines: {why} within {in_seconds(timeout_s)}. {fix}")


def _measure(site: Site, own: Mapping[str, Any], timeout_s: float) -> Found:
    board = _meet(site, timeout_s)
    board.put(f"site/{site.rank}", json.dumps(own).encode())
    until = time.monotonic() + timeout_s
    sites = {rank: _read(board, f"site/{rank}", until) for rank in range(site.size)}
    came = {rank: one for rank, one in sites.items() if one is not None}
    measured: dict[str, dict[str, Any]] = {}
    for here, there in permutations(came, 2):
        key = f"{here} -> {there}"
        if here == site.rank:
            line = _line(came[there]["address"], came[there]["port"], timeout_s)
            board.put(key, json.dumps(line).encode())
        found = _read(board, key, time.monotonic() + timeout_s + _MARGIN_S)
        measured[key] = found or {"not_known": f"machine {here} has written nothing about it"}
    board.put(f"done/{site.rank}", b"1")
    if site.rank == 0:
        until = time.monotonic() + timeout_s
        for rank in came:
            _read(board, f"done/{rank}", until)
    return _described(site, came, measured, timeout_s)


def _meet(site: Site, timeout_s: float) -> Board:
    """Return the records of all machines; Unreachable if machine 0 can't be reached for so long."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            board = C10dTransport((site.host, site.port), timeout_s).board.part("doctor")
            board.has(["site/0"])
            return board
        except Unreachable:
            if time.monotonic() >= until:
                raise
        time.sleep(_POLL_S)


def _read(board: Board, key: str, until: float) -> dict[str, Any] | None:
    """Return what a machine has written, None if it has written nothing by then."""
    while True:
        found = board.get(key)
        if found is not None:
            read = json.loads(found)
            return read if isinstance(read, dict) else {}
        if time.monotonic() >= until:
            return None
        time.sleep(_POLL_S)


# ---- one line, from here to there


def _line(address: str, port: int, timeout_s: float) -> dict[str, Any]:
    try:
        with _connected(address, port, timeout_s) as line:
            round_trip_s, skew_s = _ping(line, min(_PINGS_S, timeout_s / 4))
        with _connected(address, port, timeout_s) as line:
            rate = _fill(line, min(_FILL_S, timeout_s / 4), timeout_s)
    except OSError as error:
        return {"unreachable": error.strerror or f"no answer within {in_seconds(timeout_s)}"}
    return {"round_trip_s": round_trip_s, "skew_s": skew_s, "bits_per_s": rate}


def _connected(address: str, port: int, timeout_s: float) -> socket.socket:
    line = socket.create_connection((address, port), timeout_s)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
    return line


def _ping(line: socket.socket, seconds: float) -> tuple[float, float]:
    """Return the shortest round trip, and by how much the other clock is ahead: NTP's rule (RFC 5905), at most half
    that round trip off.
    """
    trips: list[tuple[float, float]] = []
    line.sendall(_PING)
    until = time.monotonic() + seconds
    while time.monotonic() < until or not trips:
        began, sent = time.perf_counter(), time.time()
        line.sendall(_PING)
        (there,) = _TIME.unpack(_received(line, _TIME.size))
        trip_s = time.perf_counter() - began
        trips.append((trip_s, there - (sent + trip_s / 2)))
        time.sleep(_POLL_S)
    return min(trips)


def _fill(line: socket.socket, seconds: float, timeout_s: float) -> float:
    """Send until the other machine has counted for long enough; return the bits a second that arrived there."""
    line.sendall(_FILL + _TIME.pack(seconds))
    until = time.monotonic() + timeout_s
    line.settimeout(_POLL_S)
    while not select.select([line], [], [], 0)[0]:
        if time.monotonic() >= until:
            raise TimeoutError
        with suppress(TimeoutError):  # its buffer is full
            line.send(_BLOCK)
    line.settimeout(timeout_s)
    count, took_s = _COUNT.unpack(_received(line, _COUNT.size))
    return float(8 * count / took_s)


def _received(line: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = line.recv(size - len(found))
        if not more:
            raise ConnectionError(0, "the connection was closed")
        found += more
    return found


# ---- the other end


def _listening(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def _answer_all(listener: socket.socket, timeout_s: float) -> None:
    with suppress(OSError):  # it is closed at the end
        while True:
            line, _ = listener.accept()
            start_until_exit(lambda line=line: _answer(line, timeout_s), "answer a machine")  # type: ignore[misc]


def _answer(line: socket.socket, timeout_s: float) -> None:
    with line, suppress(OSError):
        line.settimeout(timeout_s)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _received(line, 1) == _PING:
            while line.recv(1):
                line.sendall(_TIME.pack(time.time()))
            return
        (seconds,) = _TIME.unpack(_received(line, _TIME.size))
        line.sendall(_COUNT.pack(*_counted(line, seconds)))
        while line.recv(len(_BLOCK)):  # what is still under way: closing now would drop the answer, too
            pass


def _counted(line: socket.socket, seconds: float) -> tuple[int, float]:
    """Return how many bytes arrive, and in how many seconds, once TCP has found out what the line takes."""
    line.recv(len(_BLOCK))
    began = since = time.monotonic()
    count, now = 0, began
    while now < began + seconds or not count:
        size = len(line.recv(len(_BLOCK)))
        now = time.monotonic()
        count += size
        if now < began + _SLOW_START * seconds:
            count, since = 0, now
        if not size:
            raise ConnectionError(0, "the connection was closed")
    return count, now - since


# ---- what it means


def _described(
    site: Site, came: Mapping[int, Mapping[str, Any]], measured: Mapping[str, Mapping[str, Any]], timeout_s: float
) -> Found:
    missing = [rank for rank in range(site.size) if rank not in came]
    lines = [f"machine {rank}: {one['address']} over {one['interface']}" for rank, one in came.items()]
    todo = []
    if missing:
        why = f"{numbered('machine', missing)} did not come within {in_seconds(timeout_s)}"
        lines.append(f"not known: {why}")
        start = "Start the doctor there with the same address and port, and look at routes and firewalls."
        todo.append(f"lines: {why}. {start} More time: --timeout.")
    differing = dict(_differing({rank: one["facts"] for rank, one in came.items()}))
    for name, by_machine in differing.items():
        listed = ", ".join(f"{fact} on machine {rank}" for rank, fact in by_machine.items())
        todo.append(f"versions: {name} is {listed}. Install the same on all machines.")
    for key, one in measured.items():
        lines.append(f"{key}: {_in_words(one)}")
        if "unreachable" in one:
            address, reason = came[int(key.rpartition(" ")[2])]["address"], one["unreachable"]
            fix = "gloo and NCCL connect to any port there: look at the firewall, and at --network_interface."
            todo.append(f"lines: {key}: {address} can't be reached ({reason}). {fix}")
        if abs(one.get("skew_s", 0.0)) > _MOST_SKEW_S + one.get("round_trip_s", 0.0):
            ahead = f"the second clock is {one['skew_s']:+.3g} s ahead"
            todo.append(f"lines: {key}: {ahead}. Have NTP keep both, or logs can't be compared.")
    figures = {"port": site.port, "machines": came, "missing": missing, "lines": measured, "differing": differing}
    return Found("\n".join([*lines, *_table(differing)]), figures, tuple(todo))


def _in_words(one: Mapping[str, Any]) -> str:
    why = one.get("unreachable") or one.get("not_known")
    if why is not None:
        return f"not known: {why}"
    clock = f"clock {one['skew_s']:+.2g} s (give or take {in_seconds(one['round_trip_s'] / 2)})"
    return f"{in_rate(one['bits_per_s'])}, round trip {in_seconds(one['round_trip_s'])}, {clock}"


def _differing(facts: Mapping[int, Mapping[str, str]]) -> Iterator[tuple[str, dict[int, str]]]:
    for name in dict.fromkeys(name for one in facts.values() for name in one):
        by_machine = {rank: one.get(name, "not known") for rank, one in facts.items()}
        if len(set(by_machine.values())) > 1:
            yield name, by_machine


def _table(differing: Mapping[str, Mapping[int, str]]) -> list[str]:
    rows = [[name, *by_machine.values()] for name, by_machine in differing.items()]
    if not rows:
        return ["versions: the same on all machines that came"]
    ranks = next(iter(differing.values()))
    return [
        " ".join(f"{cell:<12}" for cell in row).rstrip()
        for row in [["differs", *(f"machine {rank}" for rank in ranks)], *rows]
    ]
