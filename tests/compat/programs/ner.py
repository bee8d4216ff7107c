# SPDX-License-Identifier: Apache-2.0
"""Token classification: sequences of other lengths on each process, padded for the metrics; in bf16."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForTokenClassification, DataCollatorForTokenClassification

from tests.compat.programs.tiny import SIZE, WORDS, sentences, tokenizer


def features(words, count, seed):
    found = []
    for sentence in sentences(count, seed):
        encoded = words(sentence, is_split_into_words=True)
        labels = [-100 if k is None else WORDS.index(sentence[k]) % 3 for k in encoded.word_ids()]
        found.append({**encoded, "labels": labels})
    return found


def main(folder):
    loading = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(mixed_precision="bf16", dataloader_config=loading)
    set_seed(7)
    words = tokenizer()
    model = BertForTokenClassification(BertConfig(vocab_size=len(words), num_labels=3, **SIZE))
    collate = DataCollatorForTokenClassification(words)
    train_loader = DataLoader(features(words, 24, seed=1), shuffle=True, collate_fn=collate, batch_size=3)
    eval_loader = DataLoader(features(words, 10, seed=2), collate_fn=collate, batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, train_loader, eval_loader)
    losses, scores = [], []
    for _ in range(2):
        model.train()
        for batch in train_loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        right = total = 0
        for batch in eval_loader:
            with torch.no_grad():
                answers = model(**batch).logits.argmax(dim=-1)
            answers = accelerator.pad_across_processes(answers, dim=1, pad_index=-100)
            labels = accelerator.pad_across_processes(batch["labels"], dim=1, pad_index=-100)
            answers, labels = accelerator.gather_for_metrics((answers, labels))
            counted = labels != -100
            right, total = right + int((answers == labels)[counted].sum()), total + int(counted.sum())
        scores.append((right, total))
    accelerator.save_model(accelerator.unwrap_model(model), folder)
    return losses, scores
