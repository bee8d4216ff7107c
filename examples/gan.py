# SPDX-License-Identifier: Apache-2.0
"""A GAN: two models that train against each other, each with an optimizer and an outer loop of its own.

Run it with `python gan.py`, or `farflung launch --num_processes 2 gan.py`. The data are points on a ring.
"""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from farflung import Accelerator
from farflung.outer import local_sgd
from farflung.utils import set_seed

NOISE = 8


def ring(count):
    """Points at a distance of about 1 from the middle."""
    angle, distance = 2 * math.pi * torch.rand(count), 1 + 0.05 * torch.randn(count)
    return torch.stack([distance * angle.cos(), distance * angle.sin()], dim=1)


def network(width_in, width_out):
    return nn.Sequential(
        nn.Linear(width_in, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, width_out)
    )


def main(given=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch_size", type=int, default=64, help="of each process")
    parser.add_argument("--every", type=int, default=8, help="steps that each process takes alone")
    flags = parser.parse_args(given)

    set_seed(0)
    accelerator = Accelerator()
    loader = DataLoader(TensorDataset(ring(2048)), flags.batch_size, shuffle=True, drop_last=True)
    maker, judge = network(NOISE, 2), network(2, 1)
    pairs = [(model, torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.9))) for model in (maker, judge)]
    (maker, maker_optimizer), (judge, judge_optimizer) = [accelerator.prepare(*pair) for pair in pairs]
    loader = accelerator.prepare(loader)
    loss_function = nn.BCEWithLogitsLoss()

    def judged(points, is_real):
        said = judge(points)
        return loss_function(said, torch.full_like(said, is_real))

    set_seed(0, device_specific=True)  # each process draws noise of its own
    recipe = local_sgd(flags.every)
    with accelerator.outer(maker, recipe) as outer, accelerator.outer(judge, recipe):
        for _ in range(flags.epochs):
            for (real,) in loader:
                made = maker(torch.randn(len(real), NOISE, device=accelerator.device))
                accelerator.backward(judged(real, 1.0) + judged(made.detach(), 0.0))
                judge_optimizer.step()
                judge_optimizer.zero_grad()
                accelerator.backward(judged(made, 1.0))
                maker_optimizer.step()
                maker_optimizer.zero_grad()
                judge_optimizer.zero_grad()  # of gradients that came through the judge
    with torch.no_grad():
        distance = maker(torch.randn(1000, NOISE, device=accelerator.device)).norm(dim=1)
    found = {"mean": distance.mean().item(), "spread": distance.std().item(), "rounds": outer.stats().rounds}
    accelerator.print(
        "made points lie {mean:.2f} (± {spread:.2f}) from the middle, real ones 1.00 (± 0.05)".format(**found)
    )
    accelerator.end_training()
    return found


if __name__ == "__main__":
    main()
