# SPDX-License-Identifier: Apache-2.0
"""Why does an all-reduce over many TCP connections take longer than a slow line needs?

Four namespaces on a bridge, the egress of each shaped by `tc tbf` with a queue of 50 ms, packets of 9,000 bytes, CUBIC:
the lines of the foreign measurements in tests/cost. Around a ring go slices of 1 MiB on two channels, as those of NCCL:
a node sends the next one once the last but one has come whole, and spreads each over the channel's connections (16 is
NCCL's number on AWS). Nothing is computed, so what a line needs is bytes over rate. As root.

python benchmarks/bench_connections.py [--rounds 3] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

from _measure import report, seeded

SEED = 0
NODES, CHANNELS, AHEAD, SLICE, MTU, PORT = 4, 2, 2, 2**20, 9000, 5000
SPACES = [f"farflung-ring-{node}" for node in range(NODES)]
ADDRESSES = [f"10.78.0.{node + 1}" for node in range(NODES)]
MEGABITS, CONNECTIONS, SECONDS = (50, 200), (1, 4, 16), 8  # of each channel; and what a line needs for a round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="append to benchmarks/results/connections.jsonl")
    parser.add_argument("--node", type=int, nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node:
        print(json.dumps(list(Node(*options.node[:2]).rounds(*options.node[2:]))), flush=True)
        return
    seeded(SEED)
    figures: dict[str, Any] = {}
    for megabits in MEGABITS:
        slices = round(SECONDS * megabits * 1e6 / 8 / SLICE / CHANNELS)
        needed_s = CHANNELS * slices * SLICE * 8 / (megabits * 1e6)
        for connections in CONNECTIONS:
            with ring(megabits):
                took, dropped = measured(connections, slices, options.rounds)
            row = {"of_what_the_line_needs": round(median(took) / needed_s, 3), "packets_dropped": dropped}
            figures[f"{megabits} Mbit/s, {connections} a channel"] = row
    write_to = "connections.jsonl" if options.write else None
    report(__doc__.splitlines()[0], figures, seed=SEED, write_to=write_to, rounds=options.rounds)


def measured(connections: int, slices: int, rounds: int) -> tuple[list[float], int]:
    """Return how many seconds each round took, and how many packets the first node's queue has dropped."""
    words = [sys.executable, __file__, "--node"]
    numbers = [str(number) for number in (connections, slices, rounds)]
    nodes = [
        subprocess.Popen(["ip", "netns", "exec", space, *words, str(node), *numbers], stdout=subprocess.PIPE, text=True)
        for node, space in enumerate(SPACES)
    ]
    printed = [node.communicate(timeout=600)[0] for node in nodes]
    command = ["tc", "-s", "-n", SPACES[0], "qdisc", "show", "dev", "ring"]
    counts = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(printed[0]), int(counts.partition("dropped ")[2].partition(",")[0])


class Node:
    """One node of the ring, which sends to the next one and receives from the one before."""

    def __init__(self, node: int, connections: int) -> None:
        self._piece = SLICE // connections
        listening = socket.create_server((ADDRESSES[node], PORT), backlog=256)
        keys = [(channel, number) for channel in range(CHANNELS) for number in range(connections)]
        self._outs = {key: self._connected(ADDRESSES[(node + 1) % NODES], key) for key in keys}
        self._ins: dict[tuple[int, int], socket.socket] = {}
        for _ in keys:
            end, _ = listening.accept()
            channel, number = end.recv(2, socket.MSG_WAITALL)
            self._ins[channel, number] = end
        for end in (*self._outs.values(), *self._ins.values()):
            end.setblocking(False)
        self._got, self._put = dict.fromkeys(keys, 0), dict.fromkeys(keys, 0)  # bytes

    @staticmethod
    def _connected(address: str, key: tuple[int, int]) -> socket.socket:
        while True:
            end = socket.socket()
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
            try:
                end.connect((address, PORT))
            except OSError:
                time.sleep(0.1)
                continue
            end.sendall(bytes(key))
            return end

    def rounds(self, slices: int, rounds: int) -> Iterator[float]:
        """Yield the seconds of each round: until so many slices have come and are sent on each channel."""
        waiting = selectors.DefaultSelector()
        for key, end in self._ins.items():
            waiting.register(end, selectors.EVENT_READ, key)
        into, zeros = memoryview(bytearray(self._piece)), bytes(self._piece)
        for number in range(rounds):
            begun, first = time.perf_counter(), number * slices
            while min(*self._got.values(), *self._put.values()) < (first + slices) * self._piece:
                may = [min(slices, self._whole(channel) - first + AHEAD) + first for channel in range(CHANNELS)]
                for key, end in self._outs.items():
                    wants, is_in = self._put[key] < may[key[0]] * self._piece, end in waiting.get_map()
                    if wants and not is_in:
                        waiting.register(end, selectors.EVENT_WRITE, key)
                    elif is_in and not wants:
                        waiting.unregister(end)
                for ready, _ in waiting.select(5):
                    key, end = ready.data, ready.fileobj
                    if ready.events == selectors.EVENT_READ:
                        self._got[key] += end.recv_into(into)
                    else:
                        left = may[key[0]] * self._piece - self._put[key]
                        self._put[key] += end.send(zeros[: min(left, self._piece)])
            yield time.perf_counter() - begun
        time.sleep(2)  # the last bytes are on their way

    def _whole(self, channel: int) -> int:
        """Return how many slices have come whole."""
        return min(count for key, count in self._got.items() if key[0] == channel) // self._piece


@contextmanager
def ring(megabits: int) -> Iterator[None]:
    """Keep a bridge of namespaces for a block, with lines of this rate."""
    with ExitStack() as stack:

        def ip(*words: str, undo: Sequence[str] = ()) -> None:
            subprocess.run(["ip", *words], check=True)
            if undo:
                stack.callback(subprocess.run, ["ip", *undo], capture_output=True)

        ip("link", "add", "ring-bridge", "type", "bridge", undo=("link", "del", "ring-bridge"))
        ip("link", "set", "ring-bridge", "mtu", str(MTU), "up")
        for node, (space, address) in enumerate(zip(SPACES, ADDRESSES, strict=True)):
            ip("netns", "add", space, undo=("netns", "del", space))
            peer = ("peer", "name", "ring", "mtu", str(MTU), "netns", space)
            ip(
                "link",
                "add",
                f"ring-{node}",
                "mtu",
                str(MTU),
                "type",
                "veth",
                *peer,
                undo=("link", "del", f"ring-{node}"),
            )
            ip("link", "set", f"ring-{node}", "master", "ring-bridge", "up")
            ip("-n", space, "addr", "add", f"{address}/24", "dev", "ring")
            ip("-n", space, "link", "set", "ring", "up")
            shape = ["root", "tbf", "rate", f"{megabits}mbit", "burst", "32768", "latency", "50ms"]
            subprocess.run(["tc", "-n", space, "qdisc", "add", "dev", "ring", *shape], check=True)
        yield


if __name__ == "__main__":
    if os.geteuid() != 0:
        sys.exit("This needs root, which may make namespaces.")
    main()
