# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation: one update for several batches, as if they were one large batch.

Run it with `python gradient_accumulation.py --steps 4`, or on several processes with `farflung launch`.
"""

import torch
from tiny import accuracy, circle, network, read_flags
from torch import nn
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.utils import set_seed


def main(given=None):
    flags = read_flags(__doc__, given, epochs=4, batch_size=16, steps=4, lr=0.01)
    set_seed(0)
    accelerator = Accelerator(cpu=flags.cpu, gradient_accumulation_steps=flags.steps)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr)
    train = DataLoader(circle(1000), batch_size=flags.batch_size, shuffle=True)
    test = DataLoader(circle(500, seed=1), batch_size=100)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    updates = 0
    for _ in range(flags.epochs):
        for x, inside in train:
            with accelerator.accumulate(model):  # gradients travel between processes in every `steps`-th batch alone
                accelerator.backward(nn.functional.cross_entropy(model(x), inside))
                optimizer.step()  # does nothing in the batches between
                optimizer.zero_grad()
                updates += accelerator.sync_gradients

    found = accuracy(accelerator, model, test)
    accelerator.print(f"{found:.1%} classified correctly after {updates} updates")
    accelerator.end_training()
    return {"accuracy": found, "updates": updates}


if __name__ == "__main__":
    main()
