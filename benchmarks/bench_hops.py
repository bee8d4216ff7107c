# SPDX-License-Identifier: Apache-2.0
"""How long does a round of encoded values take in one hop and in two, next to what its bytes need on the line?

With `--bucket`, how long does a round of few values take among many replicas at an address, each of whose answers takes
20 ms? They are threads in virtual time: neither processors nor a server limit them.

Otherwise namespaces on a bridge, the egress of each shaped by `tc tbf`; 14M values in four bits (E3M0), a replica a
namespace. As root.

python benchmarks/bench_hops.py [--replicas 4 8] [--megabits 20] [--bucket] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from _measure import report, seeded

sys.path.insert(0, str(Path(__file__).parent.parent))

from farflung.address.object_group import ObjectGroup
from farflung.cost.model import copies
from farflung.outer import OuterLoop, diloco
from tests.comm.test_objects import Watch
from tests.memory_bucket import memory_board
from tests.virtual_time import virtual_time

BUCKET_ROUNDS = 9
VALUES, ROUNDS, DEVICE, HUB = 14_000_000, 3, "hops", "farflung-hops"
WAYS = {"gather": "gathered", "reduce_scatter": "reduced"}  # and what the cost model calls each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--megabits", type=float, default=20.0)
    parser.add_argument("--bucket", action="store_true")
    parser.add_argument("--write", action="store_true", help="append to benchmarks/results/hops.jsonl")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        print(json.dumps(rounds()), flush=True)
        os._exit(0)
    seeded(0)
    figures: dict[str, Any] = {}
    write_to = ("hops_at_address.jsonl" if options.bucket else "hops.jsonl") if options.write else None
    if options.bucket:
        for size in options.replicas:
            for way, hop_bytes in (("one hop", ObjectGroup.hop_bytes), ("two hops", 0)):
                figures[f"{size} replicas, {way}"] = round(median(at_bucket(size, hop_bytes)), 3)
        report("How many seconds does a round at an address take?", figures, seed=0, write_to=write_to, request_ms=20)
        return
    for size in options.replicas:
        with bridge(size, options.megabits) as spaces:
            took = measured(spaces)
        for way, seconds in took.items():
            payload = diloco(1, codec="e3m0").codec.wire_bytes(VALUES)
            needed_s = copies(WAYS[way], size) * payload * 8 / options.megabits / 1e6
            row = {"seconds": round(median(seconds), 2), "of_what_its_bytes_need": round(median(seconds) / needed_s, 3)}
            figures[f"{size} replicas, {way}"] = row
    report(__doc__.splitlines()[0], figures, seed=0, write_to=write_to, megabits=options.megabits)


def rounds() -> dict[str, list[float]]:
    """Return the seconds of each round of each way, which take turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    models = {way: torch.nn.Linear(VALUES // 1000, 1000, bias=False) for way in WAYS}
    loops = {way: OuterLoop(model, diloco(1, codec="e3m0", exchange=way)) for way, model in models.items()}
    for number in range(ROUNDS + 1):
        for way, outer in loops.items():
            with torch.no_grad():
                models[way].weight.add_(torch.randn(1000, VALUES // 1000), alpha=1e-3)
            dist.barrier()
            began = time.perf_counter()
            outer.step()
            dist.barrier()
            if number:
                took[way].append(time.perf_counter() - began)
    return took


def at_bucket(size: int, hop_bytes: int) -> list[float]:
    """Return the seconds of each round, on the replica that takes longest, with 256 values."""
    board, took = memory_board(0.02), [[0.0] * BUCKET_ROUNDS for _ in range(size)]

    def train(rank: int) -> None:
        model = torch.nn.Linear(16, 16, bias=False)
        with OuterLoop(model, diloco(1), ObjectGroup(board, "group", rank, size, Watch())) as outer:
            for number in range(BUCKET_ROUNDS):
                began = time.monotonic()
                outer.step()
                took[rank][number] = time.monotonic() - began

    with virtual_time(), mock.patch.object(ObjectGroup, "hop_bytes", hop_bytes):
        ranks = [threading.Thread(target=train, args=(rank,)) for rank in range(size)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
    return [max(row) for row in zip(*took, strict=True)]


@contextmanager
def bridge(size: int, megabits: float) -> Iterator[list[str]]:
    """Keep namespaces on a bridge for the length of a block; yield their names."""
    spaces = [f"{HUB}-{rank}" for rank in range(size)]
    with ExitStack() as stack:
        for space in (HUB, *spaces):
            _ip("netns", "add", space)
            stack.callback(subprocess.run, ["ip", "netns", "del", space], capture_output=True)
        _ip("-n", HUB, "link", "add", "bridge", "type", "bridge")
        _ip("-n", HUB, "link", "set", "bridge", "up")
        for rank, space in enumerate(spaces):
            port = f"port{rank}"
            _ip("link", "add", DEVICE, "netns", space, "type", "veth", "peer", "name", port, "netns", HUB)
            _ip("-n", HUB, "link", "set", port, "master", "bridge", "up")
            _ip("-n", space, "addr", "add", f"10.79.0.{rank + 1}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _ip("-n", space, "link", "set", device, "up")
            shape = ["root", "tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "400ms"]
            subprocess.run(["tc", "-n", space, "qdisc", "replace", "dev", DEVICE, *shape], check=True)
        yield spaces


def measured(spaces: list[str]) -> dict[str, list[float]]:
    """Return what the first rank has measured."""
    known = {**os.environ, "WORLD_SIZE": str(len(spaces)), "MASTER_ADDR": "10.79.0.1", "MASTER_PORT": "29579"}
    ranks = []
    for rank, space in enumerate(spaces):
        command = ["ip", "netns", "exec", space, sys.executable, __file__, "--rank"]
        variables = {**known, "RANK": str(rank), "GLOO_SOCKET_IFNAME": DEVICE}
        ranks.append(subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True))
    printed = [rank.communicate(timeout=1200)[0] for rank in ranks]
    found: dict[str, list[float]] = json.loads(printed[0])
    return found


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


if __name__ == "__main__":
    main()
