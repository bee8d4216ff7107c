# SPDX-License-Identifier: Apache-2.0
"""What both text classifiers share: the reviews, a BERT for them, and the flags of the command line."""

import argparse
import csv
import tempfile
from pathlib import Path

import torch
from torch.utils.data import random_split
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, BertTokenizer

SAMPLE = Path(__file__).with_name("reviews.csv")


def read_reviews(file):
    """Return the rows of a CSV file `label,review` as [(review, label)], and how many lacked one of the two."""
    with open(file, encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    whole = [(row["review"], int(row["label"])) for row in rows if row["review"] and row["label"]]
    return whole, len(rows) - len(whole)


def split(reviews, seed):
    """Keep a fifth of the reviews for validation; the same fifth on every process."""
    return random_split(reviews, [0.8, 0.2], generator=torch.Generator().manual_seed(seed))


def load_bert(folder, reviews):
    """Return the tokenizer and the model of `folder`; without one, make small ones on the spot, with random weights."""
    if folder is not None:
        model = BertForSequenceClassification.from_pretrained(folder, num_labels=2)
        return AutoTokenizer.from_pretrained(folder), model
    characters = sorted(set("".join(review for review, _ in reviews)))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters]
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "vocab.txt"
        file.write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
        tokenizer = BertTokenizer(str(file))
    config = BertConfig(
        vocab_size=len(vocabulary),
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
