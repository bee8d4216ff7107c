# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation for language models: each token counts the same, however the tokens are spread over batches.

The mean over a batch weighs a token of a short sequence more than one of a long sequence. Here the loss is a sum, and
`num_items` says over how many tokens: an update has the gradient of the mean over all tokens of its batches, on all
processes. Run it with `python token_accumulation.py`. Two processes with half the batch size get the same result.
"""

import heapq

import torch
from tiny import read_flags
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.utils import set_seed

PADDING = 0
LINES = [torch.tensor(list(line.encode())) for line in heapq.__about__.splitlines() if len(line) > 1][:40]


class Model(nn.Module):
    """Predicts each next byte of a line."""

    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.recur = nn.GRU(width, width, batch_first=True)
        self.predict = nn.Linear(width, 256)

    def forward(self, lines):
        return self.predict(self.recur(self.embed(lines))[0])


def main(given=None):
    flags = read_flags(__doc__, given, epochs=6, batch_size=4, steps=2, lr=1.0)
    set_seed(0)
    accelerator = Accelerator(cpu=flags.cpu, gradient_accumulation_steps=flags.steps)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=flags.lr)
    data = DataLoader(
        LINES, batch_size=flags.batch_size, collate_fn=lambda lines: pad_sequence(lines, batch_first=True)
    )
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    for _ in range(flags.epochs):
        total, count = 0.0, 0
        for lines in data:
            with accelerator.accumulate(model):
                targets = lines[:, 1:]
                logits = model(lines[:, :-1])
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum"
                )
                tokens = (targets != PADDING).sum()
                accelerator.backward(loss, num_items=tokens)
                optimizer.step()
                optimizer.zero_grad()
                total, count = total + loss.detach(), count + tokens
        total, count = accelerator.reduce((total, count))

    mean = (total / count).item()
    accelerator.print(f"a loss of {mean:.4f} for each of {count.item()} bytes")
    accelerator.end_training()
    return {"loss": mean, "tokens": count.item(), "weights": sum(p.double().sum().item() for p in model.parameters())}


if __name__ == "__main__":
    main()
