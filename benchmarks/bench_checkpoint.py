# SPDX-License-Identifier: Apache-2.0
"""What does a checkpoint of 110M parameters with AdamW cost, and the first batch after a resume?

Ours and DCP (on the disk when they return, ours with checksums), Accelerate and plain torch.save write the same state
in turns, in another order each round, to the same file system, which has nothing left to write when one begins. The
latter two leave the bytes to the system; `on_disk` is with the wait for them, so that a power cut would leave as much.
`stall` is what training waits for a save in the background, against one copy of the bytes into memory that is there.
`resume` is the first batch of a loader that goes on at batch 1,000,000.

python benchmarks/bench_checkpoint.py [--ranks 1] [--rounds 5] [--folder /tmp] [--resume] [--write]
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
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _measure import peak_bytes, ratios, report, seeded
from bench_sync import Bag, gpt2_shapes
from torch.utils.data import DataLoader, IterableDataset

import farflung
from farflung.config import environ
from farflung.testing.ranks import run_ranks

SEED = 0
BATCHES = 1_000_000


def trained(accelerator: Any) -> tuple[Any, Any]:
    """A prepared model and its optimizer, after one step."""
    model = Bag(gpt2_shapes())
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    environ.export({"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"})
    seeded(SEED)
    ours, theirs = farflung.Accelerator(cpu=True), accelerate.Accelerator(cpu=True)
    model, optimizer = trained(ours)
    prepared = theirs.prepare(ours.unwrap_model(model))
    theirs.prepare_optimizer(optimizer.optimizer)
    size = ours.num_processes
    state = {"model": ours.get_state_dict(model), "optimizer": optimizer.state_dict()}
    tensors = [t for part in (state["model"], *state["optimizer"]["state"].values()) for t in part.values()]
    num_bytes = sum(t.numel() * t.element_size() for t in tensors)
    staging = [torch.empty_like(t) for t in tensors]
    pending: list[Any] = []

    def copy(where: Path) -> None:
        torch._foreach_copy_(staging, tensors)

    def plain(where: Path) -> None:
        if ours.is_main_process:
            torch.save(state, where)

    def dcp_async(where: Path) -> None:
        group = dist.group.WORLD if dist.is_initialized() else None
        pending.append(dcp.async_save(state, checkpoint_id=where, process_group=group, no_dist=group is None))

    def theirs_on_disk(where: Path) -> None:
        theirs.save_state(str(where))
        if ours.is_main_process:
            wait_for_disk(where)

    def plain_on_disk(where: Path) -> None:
        plain(where)
        if ours.is_main_process:
            wait_for_disk(where)

    contestants: dict[str, tuple[Callable[[Path], Any], Callable[[], Any]]] = {
        "farflung": (lambda where: ours.save_state(where), lambda: None),
        "accelerate": (lambda where: theirs.save_state(str(where)), lambda: None),
        "torch_save": (plain, lambda: None),
        "accelerate_on_disk": (theirs_on_disk, lambda: None),
        "torch_save_on_disk": (plain_on_disk, lambda: None),
        "dcp": (lambda where: dcp.save(state, checkpoint_id=where, no_dist=size == 1), lambda: None),
        "copy": (copy, lambda: None),
        "farflung_stall": (lambda where: ours.save_state(where, block=False), ours._checkpointer.saver.settle),
        "dcp_stall": (dcp_async, lambda: pending.pop().result()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    sizes: dict[str, int] = {}
    order, shuffler = list(contestants), random.Random(SEED)
    for turn in range(rounds + 1):
        shuffler.shuffle(order)  # the same on all ranks
        for name in order:
            act, after = contestants[name]
            where = folder / f"{name}_{turn}"  # a new one each time, as runs do; removed outside of the timing
            os.sync()
            ours.wait_for_everyone()
            start = time.perf_counter()
            act(where)
            if "stall" not in name:
                ours.wait_for_everyone()
            took = time.perf_counter() - start
            after()
            if turn:
                seconds[name].append(took)
            ours.wait_for_everyone()
            if ours.is_main_process and where.exists():
                found = [where] if where.is_file() else [path for path in where.rglob("*") if path.is_file()]
                sizes[name] = sum(path.stat().st_size for path in found)
                where.unlink() if where.is_file() else shutil.rmtree(where)
            ours.wait_for_everyone()
    medians = {name: round(statistics.median(values), 4) for name, values in seconds.items()}
    ranges = {name: [round(min(values), 3), round(max(values), 3)] for name, values in seconds.items()}
    del prepared
    return {"seconds": medians, "range": ranges, "bytes": sizes, "state_bytes": num_bytes}


def wait_for_disk(where: Path) -> None:
    """Wait until the disk has a file, or all files of a folder."""
    for path in [where] if where.is_file() else [path for path in where.rglob("*") if path.is_file()]:
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def peak_of(folder: Path, way: str) -> int:
    """The memory that one save needs beyond the state, in bytes."""
    torch.set_num_threads(1)
    accelerator: Any = farflung.Accelerator(cpu=True) if "farflung" in way else accelerate.Accelerator(cpu=True)
    model, optimizer = trained(accelerator)
    for name in ("first", "second"):  # what is made once, such as imports, is not charged to it
        peak = peak_bytes(partial(save_by, way, accelerator, model, optimizer, folder / f"{way}_{name}"))
    return peak


def save_by(way: str, accelerator: Any, model: Any, optimizer: Any, where: Path) -> None:
    if way == "farflung_stall":
        accelerator.save_state(where, block=False)
        accelerator._checkpointer.saver.settle()
    elif way == "torch_save":
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, where)
    else:
        accelerator.save_state(str(where))


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(range(BATCHES + 10))


def resumed() -> dict[str, float]:
    """Seconds to the first batch after a resume at batch 1,000,000, and of plain iteration to it."""
    accelerator = farflung.Accelerator(cpu=True)
    figures = {}
    for name, dataset, shuffle in (
        ("map", Numbers(), False),
        ("map_shuffled", Numbers(), True),
        ("stream", Stream(), False),
    ):
        loader = accelerator.prepare(DataLoader(dataset, batch_size=1, shuffle=shuffle))
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        state["place"]["batches"] = BATCHES
        state["place"].update(ahead=None, num_ahead=0)
        del iterator
        loader.load_state_dict(state)
        start = time.perf_counter()
        next(iter(loader))
        figures[name] = round(time.perf_counter() - start, 4)
    start = time.perf_counter()
    for number, _ in enumerate(DataLoader(Stream(), batch_size=1)):
        if number == BATCHES:
            break
    figures["stream_plain"] = round(time.perf_counter() - start, 4)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    write_to = "checkpoint.jsonl" if given.write else None
    if given.resume:
        figures = resumed()
        figures["stream_ratio"] = round(figures["stream"] / figures["stream_plain"], 3)
        report("resume", figures, seed=SEED, write_to=write_to, batches=BATCHES, unit="s")
        return
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    try:
        found = run_ranks(measure, given.ranks, folder, given.rounds, timeout_s=900, connect=False)[0]
        extra = {}
        if given.ranks == 1:
            ways = ("farflung", "farflung_stall", "accelerate", "torch_save")
            extra = {way: run_ranks(peak_of, 1, folder, way, timeout_s=200, connect=False)[0] for way in ways}
    finally:
        shutil.rmtree(folder)
    seconds = found["seconds"]
    stalls = {name: seconds[name] for name in ("copy", "farflung_stall", "dcp_stall")}
    saves = {name: seconds[name] for name in seconds if name not in stalls}
    report(
        "checkpoint",
        {
            **found,
            "to_farflung": ratios(saves, to="farflung"),
            "stall_to_copy": ratios(stalls, to="copy"),
            "peak": extra,
        },
        seed=SEED,
        write_to=write_to,
        ranks=given.ranks,
        rounds=given.rounds,
    )


if __name__ == "__main__":
    main()
