# SPDX-License-Identifier: Apache-2.0
"""Do processes end? Runs one short two-process training script again and again, and counts hangs and children left.

The peer runs the same script with Accelerate's imports under `accelerate launch`.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _measure import report

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from LIBRARY import Accelerator
from LIBRARY.local_sgd import LocalSGD

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local_sgd:
    for (x,) in loader:
        accelerator.backward(model(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        local_sgd.step()
for (x,) in loader:
    accelerator.backward(model(x).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
accelerator.print("processes", accelerator.gather(model(x).mean()).numel())
"""
COMMANDS = {
    "farflung": ["-m", "farflung", "launch", "--cpu", "--num_processes", "2"],
    "accelerate": ["-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "2"],
}


def children(marker: str) -> list[int]:
    """The processes that have `marker` in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (folder / "cmdline").read_bytes().decode():
                found.append(int(folder.name))
        except OSError:
            continue  # it ended while we looked
    return found


def soak(library: str, runs: int, timeout_s: float) -> dict[str, float | int]:
    """Run the script `runs` times; return how it went."""
    outcome: dict[str, float | int] = {"runs": runs, "hung": 0, "failed": 0, "children_left": 0, "connected": 0}
    took = []
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / f"soak_{library}.py"
        script.write_text(SCRIPT.replace("LIBRARY", library))
        for number in range(runs):
            if number and number % 20 == 0:
                print(f"{library}: {number} runs so far, {outcome}", file=sys.stderr, flush=True)
            started = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, *COMMANDS[library], str(script)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                start_new_session=True,
            )
            try:
                output, _ = process.communicate(timeout=timeout_s)
                outcome["failed"] += process.returncode != 0
                outcome["connected"] += "processes 2" in output
            except subprocess.TimeoutExpired:
                outcome["hung"] += 1
            took.append(time.monotonic() - started)
            left = children(script.name)
            outcome["children_left"] += bool(left)
            for pid in {*left, process.pid}:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait()
    outcome["median_s"] = round(statistics.median(took), 2)
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--peer-runs", type=int, default=0, help="runs of the peer")
    parser.add_argument("--timeout-s", type=float, default=60.0)
    parser.add_argument("--write", action="store_true", help="append to benchmarks/results/exit.jsonl")
    options = parser.parse_args()
    figures = {"farflung": soak("farflung", options.runs, options.timeout_s)}
    if options.peer_runs:
        figures["accelerate"] = soak("accelerate", options.peer_runs, options.timeout_s)
    report("do processes end?", figures, seed=0, write_to="exit.jsonl" if options.write else None)


if __name__ == "__main__":
    main()
