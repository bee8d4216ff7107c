# SPDX-License-Identifier: Apache-2.0
"""Early stopping: any process may say that training should end, and all of them end in the same step.

Run it with `python early_stopping.py --enough 0.2`, or with several processes.
"""

import torch
from tiny import accuracy, circle, network, read_flags
from torch import nn
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.utils import set_seed


def main(given=None):
    flags = read_flags(__doc__, given, epochs=50, batch_size=32, enough=0.25, lr=0.02)
    set_seed(0)
    accelerator = Accelerator(cpu=flags.cpu)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr)
    train = DataLoader(circle(1000), batch_size=flags.batch_size, shuffle=True)
    test = DataLoader(circle(500, seed=1), batch_size=100)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    updates, stopped = 0, False
    for _ in range(flags.epochs):
        for x, inside in train:
            loss = nn.functional.cross_entropy(model(x), inside)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
            if loss.item() < flags.enough:  # each process has a loss of its own
                accelerator.set_trigger()
            stopped = accelerator.check_trigger()  # every process asks: this is a collective
            if stopped:
                break
        if stopped:
            break

    found = accuracy(accelerator, model, test)
    reason = "stopped early" if stopped else "not stopped"
    accelerator.print(f"{reason} after {updates} updates, with {found:.1%} classified correctly")
    accelerator.end_training()
    return {"accuracy": found, "updates": updates, "stopped": stopped}


if __name__ == "__main__":
    main()
