# SPDX-License-Identifier: Apache-2.0
"""Metrics on several processes: each sample counts once, though the last batch is filled up so that all have one.

Run it with `farflung launch --num_processes 2 metrics.py`. `gather` alone would return the padding, too.
"""

import torch
from tiny import circle, network, read_flags
from torch import nn
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.utils import set_seed


def scores(predicted, inside):
    """Accuracy and F1 of the points inside."""
    hits = (predicted & inside).sum()
    return (predicted == inside).float().mean().item(), (2 * hits / (predicted.sum() + inside.sum())).item()


def main(given=None):
    flags = read_flags(__doc__, given, epochs=6, batch_size=32, samples=501, lr=0.02)
    set_seed(0)
    accelerator = Accelerator(cpu=flags.cpu)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr)
    train = DataLoader(circle(1000), batch_size=flags.batch_size, shuffle=True)
    test = DataLoader(circle(flags.samples, seed=1), batch_size=flags.batch_size)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    for epoch in range(flags.epochs):
        model.train()
        for x, inside in train:
            accelerator.backward(nn.functional.cross_entropy(model(x), inside))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        all_predicted, all_inside = [], []
        for x, inside in test:
            with torch.no_grad():
                predicted = model(x).argmax(dim=1)
            predicted, inside = accelerator.gather_for_metrics((predicted, inside))
            all_predicted.append(predicted.bool())
            all_inside.append(inside.bool())
        predicted = torch.cat(all_predicted)
        accuracy, f1 = scores(predicted, torch.cat(all_inside))
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.1%}, F1 {f1:.1%} of {len(predicted)} points")

    accelerator.end_training()
    return {"accuracy": accuracy, "f1": f1, "samples": len(predicted)}


if __name__ == "__main__":
    main()
