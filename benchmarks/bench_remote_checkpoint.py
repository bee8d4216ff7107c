# SPDX-License-Identifier: Apache-2.0
"""What does a checkpoint of 110M parameters with AdamW cost at an address, beside one in a folder?

An S3 server of another process on this machine keeps the objects in its memory. Ours in a folder, ours at the address,
and torch's DCP with fsspec's writer to the same bucket, if s3fs is installed, save the same 1.3 GB in turns, in another
order each round. `stall` is what training waits for a save in the background, `total` until it counts; `peak` is how
far the memory of the process grew meanwhile, copies of the state for the background included only where it says so.

python benchmarks/bench_remote_checkpoint.py [--rounds 3] [--folder /tmp] [--write]
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _measure import peak_bytes, report, seeded
from bench_checkpoint import trained
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

import farflung
from farflung.config import environ

sys.path.append(str(Path(__file__).parents[1]))
from tests.s3_server import BUCKET, s3_server

SEED = 0


def measure(folder: Path, url: str, rounds: int) -> dict[str, Any]:
    seeded(SEED)
    accelerator = farflung.Accelerator(cpu=True)
    model, optimizer = trained(accelerator)
    state = {"model": accelerator.get_state_dict(model), "optimizer": optimizer.state_dict()}

    def ours(where: str, block: bool = True) -> Callable[[], Any]:
        accelerator.save_state(where, block=block)
        return accelerator._checkpointer.saver.settle

    def theirs(where: str) -> Callable[[], Any]:
        writer = FsspecWriter(where, endpoint_url=url)
        dcp.save(state, storage_writer=writer, no_dist=True)
        return lambda: None

    here, there = os.fspath(folder / "ours"), f"s3://{BUCKET}/ours"
    contestants: dict[str, Callable[[], Callable[[], Any]]] = {
        "folder": partial(ours, here),
        "address": partial(ours, there),
        "folder_background": partial(ours, here, block=False),
        "address_background": partial(ours, there, block=False),
    }
    if find_spec("s3fs"):
        contestants["dcp_fsspec"] = partial(theirs, f"s3://{BUCKET}/dcp")
    figures: dict[str, dict[str, list[float]]] = {name: {"stall": [], "total": [], "peak": []} for name in contestants}
    order, shuffler = list(contestants), random.Random(SEED)
    for turn in range(rounds + 1):
        shuffler.shuffle(order)
        for name in order:
            os.sync()
            took: list[float] = []
            peak = peak_bytes(partial(timed, contestants[name], took))
            if turn:  # what is made once, such as imports and copies for the background, is not charged
                for figure, value in zip(("stall", "total", "peak"), (*took, peak / 1e6), strict=True):
                    figures[name][figure].append(value)
    loads: dict[str, dict[str, float]] = {}
    for name, where in (("folder", here), ("address", there)):
        start = time.perf_counter()
        peak = peak_bytes(partial(accelerator.load_state, where))
        loads[name] = {"total": round(time.perf_counter() - start, 3), "peak": round(peak / 1e6, 3)}
    medians = {name: {k: round(statistics.median(v), 3) for k, v in row.items()} for name, row in figures.items()}
    return {"saves": medians, "loads": loads}


def timed(save: Callable[[], Callable[[], Any]], took: list[float]) -> None:
    """Save, and append the seconds until the call returned, and until the checkpoint counts."""
    start = time.perf_counter()
    settle = save()
    took.append(time.perf_counter() - start)
    settle()
    took.append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        with s3_server() as server:
            environ.export(server.variables)
            torch.set_num_threads(1)
            figures = measure(folder, server.variables["AWS_ENDPOINT_URL"], args.rounds)
    finally:
        shutil.rmtree(folder)
    write_to = "remote_checkpoint.jsonl" if args.write else None
    report("remote_checkpoint", figures, seed=SEED, write_to=write_to, rounds=args.rounds, unit="s, MB")


if __name__ == "__main__":
    main()
