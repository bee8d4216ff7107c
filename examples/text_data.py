# SPDX-License-Identifier: Apache-2.0
"""Text as blocks of tokens: what the language models of this folder train on, and small ones with random weights."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

CONTEXT = 64


def load(model, text):
    """Return a causal language model and its training data, blocks `[n, CONTEXT]` of tokens.

    Args:
        model: a name on the hub, or a folder. None: a small GPT-2 with random weights, whose tokens are bytes.
        text: a file. None: the licence of this project, again and again.
    """
    file = Path(text) if text else Path(__file__).parents[1] / "LICENSE"
    content = file.read_text(encoding="utf-8")
    if model is None:
        tokens = torch.tensor(list(content.encode()))
        shape = {"n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256}
        torch.manual_seed(0)
        network = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **shape))
    else:
        network = AutoModelForCausalLM.from_pretrained(model)
        tokens = torch.tensor(AutoTokenizer.from_pretrained(model)(content)["input_ids"])
    return network, tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
