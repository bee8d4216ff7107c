# SPDX-License-Identifier: Apache-2.0
"""Sequence classification: one of two classes for each sentence, with accumulation and a linear schedule."""

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, get_scheduler

from tests.compat.programs.tiny import SIZE, sentences, tokenizer

logger = get_logger(__name__)


def features(words, count, seed):
    return [{**words(" ".join(text)), "labels": int(text[0] < text[-1])} for text in sentences(count, seed)]


def main(folder):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    logger.info(accelerator.state, main_process_only=False)
    set_seed(3)
    words = tokenizer()
    with accelerator.main_process_first():
        train, evaluation = features(words, 32, seed=1), features(words, 13, seed=2)
    model = BertForSequenceClassification(BertConfig(vocab_size=len(words), num_labels=2, **SIZE))
    collate = DataCollatorWithPadding(words)
    train_loader = DataLoader(train, shuffle=True, collate_fn=collate, batch_size=2)
    eval_loader = DataLoader(evaluation, collate_fn=collate, batch_size=4)
    plain = ("bias", "LayerNorm.weight")
    decayed = [p for name, p in model.named_parameters() if not name.endswith(plain)]
    others = [p for name, p in model.named_parameters() if name.endswith(plain)]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=1e-2)
    updates = 2 * len(train_loader) // accelerator.gradient_accumulation_steps
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=updates)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    train_loader, eval_loader = accelerator.prepare(train_loader, eval_loader)
    losses, right = [], []
    for _ in range(2):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        model.eval()
        hits = []
        for batch in eval_loader:
            with torch.no_grad():
                answers = model(**batch).logits.argmax(dim=-1)
            answers, labels = accelerator.gather_for_metrics((answers, batch["labels"]))
            hits += (answers == labels).tolist()
        right.append((sum(hits), len(hits)))
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save)
    accelerator.wait_for_everyone()
    again = BertForSequenceClassification.from_pretrained(folder)
    same = all(torch.equal(one, other) for one, other in zip(again.parameters(), unwrapped.parameters(), strict=True))
    return losses, right, same, scheduler.get_last_lr()
