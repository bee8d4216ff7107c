# SPDX-License-Identifier: Apache-2.0
"""The test programs that ship with Accelerate pass on two processes when Farflung answers for it."""

from __future__ import annotations

from pathlib import Path

import accelerate
import pytest

from farflung.testing.ranks import run_ranks
from tests.compat.run_program import main_as_rank, make_model

SCRIPTS = Path(accelerate.__file__).parent / "test_utils" / "scripts"

# What is left out of each program: the text of a statement in its `main`, and why.
PROGRAMS: dict[str, dict[str, str]] = {
    "test_ops": {},
    "test_sync": {
        "test_gradient_accumulation_with_opt_and_scheduler": (
            "its data end inside an accumulation window, whose gradient here is the mean of what is in it "
            "(a row of docs/migrating.md)"
        ),
    },
    "test_script": {},
    "test_distributed_data_loop": {
        "test_join_raises_warning_for_non_ddp_distributed": (
            "`join_uneven_inputs` joins on CPUs too, and warns of nothing (a row of docs/migrating.md)"
        ),
    },
    "external_deps/test_metrics": {},  # needs datasets and transformers
}


def run(program: str, folder: Path, *arguments: str) -> str:
    path, left_out = SCRIPTS / f"{program}.py", list(PROGRAMS.get(program, ()))
    return run_ranks(main_as_rank, 2, str(path), left_out, list(arguments), folder, connect=False, timeout_s=100)[0]


@pytest.mark.parametrize(
    "program",
    [pytest.param(name, marks=[pytest.mark.package] * name.startswith("external_deps")) for name in PROGRAMS],
)
def test_the_program_passes(program, tmp_path):
    run(program, tmp_path)


@pytest.mark.long
def test_the_program_that_saves_and_resumes_passes(tmp_path):
    run_ranks(make_model, 1, tmp_path / "model")
    model = ("--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(tmp_path))
    assert "epoch 1:" in run("external_deps/test_checkpointing", tmp_path, *model)
    resumed = run(
        "external_deps/test_checkpointing", tmp_path, *model, "--resume_from_checkpoint", str(tmp_path / "epoch_0")
    )
    assert "resumed checkpoint performance:" in resumed
