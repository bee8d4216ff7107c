# SPDX-License-Identifier: Apache-2.0
"""As GANs have it: two nets, each in DDP and with an optimizer of its own, step in turns; one is evaluated between."""

import os
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 2

torch.distributed.init_process_group("gloo")
try:
    os.mkdir("slow")
    pause_s = 0.02
except FileExistsError:
    pause_s = 0.002  # one replica is faster than the other
name = os.environ.get("FARFLUNG_MEMBER", os.environ["RANK"])
torch.manual_seed(0)
data = TensorDataset(torch.randn(100, 4) + 2, torch.arange(100))
nets = [DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, size))) for size in (4, 1)]
generator, critic = nets
optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in nets]
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
torch.manual_seed(int(name))
seen = []
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for number, (real, which) in enumerate(loader):
        seen += [(epoch, one) for one in which.tolist()]
        made = generator(torch.randn(4, 4))
        optimizers[1].zero_grad()
        (critic(made.detach()).square().mean() + (critic(real) - 1).square().mean()).backward()
        optimizers[1].step()
        if epoch == 0 or number % 3 == 0:  # later the critic makes three steps for each of the generator's
            optimizers[0].zero_grad()
            (critic(made if epoch == 0 else generator(torch.randn(4, 4))) - 1).square().mean().backward()
            optimizers[0].step()
        if number % 5 == 0:
            generator.eval()
            generator(torch.randn(4, 4))
            generator.train()
        time.sleep(pause_s)
torch.distributed.destroy_process_group()
weights = nn.ModuleList(net.module for net in nets).state_dict()
torch.save({"weights": weights, "seen": seen}, f"end-{name}.pt")
