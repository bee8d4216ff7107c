# SPDX-License-Identifier: Apache-2.0
"""The examples that people search for train on small settings, on two processes; a notebook runs three of them."""

import json
import math
import re

import pytest

from farflung.testing.ranks import run_ranks
from tests.examples.scripts import FOLDER, PAGE, run_script
from tests.python import run_farflung, run_python

pytestmark = pytest.mark.long

NOTEBOOK = FOLDER / "three_examples.ipynb"
TEXT = "A line of text that a small model learns by heart in some steps.\n" * 64
RUNS = {
    "gpt_slow_lines": "--text {text} --epochs 3 --every 8 --lr 3e-3",
    "lora": "--text {text} --epochs 3 --save {folder}/adapters",
    "gan": "--epochs 30",
}
BYTES = 256  # in the vocabulary of small models: a guess has a loss of log(256)


def run_all(text, folder):
    """Run all scripts in this process; what each of them returns."""
    return {name: run_script(name, flags.format(text=text, folder=folder)) for name, flags in RUNS.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("examples")
    (place / "text").write_text(TEXT)
    return place


@pytest.fixture(scope="module")
def by_rank(folder):
    return run_ranks(run_all, 2, folder / "text", folder, timeout_s=120, connect=False)


def test_a_gpt_learns_and_sends_a_fraction_of_its_gradients(by_rank):
    first, second = (found["gpt_slow_lines"] for found in by_rank)
    assert first == second
    assert first["losses"][-1] < first["losses"][0] < math.log(BYTES)
    values = 124_000
    assert first["rounds"] >= first["steps"] // 8
    assert first["bytes_sent"] < first["steps"] * 4 * values / 20


def test_lora_trains_and_sends_adapters_alone(by_rank, folder):
    first, second = (found["lora"] for found in by_rank)
    assert first == second
    assert first["losses"][-1] < first["losses"][0]
    assert first["bytes_sent"] <= (first["rounds"] + 1) * 1.1 * 4 * first["trained"]
    assert (folder / "adapters" / "adapter_model.safetensors").exists()


def test_a_gan_makes_points_near_the_ring_and_both_models_have_rounds(by_rank):
    first, second = (found["gan"] for found in by_rank)
    assert first["rounds"] == second["rounds"] > 10
    assert abs(first["mean"] - 1) < 0.35


@pytest.mark.usefixtures("warm")
def test_a_trainer_has_rounds(folder):
    flags = ["--text", folder / "text", "--output", folder / "trainer", "--every", "4", "--epochs", "1", "--cpu"]
    launch = ["launch", "--as-accelerate", "--cpu", "--num_processes", "2", "--run-dir", "none"]
    said = run_farflung(*launch, FOLDER / "trainer_diloco.py", *flags, timeout_s=120).stdout
    rounds, megabytes = re.search(r"^(\d+) rounds, ([\d.]+) MB sent", said, re.MULTILINE).groups()
    assert int(rounds) >= 2
    assert float(megabytes) > 0


@pytest.mark.usefixtures("warm")
def test_a_killed_run_continues_as_if_it_had_not_been_killed(tmp_path):
    killed, whole = (f"--cpu --epochs 2 --folder {tmp_path / name}" for name in ("killed", "whole"))
    run_python(FOLDER / "features" / "checkpointing.py", *killed.split(), "--kill_after", "24", code=-9)
    assert (tmp_path / "killed" / "checkpoints").exists()
    again, once = (run_ranks(run_script, 1, "features/checkpointing", line, connect=False) for line in (killed, whole))
    assert again == once


@pytest.mark.long
def test_the_notebook_runs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    said = run_python("-c", source, cwd=FOLDER, timeout_s=150).stdout  # what a kernel does, without one
    assert len(re.findall(r"MB sent by each process|each process sent|made points lie", said)) == 3


def test_the_page_lists_each_script():
    scripts = {path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".ipynb")} - {"text_data.py"}
    assert scripts <= set(re.findall(r"\.\./examples/([\w.]+)\)", PAGE.read_text(encoding="utf-8")))
