# SPDX-License-Identifier: Apache-2.0
"""What both text classifiers share: the reviews, a BERT for them, and the flags of the command line."""

import argparse
import csv
import io
import tempfile
from pathlib import Path

import torch
from torch.utils.data import random_split
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, BertTokenizer

SAMPLE = Path(__file__).with_name("reviews.csv")


def read_reviews(file):
    """Return the rows of a CSV file `label,review` as [(review, label)], and how many lacked one of the two.

    A file that can't be used ends the program with one sentence, which names the line and says what to do.
    """
    rows = csv.DictReader(io.StringIO(text_of(file), newline=""), strict=True)
    whole, lines, dropped = [], [], 0
    try:
        columns = rows.fieldnames
        if not columns:
            raise SystemExit(
                f"{file} is empty, or its first line is. Begin it with the line `label,review`, and add a line "
                "for each review."
            )
        if missing := {"label", "review"} - set(columns):
            raise SystemExit(
                f"{file}:1: there is no column {' and no '.join(sorted(missing))}, only {', '.join(columns)}. "
                "Name the two columns in the first line: label,review."
            )
        for row in rows:
            if None in row:
                raise SystemExit(
                    f"{file}:{rows.line_num}: there are more values than the {len(columns)} columns of the first line. "
                    'Put a review that has a comma in it in "quotes".'
                )
            if row["review"] and row["label"]:
                whole.append((row["review"], label_of(row["label"], f"{file}:{rows.line_num}")))
                lines.append(rows.line_num)
            else:
                dropped += 1
    except csv.Error as error:
        raise SystemExit(f"{file}:{rows.reader.line_num}: this is not CSV: {error}. Correct the line.") from None
    if not whole:
        raise SystemExit(f"{file} has no review with its label. Add a line for each below `label,review`.")
    labels = {label for _, label in whole}
    for line, (_, label) in zip(lines, whole, strict=True):
        if label not in range(len(labels)):
            raise SystemExit(
                f"{file}:{line}: the label is {label}, but {len(labels)} different labels must be the numbers from 0 "
                f"to {len(labels) - 1}. Number them so."
            )
    return whole, dropped


def text_of(file):
    """Return what is in a UTF-8 file, as CSV readers want it: with its line ends as they are."""
    try:
        content = Path(file).read_bytes()
        return content.decode("utf-8-sig")
    except OSError as error:
        raise SystemExit(f"{file} can't be read: {error.strerror}. Name a CSV file with --data.") from None
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise SystemExit(f"{file}:{line}: this is not UTF-8 text. Save the file as UTF-8.") from None


def label_of(text, place):
    """Return a label as a number."""
    if not text.strip().isdecimal():
        raise SystemExit(f"{place}: the label is {text!r}, and must be a whole number from 0. Number the labels.")
    return int(text)


def split(reviews, seed, batch):
    """Keep a fifth of the reviews for validation; the same fifth on every process.

    Args:
        batch: how many reviews all processes take at a time: at least so many must be left for training.
    """
    held_out = len(reviews) // 5
    if held_out == 0 or len(reviews) - held_out < batch:
        raise SystemExit(
            f"{len(reviews)} reviews are too few: a fifth is for validation, and of the others all processes "
            f"take {batch} at a time. Use more reviews, or a smaller --batch_size."
        )
    lengths = [len(reviews) - held_out, held_out]
    return random_split(reviews, lengths, generator=torch.Generator().manual_seed(seed))


def load_bert(folder, reviews):
    """Return the tokenizer and the model of `folder`; without one, make small ones on the spot, with random weights."""
    num_labels = max(2, 1 + max(label for _, label in reviews))  # a single one would be a regression
    if folder is not None:
        model = BertForSequenceClassification.from_pretrained(folder, num_labels=num_labels)
        return AutoTokenizer.from_pretrained(folder), model
    characters = sorted(set("".join(review for review, _ in reviews)))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters]
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "vocab.txt"
        file.write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
        tokenizer = BertTokenizer(str(file))
    config = BertConfig(
        vocab_size=len(vocabulary),
        num_labels=num_labels,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,  # so that the two programs can be compared to the last digit
        attention_probs_dropout_prob=0.0,
    )
    return tokenizer, BertForSequenceClassification(config)


def collator(tokenizer, max_length):
    """Return what makes a batch of a list of (review, label)."""

    def collate(samples):
        texts, labels = zip(*samples, strict=True)
        batch = tokenizer(list(texts), padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        batch["labels"] = torch.tensor(labels)
        return dict(batch)

    return collate


def arguments(description):
    """Read the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", default=SAMPLE, help="a CSV file with the columns label and review")
    parser.add_argument("--model", help="a folder with a BERT model and its tokenizer; otherwise a small one is made")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=4, help="of each process")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="2e-5 suits a pretrained model")
    parser.add_argument("--max_length", type=int, default=128, help="in tokens; longer reviews are cut")
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"])
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()
