# SPDX-License-Identifier: Apache-2.0
"""What does a run's key cost in a round of two replicas that meet in a folder or in a bucket?

The same all-gathers are timed in turns without a key and with one, on two threads of this process: 14M values of each
replica, in buckets of 16 MiB, as rounds in fp32 send them. The steps between rounds don't count, so a key's share of a
round is smaller than this ratio. On a busy machine the processor's time says more than the clock's.

python benchmarks/bench_key.py [--values 14000000] [--rounds 15] [--folder /dev/shm] [--bucket] [--write]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from _measure import interleave, report

sys.path.insert(0, str(Path(__file__).parent.parent))

from farflung.address.schemes import transport_at
from farflung.address.seal import Seal
from farflung.address.transport import Entered
from farflung.base.errors import RankFailure
from farflung.comm.group import Group
from tests.s3_server import s3_server

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


def with_processor_s(act: Callable[[], None], seconds: list[float]) -> None:
    """Do something, and note the processor's time that this process has taken for it."""
    began = time.process_time()
    act()
    seconds.append(time.process_time() - began)


def main() -> None:
    """Measure and print one line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--values", type=int, default=14_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", help="where the address lies")
    parser.add_argument("--bucket", action="store_true", help="at an S3 server of the tests, in place of a folder")
    parser.add_argument("--write", action="store_true", help="add the line to benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    values, contestants = torch.randn(args.values), {}
    taken: dict[str, list[float]] = {"without": [], "with": []}
    with ExitStack() as stack:
        if args.bucket:
            server = stack.enter_context(s3_server())
            os.environ.update(server.variables)
            where = server.address()
        else:
            where = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.folder))).as_uri()
        for name, seal in (("without", None), ("with", Seal(bytes(range(32))))):
            if not args.bucket:
                Path(f"{where.removeprefix('file://')}/{name}").mkdir()
            transport = transport_at(f"{where}/{name}", seal=seal)
            groups = [transport.connect("group", rank, 2, Watch()) for rank in range(2)]
            contestants[name] = partial(with_processor_s, partial(gathers, groups, values), taken[name])
        seconds = interleave(contestants, args.rounds, warmup=2)
    figures = {}
    for unit, rows in (("s", seconds), ("processor_s", {name: one[2:] for name, one in taken.items()})):
        figures |= {f"{name}_{unit}": round(statistics.median(row), 4) for name, row in rows.items()}
        figures |= {f"{name}_least_{unit}": round(min(row), 4) for name, row in rows.items()}
        pairs = zip(rows["with"], rows["without"], strict=True)
        figures[f"ratio_{unit}"] = round(statistics.median(one / other for one, other in pairs), 3)
    facts = {
        "values": args.values,
        "rounds": args.rounds,
        "where": "bucket" if args.bucket else args.folder or "folder",
    }
    report("What does a run's key cost?", figures, seed=0, write_to="key.jsonl" if args.write else None, **facts)


if __name__ == "__main__":
    main()
