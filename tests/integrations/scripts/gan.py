# SPDX-License-Identifier: Apache-2.0
"""As GANs have it: two nets, each in DDP and with an optimizer of its own, step in turns; one is evaluated between.

With an argument an Accelerator prepares them.
"""

import os
import sys
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from farflung import Accelerator

EPOCHS = 2

accelerator = Accelerator(cpu=True) if sys.argv[1:] else None
if accelerator is None:
    torch.distributed.init_process_group("gloo")
try:
    os.mkdir("slow")
    pause_s = 0.02
except FileExistsError:
    pause_s = 0.002  # one replica is faster than the other
name = os.environ.get("FARFLUNG_MEMBER", os.environ["RANK"])
torch.manual_seed(0)
data = TensorDataset(torch.randn(100, 4) + 2, torch.arange(100))
nets = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, size)) for size in (4, 1)]
optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in nets]
if accelerator is None:
    nets = [DistributedDataParallel(net) for net in nets]
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
else:
    loader = DataLoader(data, batch_size=4, shuffle=True)
    *nets, optimizers[0], optimizers[1], loader = accelerator.prepare(*nets, *optimizers, loader)
generator, critic = nets
backward = torch.Tensor.backward if accelerator is None else accelerator.backward
torch.manual_seed(int(name))


def error():
    """The critic's on real data."""
    with torch.no_grad():
        return (getattr(critic, "module", critic)(data.tensors[0]) - 1).square().mean().item()


seen, losses = [], [error()]
for epoch in range(EPOCHS):
    if accelerator is None:
        sampler.set_epoch(epoch)
    for number, (real, which) in enumerate(loader):
        seen += [(epoch, one) for one in which.tolist()]
        made = generator(torch.randn(4, 4))
        optimizers[1].zero_grad()
        backward(critic(made.detach()).square().mean() + (critic(real) - 1).square().mean())
        optimizers[1].step()
        if epoch == 0 or number % 3 == 0:  # later the critic makes three steps for each of the generator's
            optimizers[0].zero_grad()
            backward((critic(made if epoch == 0 else generator(torch.randn(4, 4))) - 1).square().mean())
            optimizers[0].step()
        if number % 5 == 0:
            generator.eval()
            generator(torch.randn(4, 4))
            generator.train()
        time.sleep(pause_s)
if accelerator is None:
    torch.distributed.destroy_process_group()
else:
    accelerator.end_training()
weights = nn.ModuleList(getattr(net, "module", net) for net in nets).state_dict()
losses.append(error())
torch.save({"weights": weights, "seen": seen, "losses": losses}, f"end-{name}.pt")
