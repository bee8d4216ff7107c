# SPDX-License-Identifier: Apache-2.0
"""As tutorials of DDP have it: each epoch begins with a look at one batch, and the first rank saves a snapshot."""

import os
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 4

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True), torch.arange(96))
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(data, batch_size=4, shuffle=False, sampler=DistributedSampler(data))


def error():
    with torch.no_grad():
        return nn.functional.mse_loss(model.module(inputs), data.tensors[1]).item()


seen, losses = [], [error()]
for epoch in range(EPOCHS):
    size = len(next(iter(loader))[0])
    print(f"epoch {epoch}: {size} samples a batch, {len(loader)} steps", flush=True)
    for source, target, number in loader:
        seen += [(epoch, one) for one in number.tolist()]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(source), target)
        loss.backward()
        optimizer.step()
        time.sleep(0.01)
    if int(os.environ["RANK"]) == 0:
        torch.save({"model": model.module.state_dict(), "epoch": epoch}, "snapshot.pt")
torch.distributed.destroy_process_group()
name = os.environ.get("FARFLUNG_MEMBER", os.environ["RANK"])
losses.append(error())
torch.save({"weights": model.module.state_dict(), "seen": seen, "losses": losses}, f"end-{name}.pt")
