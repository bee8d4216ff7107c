# SPDX-License-Identifier: Apache-2.0
"""What does a run's key cost in a round of two replicas that meet in a folder?

The same all-gathers are timed in turns without a key and with one, on two threads of this process: 14M values of each
replica, in buckets of 16 MiB, as rounds in fp32 send them.

python benchmarks/bench_key.py [--values 14000000] [--rounds 15] [--folder /dev/shm] [--write]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from _measure import interleave, report

from farflung.base.errors import RankFailure
from farflung.comm.address import transport_at
from farflung.comm.group import Group
from farflung.comm.seal import Seal
from farflung.comm.transport import Entered

BUCKET = 4 * 2**20  # values


class Watch:
    """Waits without end."""

    connect_s = 5.0

    def look(self, entered: Entered, waited_s: float) -> None:
        return None

    def note_end(self, entered: Entered, waited_s: float) -> None:
        return None

    def break_off(self, reason: str, author: int | None = None) -> RankFailure:
        return RankFailure(reason)


def gathers(groups: Sequence[Group], values: torch.Tensor) -> None:
    """Gather all buckets of both replicas, as one round does."""

    def of(group: Group) -> None:
        works = [group.all_gather(torch.empty(2 * len(x)), x) for x in values.split(BUCKET)]
        for work in works:
            work.wait()

    with ThreadPoolExecutor(len(groups)) as threads:
        list(threads.map(of, groups))


def main() -> None:
    """Measure and print one line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--values", type=int, default=14_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", help="where the address lies")
    parser.add_argument("--write", action="store_true", help="add the line to benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    values, contestants = torch.randn(args.values), {}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for name, seal in (("without", None), ("with", Seal(bytes(range(32))))):
            place = Path(folder) / name
            place.mkdir()
            transport = transport_at(place.as_uri(), seal=seal)
            groups = [transport.connect("group", rank, 2, Watch()) for rank in range(2)]
            contestants[name] = partial(gathers, groups, values)
        seconds = interleave(contestants, args.rounds, warmup=2)
    pairs = zip(seconds["with"], seconds["without"], strict=True)
    figures = {f"{name}_s": round(statistics.median(rows), 4) for name, rows in seconds.items()}
    figures |= {f"{name}_least_s": round(min(rows), 4) for name, rows in seconds.items()}
    figures["ratio"] = round(statistics.median(one / other for one, other in pairs), 3)
    figures["ratio_of_least"] = round(min(seconds["with"]) / min(seconds["without"]), 3)  # the machine may be busy
    written = "key.jsonl" if args.write else None
    report("What does a run's key cost?", figures, seed=0, write_to=written, values=args.values, rounds=args.rounds)


if __name__ == "__main__":
    main()
