# SPDX-License-Identifier: Apache-2.0
"""Trainer, SFTTrainer and LoRA models train to the same losses on Farflung as on Accelerate, and resume."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from farflung.process.run_files import METRICS
from farflung.testing.patience import patience

pytestmark = pytest.mark.package("trl")
PROGRAM = Path(__file__).with_name("trainers.py")
RUNS = ("trainer", "bf16", "sft", "lora")


@pytest.fixture(scope="module", params=[1, 2])
def trained(request, tmp_path_factory, warm_python):
    """What the program logged under each library, both started at once."""
    ways = {"accelerate": ([], []), "farflung": (["--as-accelerate"], ["--resume"])}
    folders, started = {}, []
    for name, (flags, words) in ways.items():
        folders[name] = folder = tmp_path_factory.mktemp(name)
        flags = ["--cpu", "--num_processes", str(request.param), "--num_cpu_threads_per_process", "1", *flags]
        flags += ["--run-dir", str(folder / "run")]
        command = [warm_python, "-m", "farflung", "launch", *flags, str(PROGRAM), str(folder), *words]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        for process in started:
            said, _ = process.communicate(timeout=patience(150))
            assert process.returncode == 0, said[-5000:]
    finally:
        for process in started:
            process.kill()
    theirs, ours = (json.loads((folder / "losses.json").read_text()) for folder in folders.values())
    assert (theirs["by"], ours["by"]) == ("accelerate", "farflung")
    for found, folder in ((theirs, folders["accelerate"]), (ours, folders["farflung"])):
        found["kept"] = [json.loads(line) for line in (folder / "run" / METRICS).read_text().splitlines()]
    return theirs, ours


@pytest.mark.timeout(240)
@pytest.mark.parametrize("run", RUNS)
def test_losses_norms_and_rates_are_those_under_accelerate(trained, run):
    theirs, ours = (each["runs"] for each in trained)
    assert len(ours[run]["whole"]) >= 4
    assert ours[run]["whole"] == theirs[run]["whole"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("library", [0, 1])
def test_the_runs_folder_has_what_a_trainer_logs_whichever_library_it_uses(trained, library):
    found = trained[library]
    kept = {(row["step"], row["values"]["loss"]) for row in found["kept"] if "loss" in row["values"]}
    logged = {
        (entry["step"], entry["loss"]) for run in found["runs"].values() for entry in run["whole"] if "loss" in entry
    }
    assert logged
    assert logged <= kept
    assert all(row["rank"] == 0 for row in found["kept"])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("run", RUNS)
def test_a_resumed_training_is_the_training(trained, run):
    ours = trained[1]["runs"]
    whole, resumed = ours[run]["whole"], ours[run]["resumed"]
    counted = {"num_tokens"}  # trl counts from the resume on
    assert [{k: v for k, v in entry.items() if k not in counted} for entry in whole[:-1]] == [
        {k: v for k, v in entry.items() if k not in counted} for entry in resumed[:-1]
    ]  # the last entry says how long it took
