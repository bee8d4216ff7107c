# SPDX-License-Identifier: Apache-2.0
"""Programs with Farflung in place of Accelerate: those that test Accelerate itself, scripts, and random small ones."""

import re
from pathlib import Path

import accelerate
import pytest

from farflung.config import environ
from farflung.state import AcceleratorState
from farflung.testing.ranks import run_ranks
from tests.compat.choices import make
from tests.compat.differential import both, first_difference
from tests.compat.run_program import main_as_rank, make_model

SCRIPTS = Path(accelerate.__file__).parent / "test_utils" / "scripts"

# What is left out of each program: the texts of statements in its `main`, each by a row of docs/migrating.md.
PROGRAMS: dict[str, list[str]] = {
    "test_ops": [],
    # Its data end inside an accumulation window, whose gradient here is the mean of what is in it.
    "test_sync": ["test_gradient_accumulation_with_opt_and_scheduler"],
    "test_script": [],
    # `join_uneven_inputs` joins on CPUs too, and warns of nothing.
    "test_distributed_data_loop": ["test_join_raises_warning_for_non_ddp_distributed"],
}
EXTERNAL = ("external_deps/test_metrics",)  # needs datasets and transformers


def run(program: str, folder: Path, *arguments: str) -> str:
    path, left_out = SCRIPTS / f"{program}.py", PROGRAMS.get(program, [])
    return run_ranks(main_as_rank, 2, str(path), left_out, list(arguments), folder, connect=False, timeout_s=100)[0]


@pytest.mark.parametrize("program", [*PROGRAMS, *(pytest.param(name, marks=pytest.mark.package) for name in EXTERNAL)])
def test_the_program_passes(program, tmp_path):
    run(program, tmp_path)


@pytest.mark.long
def test_the_program_that_saves_and_resumes_passes(tmp_path):
    run_ranks(make_model, 1, tmp_path / "model")
    words = ("--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(tmp_path))
    assert "epoch 1:" in run("external_deps/test_checkpointing", tmp_path, *words)
    words = (*words, "--resume_from_checkpoint", str(tmp_path / "epoch_0"))
    assert "resumed checkpoint performance:" in run("external_deps/test_checkpointing", tmp_path, *words)


# ---- scripts that were written against Accelerate's API, with it and with `accelerate` changed to `farflung`
NAMES = ("clm", "glue", "ner", "qa")


def run_script(name, library, folder):
    """What a program returns on this process, with one library's imports."""
    text = (Path(__file__).parent / "programs" / f"{name}.py").read_text()
    source = re.sub(r"^from accelerate\b", f"from {library}", text, flags=re.M)
    scope = {"__name__": name}
    exec(compile(source, f"{library}:{name}.py", "exec"), scope)
    return scope["main"](str(folder / library / name))


def run_all(folder):
    """What each program returns with each library; both talk through one process group."""
    seen = {}
    with environ.patched({"ACCELERATE_USE_CPU": "true"}):
        for name in NAMES:
            for library in ("accelerate", "farflung"):
                seen[name, library] = run_script(name, library, folder)
                accelerate.state.AcceleratorState._reset_state()
                accelerate.state.GradientState._reset_state()
                AcceleratorState._reset_state()
    return seen


@pytest.mark.package
@pytest.mark.parametrize("size", [1, 2])
def test_programs_with_the_import_changed_see_the_same_losses_and_metrics(size, tmp_path):
    for seen in run_ranks(run_all, size, tmp_path, connect=False, timeout_s=100.0):
        for name in NAMES:
            assert seen[name, "farflung"] == seen[name, "accelerate"], name


# ---- random small programs see the same under both libraries, to the last bit; `choices.py` makes them
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 300), marks=pytest.mark.long)], ids=str)
def test_random_programs_see_the_same(seeds, processes):
    found = both(list(seeds), processes)
    assert len(found) > len(seeds) / 4
    for seed, ranks in found.items():
        program = make(seed)
        for rank, (theirs, ours) in enumerate(ranks):
            difference = first_difference(theirs, ours)
            assert difference is None, f"rank {rank}, {difference}\n{program}"
            assert len(ours) == len(program.acts)
