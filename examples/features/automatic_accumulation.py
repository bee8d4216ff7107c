# SPDX-License-Identifier: Apache-2.0
"""Automatic gradient accumulation: the largest batch that fits in memory, and as many of them as one update needs.

Run it with `python automatic_accumulation.py`. A CPU hardly runs out of memory, so `--fits` says how many samples fit:
with more, a forward pass raises the error that a GPU would raise.
"""

import torch
from tiny import accuracy, circle, network, read_flags
from torch import nn
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.utils import find_executable_batch_size, set_seed


def main(given=None):
    flags = read_flags(__doc__, given, epochs=4, samples_per_update=128, fits=40, lr=0.02)
    accelerator = Accelerator(cpu=flags.cpu)
    tried = []

    @find_executable_batch_size(starting_batch_size=flags.samples_per_update)
    def train(batch_size):  # is called again with a smaller batch when it runs out of memory
        tried.append(batch_size)
        accelerator.free_memory()  # what the failed attempt prepared
        set_seed(0)
        accelerator.gradient_accumulation_steps = max(1, flags.samples_per_update // batch_size)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr)
        data = DataLoader(circle(1000), batch_size=batch_size, shuffle=True)
        test = DataLoader(circle(500, seed=1), batch_size=100)
        model, optimizer, data, test = accelerator.prepare(model, optimizer, data, test)
        for _ in range(flags.epochs):
            for x, inside in data:
                if len(x) > flags.fits:
                    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(x)} samples.")
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.cross_entropy(model(x), inside))
                    optimizer.step()
                    optimizer.zero_grad()
        return accuracy(accelerator, model, test)

    found = train()
    steps = accelerator.gradient_accumulation_steps
    accelerator.print(f"{found:.1%} classified correctly, with {steps} batches of {tried[-1]} for each update")
    accelerator.end_training()
    return {"accuracy": found, "tried": tried, "steps": steps}


if __name__ == "__main__":
    main()
