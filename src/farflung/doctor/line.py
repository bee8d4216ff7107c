# SPDX-License-Identifier: Apache-2.0
"""Probes of the lines between machines: whether each reaches each, round trips, bandwidth, and how clocks differ.

Machine 0 serves a c10d store, in which each machine writes what it is, where it listens, and which others it reaches
there. Then each pair in turn makes a group of gloo's, as replicas do, and measures what training would see of the line.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist

from farflung.address.board import Board
from farflung.address.c10d_transport import C10dTransport
from farflung.address.keyed_store import KeyedServer
from farflung.base.errors import Unreachable
from farflung.base.torch_internals import bare_group
from farflung.base.words import in_rate, in_seconds, numbered
from farflung.comm.c10d_group import transport_said
from farflung.comm.patience import waiting
from farflung.config import environ
from farflung.doctor.probe import Found, unknown
from farflung.process.sockets import listening_socket

_PINGS_S = 0.6  # longer than what an earlier measurement has left in the buffers of a line
_FILL_S = 1.0  # TCP has found out by then how much the line takes
_FIRST_BYTES, _MOST_BYTES = 1 << 14, 1 << 28
_MARGIN_S = 2.0
_POLL_S = 0.02
_MOST_SKEW_S = 1.0


@dataclass(frozen=True)
class Endpoint:
    """A machine's place among those that are measured."""

    rank: int
    size: int
    host: str  # of machine 0, as the others call it
    port: int
    listen: str | None  # the address at which machine 0 serves the store
    address: str  # of this machine, for the others
    interface: str


def measure(site: Endpoint, facts: Mapping[str, str], timeout_s: float) -> Found:
    """Find the other machines, compare `facts` with theirs, and measure the lines between all of them."""
    with ExitStack() as stack:
        try:
            if site.rank == 0:
                server = KeyedServer(listening_socket(site.listen or site.host, site.port), site.host, None)
                stack.callback(server.close)
            # At any port, as gloo does. The system accepts connections, so nobody has to answer.
            listener = stack.enter_context(listening_socket(site.address, 0))
        except OSError as error:
            why = f"{site.listen or site.address}: {error.strerror}"
            return unknown(why, f"lines: this machine, number {site.rank}, can't listen at {why}.")
        own = {"address": site.address, "port": listener.getsockname()[1], "interface": site.interface, "facts": facts}
        stack.enter_context(environ.patched({"GLOO_SOCKET_IFNAME": site.interface}))
        try:
            return _measure(site, own, timeout_s)
        except Unreachable as error:
            at = f"{site.host}:{site.port}"
            why = f"machine {site.rank} does not reach machine 0 at {at}, over {site.interface}"
            fix = "Start the doctor on all machines at about the same time, and open the port in the firewall."
            return unknown(f"{why}. {error}", f"lines: {why} within {in_seconds(timeout_s)}. {fix}")


def _measure(site: Endpoint, own: dict[str, Any], timeout_s: float) -> Found:
    transport = _meet(site, timeout_s)
    board = transport.board.part("doctor")
    came = _from_all(board, "site", site, own, time.monotonic() + timeout_s)
    others = [rank for rank in came if rank != site.rank]
    mine = {str(rank): _refusal(came[rank]["address"], came[rank]["port"], timeout_s) for rank in others}
    until = time.monotonic() + timeout_s * len(came) + _MARGIN_S
    refusals = _from_all(board, "refusals", site, mine, until)
    measured: dict[str, dict[str, Any]] = {}
    for here, there in permutations(came, 2):
        key = f"{here} -> {there}"
        refusal = refusals.get(here, {}).get(str(there))
        if refusal is not None:
            measured[key] = {"unreachable": refusal}
            continue
        if site.rank in (here, there):
            line = _line(transport, key, int(site.rank == there), timeout_s)
            if site.rank == here:
                board.put(key, json.dumps(line).encode())
        until = time.monotonic() + 2 * timeout_s + _MARGIN_S
        measured[key] = _read(board, key, until) or {"not_known": f"machine {here} has written nothing about it"}
    if site.rank == 0:  # its store ends with it
        _from_all(board, "done", site, {}, time.monotonic() + timeout_s)
    else:
        board.put(f"done/{site.rank}", b"{}")
    return _described(site, came, measured, timeout_s)


