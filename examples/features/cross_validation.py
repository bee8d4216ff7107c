# SPDX-License-Identifier: Apache-2.0
"""Cross-validation: train once for each fold with that fold left out, and let all models vote on the test set.

Run it with `python cross_validation.py --folds 4`, or with several processes.
"""

import torch
from tiny import accuracy, circle, network, read_flags
from torch import nn
from torch.utils.data import DataLoader, Subset

from farflung import Accelerator
from farflung.utils import set_seed


def train_without(accelerator, data, left_out, flags):
    """Train a new model on all of `data` but the samples `left_out`; return it with its accuracy on these."""
    others = sorted(set(range(len(data))) - set(left_out))
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr)
    train = DataLoader(Subset(data, others), batch_size=flags.batch_size, shuffle=True)
    validation = DataLoader(Subset(data, left_out), batch_size=100)
    model, optimizer, train, validation = accelerator.prepare(model, optimizer, train, validation)
    for _ in range(flags.epochs):
        for x, inside in train:
            accelerator.backward(nn.functional.cross_entropy(model(x), inside))
            optimizer.step()
            optimizer.zero_grad()
    return model, accuracy(accelerator, model, validation)


def main(given=None):
    flags = read_flags(__doc__, given, folds=4, epochs=6, batch_size=32, lr=0.02)
    set_seed(0)
    accelerator = Accelerator(cpu=flags.cpu)
    data = circle(800)
    test = accelerator.prepare(DataLoader(circle(500, seed=1), batch_size=100))
    order = torch.randperm(len(data)).tolist()  # the same on all processes: they share the seed
    scores, votes = [], 0.0
    for fold in range(flags.folds):
        model, score = train_without(accelerator, data, order[fold :: flags.folds], flags)
        scores.append(score)
        with torch.no_grad():
            outputs = [accelerator.gather_for_metrics(model(x).softmax(dim=1)) for x, _ in test]
        votes = votes + torch.cat(outputs)
        accelerator.free_memory(model)  # forgets what was prepared, before the next fold

    test = accelerator.prepare(DataLoader(circle(500, seed=1), batch_size=100))
    inside = torch.cat([accelerator.gather_for_metrics(inside) for _, inside in test])
    together = (votes.argmax(dim=1) == inside).float().mean().item()
    accelerator.print(f"{', '.join(f'{score:.1%}' for score in scores)} on the folds; {together:.1%} on the test set")
    accelerator.end_training()
    return {"scores": scores, "accuracy": together}


if __name__ == "__main__":
    main()
