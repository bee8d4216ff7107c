# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a run that is stopped or killed, in the middle of an epoch too, continues as if it had not been.

Run it with `python checkpointing.py --folder run --stop_after 20`, and again without `--stop_after`. With
`--kill_after 20` it is killed at once, and repeats the steps since the last checkpoint.
"""

import os
import signal
from pathlib import Path

import torch
from tiny import accuracy, circle, network, read_flags
from torch import nn
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.utils import ProjectConfiguration, set_seed


class Progress:
    """What the script itself counts; kept in each checkpoint."""

    def __init__(self):
        self.updates = 0

    def state_dict(self):
        return {"updates": self.updates}

    def load_state_dict(self, state):
        self.updates = state["updates"]


def main(given=None):
    flags = read_flags(
        __doc__, given, folder="run", epochs=4, batch_size=32, save_every=7, stop_after=0, kill_after=0, lr=0.01
    )
    set_seed(0)
    project = ProjectConfiguration(project_dir=flags.folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=flags.cpu, project_config=project)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr)
    train = DataLoader(circle(1000), batch_size=flags.batch_size, shuffle=True)
    test = DataLoader(circle(500, seed=1), batch_size=100)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if Path(flags.folder, "checkpoints").exists():
        accelerator.load_state("latest")  # the loader continues where it was, too

    for _ in range(train.iteration, flags.epochs):
        for x, inside in train:
            accelerator.backward(nn.functional.cross_entropy(model(x), inside))
            optimizer.step()
            optimizer.zero_grad()
            progress.updates += 1
            if progress.updates % flags.save_every == 0:
                accelerator.save_state()  # run/checkpoints/checkpoint_N; the two newest are kept
            if progress.updates == flags.kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
            if progress.updates == flags.stop_after:
                accelerator.print(f"stopped after {progress.updates} updates")
                accelerator.end_training()
                return {"updates": progress.updates}

    found = accuracy(accelerator, model, test)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    accelerator.print(f"{found:.1%} classified correctly after {progress.updates} updates")
    accelerator.end_training()
    return {"accuracy": found, "updates": progress.updates, "weights": weights.tolist()}


if __name__ == "__main__":
    main()
