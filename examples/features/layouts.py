# SPDX-License-Identifier: Apache-2.0
"""Layouts: which processes share a model, and who talks to whom how often, is decided by the launch flags alone.

    farflung launch --num_processes 4 FLAGS layouts.py

with these FLAGS, as on the page docs/islands.md:

    DDP                        (none)
    outer loop                 --outer diloco --outer_every 8
    FSDP                       --use_fsdp
    HSDP                       --use_fsdp --use_parallelism_config --parallelism_config_dp_replicate_size 2
                               --parallelism_config_dp_shard_size 2
    FSDP islands, outer loop   the same, with --outer diloco --outer_every 8
    DDP islands, outer loop    --island_size 2 --outer diloco --outer_every 8

Add `--fsdp_auto_wrap_policy transformer_based_wrap` to FSDP, and only one block at a time is gathered.
"""

import torch
from tiny import accuracy, circle, read_flags
from torch import nn
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.utils import set_seed


class Block(nn.Module):
    """Adds what a layer makes of its input `[batch, width]` to that."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.layer(x))


class Network(nn.Module):
    """Tells the points `[batch, 2]` inside a circle from those outside of it."""

    _no_split_modules = ("Block",)  # transformers' name for the modules that are sharded by themselves

    def __init__(self, width, depth):
        super().__init__()
        self.first = nn.Linear(2, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, 2)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def held(model):
    """How many of the model's values lie in this process while it does not compute."""
    return sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in model.parameters())


def main(given=None):
    flags = read_flags(__doc__, given, epochs=4, batch_size=32, lr=0.01, width=32, depth=3)
    set_seed(0)
    accelerator = Accelerator(cpu=flags.cpu)
    model = Network(flags.width, flags.depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr)
    train = DataLoader(circle(1000), batch_size=flags.batch_size, shuffle=True)
    test = DataLoader(circle(500, seed=1), batch_size=100)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    for _ in range(flags.epochs):
        for x, inside in train:
            accelerator.backward(nn.functional.cross_entropy(model(x), inside))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    found = accuracy(accelerator, model, test)
    rounds = sum(loop.stats().rounds for loop in accelerator.outer_loops)
    values = sum(p.numel() for p in model.parameters())
    accelerator.print(
        f"{accelerator.distributed_type.value}: process 0 holds {held(model):,} of {values:,} values; {rounds} rounds; "
        f"{found:.1%} classified correctly"
    )
    accelerator.end_training()
    return {"accuracy": found, "held": held(model), "values": values, "rounds": rounds}


if __name__ == "__main__":
    main()
