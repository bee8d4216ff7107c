# SPDX-License-Identifier: Apache-2.0
"""Question answering: the words between two marks, found by their first and last place; windows of a plugin."""

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForQuestionAnswering, default_data_collator, get_scheduler

from tests.compat.programs.tiny import SIZE, sentences, tokenizer

LENGTH = 16


def features(words, count, seed):
    found = []
    for sentence in sentences(count, seed):
        start = len(sentence) // 3
        encoded = words(sentence[start], " ".join(sentence), padding="max_length", max_length=LENGTH, truncation=True)
        found.append({**encoded, "start_positions": start + 1, "end_positions": min(start + 2, LENGTH - 1)})
    return found


def best(starts, ends):
    """The most likely span of each example, the last place not before the first."""
    scores = starts[:, :, None] + np.triu(np.ones((LENGTH, LENGTH))) * ends[:, None, :]
    return [divmod(int(one.argmax()), LENGTH) for one in scores.reshape(len(starts), -1)]


def main(folder):
    plugin = GradientAccumulationPlugin(num_steps=2)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    set_seed(11)
    words = tokenizer()
    model = BertForQuestionAnswering(BertConfig(vocab_size=len(words), **SIZE))
    train_loader = DataLoader(features(words, 24, 1), shuffle=True, collate_fn=default_data_collator, batch_size=3)
    eval_loader = DataLoader(features(words, 9, 2), collate_fn=default_data_collator, batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = 2 * len(train_loader) // 2
    scheduler = get_scheduler("linear", optimizer, 0, num_training_steps=steps * accelerator.num_processes)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    train_loader, eval_loader = accelerator.prepare(train_loader, eval_loader)
    losses, total = [], 0.0
    for _ in range(2):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    model.eval()
    starts, ends = [], []
    for batch in eval_loader:
        batch = {name: value for name, value in batch.items() if "positions" not in name}
        with torch.no_grad():
            outputs = model(**batch)
        for logits, found in ((outputs.start_logits, starts), (outputs.end_logits, ends)):
            logits = accelerator.pad_across_processes(logits, dim=1, pad_index=-100)
            found.append(accelerator.gather_for_metrics(logits).cpu().numpy())
    spans = best(np.concatenate(starts), np.concatenate(ends))
    state = accelerator.get_state_dict(model)
    return losses, accelerator.gather(total.reshape(1)).tolist(), spans, sorted(state)[:2]
