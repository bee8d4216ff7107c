# SPDX-License-Identifier: Apache-2.0
"""DiLoCo in a bare torch loop: no Accelerator, three lines more than training alone.

Run it with `torchrun --nproc_per_node 2 bare_torch_diloco.py`, or `python bare_torch_diloco.py` for one process.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

from farflung.outer import OuterLoop, diloco


def points(generator, count):
    """Points of a plane, and whether they lie inside a circle."""
    x = torch.randn(count, 2, generator=generator)
    return x, (x.norm(dim=1, keepdim=True) < 1.2).float()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--every", type=int, default=16, help="steps that each process takes alone")
    chosen = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0

    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(rank)  # each process has data of its own
    recipe = diloco(chosen.every)
    with OuterLoop(model, recipe) as outer:  # all processes start from the weights of rank 0
        for _ in range(chosen.steps):
            x, inside = points(generator, 64)
            nn.functional.binary_cross_entropy_with_logits(model(x), inside).backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.step()  # every 16th time, exchange what changed

    x, inside = points(torch.Generator().manual_seed(-1), 4096)
    accuracy = ((model(x) > 0) == inside).float().mean().item()
    stats = outer.stats()
    if rank == 0:
        print(f"{accuracy:.1%} of the points are classified correctly")
        print(f"{stats.rounds} rounds, {stats.bytes_sent} bytes sent")
    if dist.is_initialized():
        dist.destroy_process_group()
    return accuracy


if __name__ == "__main__":
    main()
