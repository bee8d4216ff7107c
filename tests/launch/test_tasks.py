# SPDX-License-Identifier: Apache-2.0
"""Launchers that srun, mpirun or a cluster starts side by side: they train one run, not two that never meet."""

from __future__ import annotations

import subprocess
import sys

import pytest

from farflung.config import environ
from farflung.launch.network import get_free_port
from farflung.testing.patience import patience
from tests.launch.test_run import CONNECTED, seen_by

SLURM = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "{}"}
SLURM |= {"SLURM_NODEID": "{}", "SLURM_STEP_NODELIST": "localhost,other[1-2]"}
TRAINS = """
import os, torch
assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= os.environ.keys()  # frameworks want all or none
from farflung import Accelerator
accelerator, model = Accelerator(), torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
for _ in range(16):
    accelerator.backward(model(torch.randn(8, 4)).sum())
    optimizer.step()
"""


def run_tasks(variables: dict[str, str], *flags: str) -> list[tuple[int, str]]:
    """Start `farflung launch` as two tasks, and return the exit code and the messages of each."""
    port = str(get_free_port())
    command = [sys.executable, "-m", "farflung", "launch", "--cpu", *flags, "train.py"]
    tasks = []
    for rank in range(2):
        told = {name: value.format(rank) for name, value in variables.items()}
        place = environ.snapshot() | {"MASTER_PORT": port} | told
        tasks.append(subprocess.Popen(command, env=place, stderr=subprocess.PIPE, text=True))
    said = [task.communicate(timeout=patience(90))[1] for task in tasks]
    return [(task.returncode, text) for task, text in zip(tasks, said, strict=True)]


@pytest.mark.usefixtures("warm")
def test_two_tasks_of_two_ranks_are_one_world_of_four(home):
    (home / "train.py").write_text(CONNECTED)
    for rank, (code, said) in enumerate(run_tasks(SLURM, "--num_processes", "4")):
        assert code == 0, said
        (line,) = [line for line in said.splitlines() if "one of 2 tasks" in line]
        assert f"machine_rank {rank} (" in line
        assert "main_process_ip localhost (SLURM_STEP_NODELIST)" in line
        assert f"farflung: machine {rank} of 2 waits for the others at " in said
    seen = [seen_by(f"rank{rank}.json") for rank in range(4)]
    assert [(one["size"], one["total"]) for one in seen] == [(4, 10)] * 4
    assert [one["environ"]["LOCAL_RANK"] for one in seen] == ["0", "1", "0", "1"]


@pytest.mark.usefixtures("warm")
def test_two_elastic_tasks_are_replicas_of_one_run(home):
    (home / "train.py").write_text(TRAINS)
    (first, said), (second, _) = run_tasks(SLURM, "--elastic", "2:4", "--outer", "diloco", "--outer_every", "2")
    assert (first, second) == (0, 0)
    assert "training begins with 2 replicas" in said


@pytest.mark.usefixtures("warm")
def test_two_tasks_on_one_machine_may_be_apart(home):
    (home / "train.py").write_text(CONNECTED)
    here = SLURM | {"SLURM_STEP_NUM_NODES": "1"}
    apart = run_tasks(here, "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0")
    assert [(code, "one of 2 tasks" in said) for code, said in apart] == [(0, False)] * 2
    assert seen_by("rank0.json")["size"] == 2
