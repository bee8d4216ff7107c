# SPDX-License-Identifier: Apache-2.0
"""Raw DDP and Farflung classify the same reviews equally well; precision can be asked for in three ways."""

import csv
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "text_classification"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LAUNCH = [sys.executable, "-m", "farflung", "launch", "--cpu"]
SHORT = ["--epochs", "1"]


def run(*command):
    ended = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def reviews():
    """The module that both programs share."""
    spec = importlib.util.spec_from_file_location("reviews_example", FOLDER / "reviews.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def epochs_of(output):
    """The losses and accuracies that were printed, as text."""
    return re.findall(r"epoch \d+: loss ([\d.]+), accuracy ([\d.]+)", output)


@pytest.mark.timeout(120)
def test_both_reach_the_same_accuracy_by_the_same_way():
    # 13 reviews validate: the sampler pads them to 14, which must not count. An epoch has 14 batches a process, so its
    # last window of 3 micro-batches is short.
    flags = ["--epochs", "6", "--batch_size", "2", "--gradient_accumulation_steps", "3"]
    raw = run(*TORCHRUN, "--nproc_per_node", "2", FOLDER / "raw_ddp_bert.py", *flags)
    ours = run(*LAUNCH, "--num_processes", "2", FOLDER / "farflung_bert.py", *flags)
    assert len(epochs_of(ours)) == 6
    for (loss, accuracy), (our_loss, our_accuracy) in zip(epochs_of(raw), epochs_of(ours), strict=True):
        assert our_accuracy == accuracy
        assert float(our_loss) == pytest.approx(float(loss), abs=1.5e-4)
    last_loss, last_accuracy = map(float, epochs_of(ours)[-1])
    assert last_loss < 0.5  # guessing has log(2) = 0.69
    assert last_accuracy > 0.6
    assert "30 optimizer steps" in ours


def test_rows_with_missing_values_are_dropped_and_counted(reviews):
    with open(FOLDER / "reviews.csv", encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    whole, num_dropped = reviews.read_reviews(FOLDER / "reviews.csv")
    assert 60 <= len(rows) <= 80
    assert num_dropped == 3
    assert whole == [(row["review"], int(row["label"])) for row in rows if row["label"] and row["review"]]


@pytest.mark.parametrize("way", ["flag", "file"])
def test_precision_comes_from_the_launcher(way, tmp_path):
    config = tmp_path / "bf16.yaml"
    config.write_text("mixed_precision: bf16\n")
    flags = {"flag": ["--mixed_precision", "bf16"], "file": ["--config_file", config]}
    assert "mixed precision: bf16" in run(*LAUNCH, *flags[way], FOLDER / "farflung_bert.py", *SHORT)


def test_another_file_a_saved_model_and_a_precision_can_be_given(reviews, tmp_path):
    other = tmp_path / "others.csv"
    other.write_text("label,review\n" + "1,好\n0,差\n" * 20, encoding="utf-8")
    for part in reviews.load_bert(None, [("好差", 1)]):
        part.save_pretrained(tmp_path / "bert")
    given = ["--data", other, "--model", tmp_path / "bert", "--mixed_precision", "bf16"]
    said = run(sys.executable, FOLDER / "farflung_bert.py", *SHORT, *given)
    assert "40 reviews, 0 rows" in said
    assert "mixed precision: bf16" in said
    assert "epoch 0" in said
