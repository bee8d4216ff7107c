# SPDX-License-Identifier: Apache-2.0
"""Memory: begin with a large batch, halve it until training fits, and release what a failed attempt has taken.

Run it with `python memory.py`. On a CPU `--fits` says how many samples do fit in memory; see automatic_accumulation.py
for keeping the number of samples for each update.
"""

import torch
from tiny import accuracy, circle, network, read_flags
from torch import nn
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.utils import find_executable_batch_size, release_memory, set_seed


def main(given=None):
    flags = read_flags(__doc__, given, epochs=4, batch_size=256, fits=64, lr=0.02)
    accelerator = Accelerator(cpu=flags.cpu)
    tried = []

    @find_executable_batch_size(starting_batch_size=flags.batch_size, reduce_batch_size_fn=lambda: tried[-1] // 2)
    def train(batch_size):
        tried.append(batch_size)
        accelerator.free_memory()  # forgets the models, optimizers and loaders that were prepared before
        set_seed(0)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr)
        data = DataLoader(circle(1000), batch_size=batch_size, shuffle=True)
        test = DataLoader(circle(500, seed=1), batch_size=100)
        model, optimizer, data, test = accelerator.prepare(model, optimizer, data, test)
        for _ in range(flags.epochs):
            for x, inside in data:
                if len(x) > flags.fits:
                    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(x)} samples.")
                accelerator.backward(nn.functional.cross_entropy(model(x), inside))
                optimizer.step()
                optimizer.zero_grad()
        found = accuracy(accelerator, model, test)
        model, optimizer = release_memory(model, optimizer)  # None and None: nothing of this script keeps them
        return found

    found = train()
    accelerator.print(f"{found:.1%} classified correctly; batches of {tried} were tried")
    accelerator.end_training()
    return {"accuracy": found, "tried": tried}


if __name__ == "__main__":
    main()
