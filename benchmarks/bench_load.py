# SPDX-License-Identifier: Apache-2.0
"""How long does it take to go on from a checkpoint of 110M parameters with AdamW, read from the disk or from memory?

Each contestant loads a checkpoint that it wrote itself into the same model and optimizer, in turns, in another order
each round: `cold` with the system's file cache dropped before each load (which needs root), `warm` with the files in
it. Ours checks every byte against the checksums of the manifest; the others check none.

python benchmarks/bench_load.py [--rounds 9] [--folder /tmp] [--write]
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed.checkpoint as dcp
from _measure import ratios, report, seeded
from bench_checkpoint import trained

import farflung

SEED = 0
OTHERS = ("accelerate", "torch_load", "dcp")


def contestants(folder: Path) -> dict[str, Callable[[], Any]]:
    """Write a checkpoint in each way; return what loads it."""
    ours, theirs = farflung.Accelerator(cpu=True), accelerate.Accelerator(cpu=True)
    model, optimizer = trained(ours)
    bare, steps = ours.unwrap_model(model), optimizer.optimizer
    theirs.prepare(bare)
    theirs.prepare_optimizer(steps)
    ours.save_state(folder / "farflung")
    theirs.save_state(str(folder / "accelerate"))
    torch.save({"model": bare.state_dict(), "optimizer": steps.state_dict()}, folder / "torch_load")
    state = {"model": bare.state_dict(), "optimizer": steps.state_dict()}
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)

    def torch_load() -> None:
        found = torch.load(folder / "torch_load", map_location="cpu", weights_only=True)
        bare.load_state_dict(found["model"])
        steps.load_state_dict(found["optimizer"])

    def dcp_load() -> None:
        found = {"model": bare.state_dict(), "optimizer": steps.state_dict()}
        dcp.load(found, checkpoint_id=folder / "dcp", no_dist=True)
        bare.load_state_dict(found["model"])
        steps.load_state_dict(found["optimizer"])

    return {
        "farflung": lambda: ours.load_state(folder / "farflung"),
        "accelerate": lambda: theirs.load_state(str(folder / "accelerate")),
        "torch_load": torch_load,
        "dcp": dcp_load,
    }


def timed(loads: dict[str, Callable[[], Any]], rounds: int, cold: bool) -> dict[str, list[float]]:
    """Seconds of each load; a round that is not counted comes first."""
    seconds: dict[str, list[float]] = {name: [] for name in loads}
    order, shuffler = list(loads), random.Random(SEED)
    for turn in range(rounds + 1):
        shuffler.shuffle(order)
        for name in order:
            if cold:
                os.sync()
                Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
            start = time.perf_counter()
            loads[name]()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    seeded(SEED)
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    figures: dict[str, Any] = {}
    try:
        loads = contestants(folder)
        sizes = sum(path.stat().st_size for path in (folder / "farflung").rglob("*") if path.is_file())
        for name, cold in (("warm", False), ("cold", True)):
            found = timed(loads, given.rounds, cold)
            medians = {way: round(statistics.median(values), 4) for way, values in found.items()}
            figures[name] = medians
            figures[f"{name}_range"] = {
                way: [round(min(values), 3), round(max(values), 3)] for way, values in found.items()
            }
            figures[f"{name}_to_fastest"] = ratios(medians, to=min(OTHERS, key=medians.__getitem__))
    finally:
        shutil.rmtree(folder)
    report(
        "load",
        figures,
        seed=SEED,
        write_to="load.jsonl" if given.write else None,
        rounds=given.rounds,
        bytes=sizes,
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
