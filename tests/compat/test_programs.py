# SPDX-License-Identifier: Apache-2.0
"""The test programs that ship with Accelerate pass on two processes when Farflung answers for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest

from farflung.testing.patience import patience

SCRIPTS = Path(accelerate.__file__).parent / "test_utils" / "scripts"
RUNNER = Path(__file__).with_name("run_program.py")

# What is left out of each program: the text of a statement in its `main`, and why.
PROGRAMS: dict[str, dict[str, str]] = {
    "test_ops": {},
    "test_sync": {
        "test_gradient_accumulation_with_opt_and_scheduler": (
            "its data end inside an accumulation window, whose gradient here is the mean of what is in it "
            "(a row of docs/migrating.md)"
        ),
    },
    "test_script": {
        "test_reinstantiated_state": (
            "wants an error from an Accelerator after `AcceleratorState._reset_state()`; here it keeps what it was "
            "made with (a row of docs/migrating.md)"
        ),
    },
    "test_distributed_data_loop": {
        "test_join_raises_warning_for_non_ddp_distributed": (
            "`join_uneven_inputs` joins on CPUs too, and warns of nothing (a row of docs/migrating.md)"
        ),
    },
    "external_deps/test_metrics": {},
}


def run(program: str, folder: Path, *arguments: str) -> str:
    start = [sys.executable, "-m", "farflung", "launch", "--as-accelerate", "--cpu", "--num_processes", "2"]
    command = [
        *start,
        str(RUNNER),
        str(SCRIPTS / f"{program}.py"),
        json.dumps(list(PROGRAMS.get(program, ()))),
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=patience(100))
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_passes(program, tmp_path):
    run(program, tmp_path)


def test_the_program_that_saves_and_resumes_passes(tmp_path):
    made = subprocess.run([sys.executable, str(RUNNER), "make_model", str(tmp_path / "model")], capture_output=True)
    assert made.returncode == 0, made.stderr
    model = ("--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(tmp_path))
    assert "epoch 1:" in run("external_deps/test_checkpointing", tmp_path, *model)
    resumed = run(
        "external_deps/test_checkpointing", tmp_path, *model, "--resume_from_checkpoint", str(tmp_path / "epoch_0")
    )
    assert "resumed checkpoint performance:" in resumed
