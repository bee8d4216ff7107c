# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer as it is: `farflung launch --num_processes 2 --outer diloco examples/lightning_diloco.py`.

What is validated is what is saved, on every rank, though replicas train by themselves between two rounds.
"""

import argparse
import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def points(seed, count=704):
    """Points of a smooth function."""
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :4].sin().sum(1, keepdim=True))


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(given=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    flags = parser.parse_args(given)
    lightning.seed_everything(0)
    module = Regression()
    trainer = lightning.Trainer(
        max_epochs=flags.epochs,
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy="ddp",
    )
    trainer.fit(module, DataLoader(points(0), 32, shuffle=True), DataLoader(points(1), 64))
    loss = trainer.callback_metrics["val"].item()
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    print(f"rank {trainer.global_rank}: validated {loss:.6f}, weights {weights.double().sum().item():.12f}")


if __name__ == "__main__":
    main()
