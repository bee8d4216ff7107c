# SPDX-License-Identifier: Apache-2.0
"""What the programs train on: a tokenizer of a few words, sentences made of them, and the size of a tiny model."""

import random

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

WORDS = [f"word{k}" for k in range(24)]
SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that knows `WORDS`."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    inner = Tokenizer(WordLevel({word: k for k, word in enumerate([*special, *WORDS])}, unk_token="[UNK]"))
    inner.pre_tokenizer = Whitespace()
    names = ("pad_token", "unk_token", "cls_token", "sep_token")
    return PreTrainedTokenizerFast(tokenizer_object=inner, **dict(zip(names, special, strict=True)))


def sentences(count: int, seed: int) -> list[list[str]]:
    """`count` sentences of 3 to 9 words."""
    draw = random.Random(seed)
    return [draw.choices(WORDS, k=draw.randint(3, 9)) for _ in range(count)]
