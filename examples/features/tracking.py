# SPDX-License-Identifier: Apache-2.0
"""Trackers: record losses and settings, as JSON lines or with any tracker that is installed.

Run it with `python tracking.py --folder runs`, and `--log_with tensorboard`, `wandb`, `mlflow` ... or `all`.
"""

import torch
from tiny import accuracy, circle, network, read_flags
from torch import nn
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.utils import set_seed


def main(given=None):
    flags = read_flags(__doc__, given, log_with="jsonl", folder="runs", epochs=4, batch_size=32, lr=0.02)
    set_seed(0)
    accelerator = Accelerator(cpu=flags.cpu, log_with=flags.log_with, project_dir=flags.folder)
    accelerator.init_trackers("circle", config=vars(flags))
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr)
    train = DataLoader(circle(1000), batch_size=flags.batch_size, shuffle=True)
    test = DataLoader(circle(500, seed=1), batch_size=100)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    updates = 0
    for epoch in range(flags.epochs):
        losses = []
        for x, inside in train:
            loss = nn.functional.cross_entropy(model(x), inside)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            updates += 1
        mean = accelerator.reduce(torch.stack(losses).mean(), "mean").item()  # of all processes, on all processes
        found = accuracy(accelerator, model, test)
        accelerator.log({"loss": mean, "accuracy": found, "epoch": epoch}, step=updates)  # on the main process

    accelerator.end_training()  # finishes the trackers
    return {"accuracy": found, "loss": mean, "updates": updates}


if __name__ == "__main__":
    main()
