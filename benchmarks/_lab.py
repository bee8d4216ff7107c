# SPDX-License-Identifier: Apache-2.0
"""A slow network on one machine: a namespace for each of two ranks, and a line of a given rate and delay. As root.

Without a delay the line is a veth pair that the kernel shapes (`tc qdisc ... tbf`). With one it is a pair of tun
devices and a process that carries their packets across: many kernels have no `netem`.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import select
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from typing import Any

import torch.distributed as dist

DEVICE = "farflung"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_SPACES = tuple(f"farflung-lab-{os.getpid()}-{rank}" for rank in range(2))  # several benchmarks may run at a time
_MTU = 9000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_BURST_S = 0.002  # of sending at full rate that a line may have saved up


def is_possible() -> bool:
    """Whether this process may make namespaces here."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None


@contextmanager
def line(megabits: float | None, rtt_s: float = 0.0) -> Iterator[None]:
    """Keep two namespaces joined by a line for the length of a block.

    Args:
        megabits: a second, in each direction; None leaves it as fast as it is.
        rtt_s: there and back.
    """
    with ExitStack() as stack:
        for space in _SPACES:
            _ip("netns", "add", space)
            stack.callback(subprocess.run, ["ip", "netns", "del", space], capture_output=True)
            _ip("-n", space, "link", "set", "lo", "up")
        if rtt_s:
            assert megabits is not None, "a line with a delay needs a rate"
            stack.enter_context(_carried(megabits, rtt_s))
        else:
            _joined(megabits)
        yield


def run_pair(program: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> list[str]:
    """Run `program` once in each namespace as ranks 0 and 1 of 2, and return what they printed."""
    ranks = []
    for rank, space in enumerate(_SPACES):
        variables = {**os.environ, **environ, "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        variables |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29577", "GLOO_SOCKET_IFNAME": DEVICE}
        command = ["ip", "netns", "exec", space, *program]
        ranks.append(subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True))
    try:
        printed = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{program[-1]}: the ranks ended with {[rank.returncode for rank in ranks]}")
    return printed


def bytes_out() -> int:
    """Return what the interface of this namespace has sent so far."""
    with open(f"/sys/class/net/{DEVICE}/statistics/tx_bytes", encoding="ascii") as file:
        return int(file.read())


def go_home() -> None:
    """End this rank once the other one is as far; at once, as DDP's reducer may wait for a thread that waits for it."""
    dist.barrier()
    os._exit(0)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _joined(megabits: float | None) -> None:
    first, second = _SPACES
    _ip("link", "add", DEVICE, "netns", first, "type", "veth", "peer", "name", DEVICE, "netns", second)
    for space, address in zip(_SPACES, ADDRESSES, strict=True):
        _up(space, address)
    if megabits is not None:
        shape_line(megabits)


def shape_line(megabits: float) -> None:
    """Give the line without a delay another rate, in each direction."""
    for space in _SPACES:
        shape = ["root", "tbf", "rate", f"{megabits}mbit", "burst", f"{max(64, megabits / 4):g}kb", "latency", "400ms"]
        subprocess.run(["tc", "-n", space, "qdisc", "replace", "dev", DEVICE, *shape], check=True)


def _up(space: str, address: str) -> None:
    _ip("-n", space, "addr", "add", f"{address}/24", "dev", DEVICE)
    _ip("-n", space, "link", "set", DEVICE, "up")


@contextmanager
def _carried(megabits: float, rtt_s: float) -> Iterator[None]:
    ends = [_tun(space) for space in _SPACES]
    for space, address in zip(_SPACES, ADDRESSES, strict=True):
        _ip("-n", space, "link", "set", DEVICE, "mtu", str(_MTU))
        _up(space, address)
    carrier: Any = get_context("fork").Process(target=_carry, args=(ends, megabits, rtt_s / 2), daemon=True)
    carrier.start()
    try:
        yield
    finally:
        carrier.kill()
        carrier.join()
        for end in ends:
            os.close(end)


def _tun(space: str) -> int:
    """Open a tun device and move it to a namespace, where it stays joined to the returned descriptor."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    _ip("link", "set", DEVICE, "netns", space)
    return end


def _carry(ends: list[int], megabits: float, delay_s: float) -> None:
    """Carry packets across: each leaves when those before it have left, and arrives `delay_s` later."""
    per_byte = 8 / (megabits * 1e6)
    free = [0.0, 0.0]  # when each direction has sent all that it was given
    under_way: list[tuple[float, int, int, bytes]] = []
    numbers = itertools.count()
    while True:
        wait = max(0.0, under_way[0][0] - time.perf_counter()) if under_way else 1.0
        readable, _, _ = select.select(ends, [], [], wait)
        now = time.perf_counter()
        for end in readable:
            side = ends.index(end)
            with suppress(BlockingIOError):
                for _ in range(16):
                    packet = os.read(end, _MTU + 100)
                    free[side] = max(free[side], now - _BURST_S) + len(packet) * per_byte
                    heapq.heappush(under_way, (free[side] + delay_s, next(numbers), 1 - side, packet))
        while under_way and under_way[0][0] <= time.perf_counter():
            _, _, side, packet = heapq.heappop(under_way)
            with suppress(BlockingIOError, OSError):  # a full queue loses packets, as real ones do
                os.write(ends[side], packet)
