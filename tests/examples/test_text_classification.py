# SPDX-License-Identifier: Apache-2.0
"""Raw DDP and Farflung classify the same reviews equally well."""

import csv
import re

import pytest

from tests.examples import scripts
from tests.python import run_python

pytestmark = pytest.mark.package

FOLDER = scripts.FOLDER / "text_classification"
TORCHRUN = ["-m", "torch.distributed.run"]
LAUNCH = ["-m", "farflung", "launch", "--cpu"]
SHORT = ["--epochs", "1"]


def run(*command):
    return run_python(*command).stdout


@pytest.fixture(scope="module")
def reviews():
    """The module that both programs share."""
    return scripts.load("text_classification/reviews")


def epochs_of(output):
    """The losses and accuracies that were printed, as text."""
    return re.findall(r"epoch \d+: loss ([\d.]+), accuracy ([\d.]+)", output)


@pytest.mark.usefixtures("warm")
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


@pytest.mark.usefixtures("warm")
def test_another_file_a_saved_model_and_a_precision_can_be_given(reviews, tmp_path):
    other = tmp_path / "others.csv"
    other.write_text("label,review\n" + "1,好\n0,差\n" * 20, encoding="utf-8")
    for part in reviews.load_bert(None, [("好差", 1)]):
        part.save_pretrained(tmp_path / "bert")
    given = ["--data", other, "--model", tmp_path / "bert", "--mixed_precision", "bf16"]
    said = run(FOLDER / "farflung_bert.py", *SHORT, *given)
    assert "40 reviews, 0 rows" in said
    assert "mixed precision: bf16" in said
    assert "epoch 0" in said


HEADER = b"label,review\n"
EMPTY = r"{} is empty, or its first line is\. Begin it with the line `label,review`"
NO_REVIEW = r"{} has no review with its label\. Add a line for each below"
BAD = [
    (b"", EMPTY),
    (b"\n\n", EMPTY),
    (HEADER, NO_REVIEW),
    (HEADER + b"1,\n,good\n", NO_REVIEW),
    (b"stars,text\n1,good\n", r"{}:1: there is no column label and no review, only stars, text\. Name the two"),
    (b"label;review\n1;good\n", r"{}:1: there is no column label and no review, only label;review\. Name the two"),
    (HEADER + b"0,bad\npositive,good\n", r"{}:3: the label is 'positive', and must be a whole number from 0\. Num"),
    (HEADER + b"0,bad\n-1,good\n", r"{}:3: the label is '-1', and must be a whole number from 0\. Number the lab"),
    (HEADER + b"1,bad\n2,good\n", r"{}:3: the label is 2, but 2 different labels must be .* from 0 to 1\. Number"),
    (HEADER + b"0,bad\n7,good\n3,fair", r"{}:3: the label is 7, but 3 different labels must be .* from 0 to 2\. "),
    (HEADER + b"1,good, and cheap\n", r"{}:2: there are more values than the 2 columns of the first line\. Put"),
    (HEADER + b'0,bad\n1,"good\n', r"{}:3: this is not CSV: unexpected end of data\. Correct the line"),
    (HEADER + "0,bad\n1,très bien\n".encode("latin-1"), r"{}:3: this is not UTF-8 text\. Save the file as UTF-8"),
    ("label,review\n1,good\n".encode("utf-16"), r"{}:1: this is not UTF-8 text\. Save the file as UTF-8"),
    (None, r"{} can't be read: No such file or directory\. Name a CSV file with --data"),
]


@pytest.mark.parametrize(("content", "sentence"), BAD)
def test_a_file_that_can_not_be_used_is_one_sentence(content, sentence, reviews, tmp_path):
    file = tmp_path / "bad.csv"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SystemExit, match="^" + sentence.replace("{}", re.escape(str(file)))):
        reviews.read_reviews(file)


def test_labels_may_be_more_than_two_and_a_byte_order_mark_is_no_column(reviews, tmp_path):
    file = tmp_path / "good.csv"
    file.write_text('label,review\n2,so so\n0,"bad,\nbad"\n1,good\n', encoding="utf-8-sig")
    found, num_dropped = reviews.read_reviews(file)
    assert (found, num_dropped) == ([("so so", 2), ("bad,\nbad", 0), ("good", 1)], 0)
    assert reviews.load_bert(None, found)[1].num_labels == 3
    with pytest.raises(SystemExit, match=r"^3 reviews are too few: .* take 8 at a time\. Use more reviews, or a sm"):
        reviews.split(found, 0, 8)


@pytest.mark.usefixtures("warm")
def test_the_program_itself_says_one_sentence(tmp_path):
    file = tmp_path / "bad.csv"
    file.write_bytes(HEADER)
    ended = run_python(FOLDER / "farflung_bert.py", "--data", file, code=1)
    assert ended.stderr == f"{file} has no review with its label. Add a line for each below `label,review`.\n"
