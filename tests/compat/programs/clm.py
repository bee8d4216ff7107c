# SPDX-License-Identifier: Apache-2.0
"""A causal language model on blocks of text, saved after each epoch and put back to the first."""

import itertools
import math
import os

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator, get_scheduler

from tests.compat.programs.tiny import sentences, tokenizer

BLOCK = 8


def blocks(words, count, seed):
    text = itertools.chain.from_iterable(words(" ".join(s))["input_ids"] for s in sentences(count, seed))
    tokens = list(text)
    cut = [tokens[k : k + BLOCK] for k in range(0, len(tokens) - BLOCK + 1, BLOCK)]
    return [{"input_ids": block, "labels": list(block)} for block in cut]


def main(folder):
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(gradient_accumulation_steps=2, project_config=project)
    set_seed(5)
    words = tokenizer()
    train, evaluation = blocks(words, 60, seed=1)[:32], blocks(words, 20, seed=2)[:11]
    config = GPT2Config(vocab_size=len(words), n_positions=BLOCK, n_embd=16, n_layer=1, n_head=2)
    config.loss_type = "ForCausalLM"
    model = GPT2LMHeadModel(config)
    train_loader = DataLoader(train, shuffle=True, collate_fn=default_data_collator, batch_size=2)
    eval_loader = DataLoader(evaluation, collate_fn=default_data_collator, batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    steps = 2 * math.ceil(len(train_loader) / accelerator.gradient_accumulation_steps)
    scheduler = get_scheduler("cosine", optimizer, 0, steps * accelerator.num_processes)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    train_loader, eval_loader = accelerator.prepare(train_loader, eval_loader)

    def train():
        model.train()
        losses = []
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        accelerator.save_state()
        return losses

    def perplexity():
        model.eval()
        losses = []
        for batch in eval_loader:
            with torch.no_grad():
                loss = model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(2)))
        return math.exp(torch.cat(losses)[: len(evaluation)].mean())

    seen = [(train(), perplexity(), scheduler.get_last_lr()) for _ in range(2)]
    accelerator.load_state(os.path.join(folder, "checkpoints", "checkpoint_0"))
    return seen, perplexity(), scheduler.get_last_lr()
