# SPDX-License-Identifier: Apache-2.0
"""Is there a moment at which a kill leaves no checkpoint to go on from? Kill runs while they save, and resume them.

A run of a few steps writes a checkpoint in each of them, one of: a new folder, automatic numbers, the same folder
again, numbers with `total_limit=1`, in the background; with 1 or 2 processes. It is killed (-9, all its processes) at a
random moment and started again, until it comes to its end. What it saw must be what a run in one go sees, and each
start must find the last checkpoint that was said to be written, or a later one.

    python benchmarks/soak_checkpoint.py --kills 60
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.base.errors import CheckpointError, ConfigError, FarflungError
from farflung.utils import ProjectConfiguration, set_seed

WAYS = ("new", "numbers", "same", "limit", "background")
STEPS = 12


def train(way: str, folder: Path, words: Path) -> None:
    """Go on from the newest checkpoint and write one after each step; each step adds a line to `words`."""
    numbered = way in ("numbers", "limit", "background")
    project = ProjectConfiguration(
        project_dir=str(folder), automatic_checkpoint_naming=numbered, total_limit=1 if way == "limit" else None
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_config=project)
    set_seed(0)
    model = nn.Sequential(nn.Linear(4, 300), nn.Dropout(0.3), nn.Linear(300, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(torch.randn(2 * STEPS * accelerator.num_processes // 2, 4), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = Steps()
    accelerator.register_for_checkpointing(done)
    source = folder / {"new": "", "same": "ckpt"}.get(way, "checkpoints")
    saved = Path(f"{words}.saved")
    promised = int(saved.read_text()) if saved.exists() else 0
    try:
        accelerator.load_state(None if numbered else source)
    except (CheckpointError, ConfigError) as error:
        if promised:
            raise
        print(f"from the beginning: {error}")
    assert done.count >= promised, f"step {promised} was saved, but the newest complete one is of step {done.count}"
    while done.count < STEPS:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            done.count += 1
            line = f"{done.count} {accelerator.gather(loss.detach().reshape(1)).tolist()}\n"
            if accelerator.is_main_process:
                with words.open("a") as file:
                    file.write(line)
            target = None if numbered else folder / ("ckpt" if way == "same" else f"step_{done.count}")
            accelerator.save_state(target, block=way != "background")
            if accelerator.is_main_process:
                # In the background the one before is complete now. Replaced, since a kill may come while it is written.
                aside = saved.with_suffix(".new")
                aside.write_text(str(done.count - (way == "background")))
                aside.replace(saved)
            if done.count >= STEPS:
                break
    accelerator.end_training()


class Steps:
    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def start(way: str, processes: int, folder: Path, words: Path) -> subprocess.Popen[str]:
    arguments = [str(Path(__file__).resolve()), "--run", way, str(folder), str(words)]
    command = [sys.executable, *arguments]
    if processes > 1:
        command = [sys.executable, "-m", "farflung", "launch", "--cpu", "--num_processes", str(processes), *arguments]
    return subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a run and all processes that it started."""
    members = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _session(pid) == process.pid]
    for pid in members:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    while any(_session(pid) == process.pid for pid in members):
        time.sleep(0.01)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def campaign(way: str, processes: int, kills: int, chance: random.Random) -> int:
    """Kill one run after the other until `kills` is reached; return how many were killed while they saved."""
    with tempfile.TemporaryDirectory() as name:
        expected = Path(name) / "expected"
        whole = start(way, processes, Path(name) / "whole", expected)
        began = time.monotonic()
        assert whole.wait(timeout=120) == 0, whole.stdout.read() if whole.stdout else ""
        length = time.monotonic() - began
        lines = set(expected.read_text().splitlines())
        assert len(lines) == STEPS
        count = 0
        attempt = 0
        while count < kills:
            attempt += 1
            folder, words = Path(name) / f"run_{attempt}", Path(name) / f"words_{attempt}"
            while True:
                run = start(way, processes, folder, words)
                # Saving is most of what such a run does after its start, which is about the first half.
                until = time.monotonic() + (chance.uniform(0.35, 1.0) * length if count < kills else 120)
                while run.poll() is None and time.monotonic() < until:
                    time.sleep(0.002)
                if run.poll() is not None:
                    output = run.stdout.read() if run.stdout else ""
                    assert run.returncode == 0, f"{way}, {processes} processes, run {attempt}:\n{output}"
                    break
                kill(run)
                count += 1
            seen = words.read_text().splitlines()
            assert set(seen) == lines, f"{way}: the run saw {sorted(set(seen) ^ lines)} otherwise"
        return count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", nargs=3)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", nargs="*", default=WAYS)
    parser.add_argument("--processes", nargs="*", type=int, default=[1, 2])
    given = parser.parse_args()
    if given.run:
        way, folder, words = given.run
        try:
            train(way, Path(folder), Path(words))
        except FarflungError as error:
            sys.exit(str(error))
        return
    cells = [(way, processes) for processes in given.processes for way in given.ways]
    chance = random.Random(given.seed)
    total = 0
    for way, processes in cells:
        total += campaign(way, processes, -(-given.kills // len(cells)), chance)
        print(f"{way}, {processes} processes: {total} kills so far, each resumed", file=sys.stderr, flush=True)
    print(json.dumps({"bench": "soak_checkpoint", "kills": total, "unresumable": 0, "seed": given.seed}))


if __name__ == "__main__":
    main()