def _meet(site: Endpoint, timeout_s: float) -> C10dTransport:
    """Return the store of all machines; Unreachable if machine 0 can't be reached for so long."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            transport = C10dTransport((site.host, site.port), timeout_s)
            transport.board.has(["doctor/site/0"])
            return transport
        except Unreachable:
            if time.monotonic() >= until:
                raise
        time.sleep(_POLL_S)


def _from_all(board: Board, name: str, site: Endpoint, row: dict[str, Any], until: float) -> dict[int, dict[str, Any]]:
    """Write this machine's row; return the rows of all that have written theirs by then."""
    board.put(f"{name}/{site.rank}", json.dumps(row).encode())
    rows = {rank: _read(board, f"{name}/{rank}", until) for rank in range(site.size)}
    return {rank: found for rank, found in rows.items() if found is not None}


def _read(board: Board, key: str, until: float) -> dict[str, Any] | None:
    """Return what a machine has written, None if it has written nothing by then."""
    for _ in waiting(_POLL_S, until - time.monotonic()):
        if (found := board.get(key)) is not None:
            read = json.loads(found)
            return read if isinstance(read, dict) else {}
    return None


# ---- one line, from here to there


def _refusal(address: str, port: int, timeout_s: float) -> str | None:
    """Return why a machine can't be reached at a port; None if it can."""
    try:
        socket.create_connection((address, port), timeout_s).close()
    except OSError as error:
        return error.strerror or f"no answer within {in_seconds(timeout_s)}"
    return None


def _line(transport: C10dTransport, key: str, rank: int, timeout_s: float) -> dict[str, Any]:
    """Measure the line from rank 0 of a pair to rank 1, or answer there; return what is known of it."""
    try:
        group = bare_group(transport.board.lend(f"doctor/{key}"), rank, 2, timeout_s)
        pair = _Pair(group, 1 - rank, timedelta(seconds=timeout_s))
        return pair.answer() if rank else pair.measure(timeout_s)
    except RuntimeError as error:
        return {"unreachable": transport_said(error)}


class _Pair:
    """One of two machines: the first sends bytes, the other answers with its clock once they have arrived."""

    def __init__(self, group: dist.ProcessGroup, other: int, timeout: timedelta) -> None:
        self._send: Callable[..., Any] = lambda x: group.send([x], other, 0).wait(timeout)
        self._receive: Callable[..., Any] = lambda x: group.recv([x], other, 0).wait(timeout)
        self._number = torch.zeros(1, dtype=torch.float64)

    def measure(self, timeout_s: float) -> dict[str, Any]:
        until, trips = time.monotonic() + min(_PINGS_S, timeout_s / 4), [self._trip(torch.empty(0))]
        while time.monotonic() < until:
            time.sleep(_POLL_S)
            trips.append(self._trip(torch.empty(0)))
        round_trip_s, skew_s = min(trips)
        size, took_s = _FIRST_BYTES, 0.0
        while took_s < min(_FILL_S, timeout_s / 4) and size < _MOST_BYTES:
            size *= 2
            took_s, _ = self._trip(torch.empty(size, dtype=torch.uint8))
        self._send(self._number.fill_(-1))
        rate = 8 * size / max(took_s - round_trip_s, 1e-9)
        return {"round_trip_s": round_trip_s, "skew_s": skew_s, "bits_per_s": rate}

    def _trip(self, block: torch.Tensor) -> tuple[float, float]:
        """Return how long it takes until an answer to these bytes is here, and by how much the other clock is ahead.

        That is at most half of that time off: NTP's rule (RFC 5905).
        """
        began, sent = time.perf_counter(), time.time()
        self._send(self._number.fill_(block.numel()))
        if block.numel():
            self._send(block)
        self._receive(self._number)
        trip_s = time.perf_counter() - began
        return trip_s, float(self._number) - (sent + trip_s / 2)

    def answer(self) -> dict[str, Any]:
        while True:
            self._receive(self._number)
            size = int(self._number)
            if size < 0:
                return {}
            if size:
                self._receive(torch.empty(size, dtype=torch.uint8))
            self._send(self._number.fill_(time.time()))


# ---- what it means


def _described(
    site: Endpoint, came: Mapping[int, Mapping[str, Any]], measured: Mapping[str, Mapping[str, Any]], timeout_s: float
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
    if not differing:
        lines.append("versions: the same on all machines that came")
    return Found("\n".join(lines), figures, tuple(todo))


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
