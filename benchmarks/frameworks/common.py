# SPDX-License-Identifier: Apache-2.0
"""What the programs share: a small task, a loop in torch's DDP, and the report that each rank writes at the end."""

import copy
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NAME, FOLDER = sys.argv[1], Path(sys.argv[2])  # the program, and where its ranks write
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
SAVED = FOLDER / f"saved{os.environ.get('FARFLUNG_MEMBER', '')}"  # files of a replica that comes and goes are its own
EPOCHS, STEPS, BATCH = 4, 11, 16  # of an epoch, on each of two ranks


def task(seed=0, count=2 * STEPS * BATCH):
    """Points of a smooth function: `[count, 8]` and `[count, 1]`."""
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :4].sin().sum(1, keepdim=True) - x[:, 4:].square().mean(1, keepdim=True))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def squared_error(net, batch):
    return nn.functional.mse_loss(net(batch[0]), batch[1])


def loss_on(net, held_out=None, loss_of=squared_error):
    """The loss on data that no rank has trained on, in eval mode; the modes stay as they were."""
    modes = [(module, module.training) for module in net.modules()]
    for module, _ in modes:
        module.training = False  # unlike eval(), nothing can notice
    with torch.no_grad():
        loss = loss_of(net, (task(1) if held_out is None else held_out)[:]).item()
    for module, mode in modes:
        module.training = mode
    return loss


def report(net, validated, saved, loss=loss_on):
    """Write what this rank ended with, after the framework's own end.

    Args:
        net: the trained module, without wrappers.
        validated: the loss of the latest validation, by `loss`.
        saved: the state dict in the file that the framework wrote then.
        loss: a function of a module.
    """
    digest = hashlib.sha256()
    for value in (*net.parameters(), *net.buffers()):  # in memory, not by state_dict(), which may be others
        digest.update(value.detach().cpu().contiguous().float().numpy().tobytes())
    again = copy.deepcopy(net)
    again.load_state_dict(
        dict(zip(again.state_dict(), saved.values(), strict=True))
    )  # a copy of Keras' has other names
    content = {"weights": digest.hexdigest()[:12], "loss": loss(net), "validated": validated, "saved": loss(again)}
    (FOLDER / f"rank-{os.getpid()}.json").write_text(json.dumps(content))


def newest(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_mtime_ns)


def train_in_ddp(net, loss_of=squared_error, data=None, held_out=None, optimizer=None):
    """A loop around torch's DDP, for libraries that leave the loop to the user; it validates in mid-epoch too."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(net)
    optimizer = optimizer or torch.optim.Adam(net.parameters(), lr=0.01)
    data = data or task()
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data))
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for step, batch in enumerate(loader):
            if step == STEPS // 2:
                model.eval()
                loss_on(net, held_out, loss_of)
                model.train()
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.barrier()
    model.eval()
    validated = loss_on(net, held_out, loss_of)
    torch.save(net.state_dict(), path := FOLDER / f"saved-{os.getpid()}.pt")
    report(net, validated, torch.load(path), lambda module: loss_on(module, held_out, loss_of))
    dist.destroy_process_group()
