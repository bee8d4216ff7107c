# SPDX-License-Identifier: Apache-2.0
"""What the scripts of this folder share: data made on the spot, small models, and flags."""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset


def circle(count, seed=0):
    """`count` points of a plane, and whether each lies inside a circle: pairs of `[2]` and a 0 or 1."""
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.norm(dim=1) < 1.2).long())


def network():
    """A network that tells one from the other."""
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))


def accuracy(accelerator, model, loader):
    """The share of a prepared loader's points that the model classifies correctly, of all processes together."""
    model.eval()
    hits = []
    with torch.no_grad():
        for x, inside in loader:
            hits.append(accelerator.gather_for_metrics(model(x).argmax(dim=1) == inside))
    model.train()
    return torch.cat(hits).float().mean().item()


def read_flags(doc, given=None, **defaults):
    """Read a script's flags: `--cpu`, and one for each of `defaults`, of the type of its value."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="train on CPUs where there are GPUs too")
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default: {value}")
    return parser.parse_args(given)
