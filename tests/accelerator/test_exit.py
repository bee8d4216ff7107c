# SPDX-License-Identifier: Apache-2.0
"""Processes end: no hang in destructors, and no child left behind."""

import subprocess
import sys
import time
from pathlib import Path

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from laconic import Accelerator, LocalSGD

accelerator = Accelerator(cpu=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (x,) in loader:
    accelerator.backward(model(x).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local_sgd:
    for (x,) in loader:
        accelerator.backward(model(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        local_sgd.step()
accelerator.print("loss", accelerator.gather(model(x).mean()).tolist())
"""


def children_running(marker):
    """The processes whose command line has `marker` in it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (folder / "cmdline").read_bytes().decode():
                found.append(folder.name)
        except OSError:
            continue  # it ended while we looked
    return found


def test_a_script_of_two_processes_ends_each_time(tmp_path):
    script = tmp_path / "trains_and_ends.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "laconic", "launch", "--cpu", "--num_processes", "2", str(script)]
    for _ in range(3):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.count("loss") == 1
    time.sleep(0.2)
    assert children_running(script.name) == []
