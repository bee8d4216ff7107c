# SPDX-License-Identifier: Apache-2.0
"""Slots in a run of `farflung launch --elastic`: one replica is killed, and each sample counts once in each epoch."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.python import run_farflung

# Each process writes what it has trained on when a round has ended, which is when it is in the weights of all.
SCRIPT = """
import os, signal
import torch
from torch.utils.data import DataLoader, TensorDataset
from farflung import Accelerator

member = os.environ["FARFLUNG_MEMBER"]
torch.manual_seed(0)
accelerator = Accelerator()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=1, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
(loop,) = accelerator.outer_loops
unsent = []
file = open(f"seen-{member}", "w", buffering=1)

def ended(this):
    file.writelines(unsent)
    unsent.clear()

loop.listeners.append(ended)
for epoch in range(2):
    for (batch,) in loader:
        optimizer.zero_grad()
        accelerator.backward(model(batch).square().mean())
        unsent.append(f"{int(batch)}\\n")
        optimizer.step()
        if loop.position == 19 and int(member) != loop._quorum.generation.ids[0]:
            os.kill(os.getpid(), signal.SIGKILL)
accelerator.end_training()
"""


@pytest.mark.usefixtures("warm")
def test_each_sample_counts_once_in_each_epoch(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    launch = "launch --cpu --elastic 1:3 --replicas 2 --max_restarts 0 --outer local_sgd --outer_every 4 train.py"
    run_farflung(*launch.split(), code=3, cwd=tmp_path)
    counts = Counter(line for file in tmp_path.glob("seen-*") for line in file.read_text().split())
    assert counts == {str(sample): 2 for sample in range(64)}
