# SPDX-License-Identifier: Apache-2.0
"""Schedule-free training: an optimizer that averages its weights itself, so that no learning rate has to fall.

Run it with `pip install schedulefree` and `python schedule_free.py`. The optimizer has two sets of weights: tell it
when you train and when you evaluate or save.
"""

import schedulefree
from tiny import accuracy, circle, network, read_flags
from torch import nn
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.utils import set_seed


def main(given=None):
    flags = read_flags(__doc__, given, epochs=6, batch_size=32, warmup=10, lr=0.05)
    set_seed(0)
    accelerator = Accelerator(cpu=flags.cpu)
    model = network()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=flags.lr, warmup_steps=flags.warmup)
    train = DataLoader(circle(1000), batch_size=flags.batch_size, shuffle=True)
    test = DataLoader(circle(500, seed=1), batch_size=100)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    for epoch in range(flags.epochs):
        optimizer.train()  # the weights at which gradients are taken
        for x, inside in train:
            accelerator.backward(nn.functional.cross_entropy(model(x), inside))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.eval()  # the averaged weights
        found = accuracy(accelerator, model, test)
        accelerator.print(f"epoch {epoch}: {found:.1%} classified correctly")

    accelerator.end_training()
    return {"accuracy": found}


if __name__ == "__main__":
    main()
