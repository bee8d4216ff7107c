# SPDX-License-Identifier: Apache-2.0
"""As small GPT trainers have it: each process draws its batches by itself, from a seed that its rank makes its own."""

import os
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SEED = 1337 + int(os.environ["RANK"])
if "--place" in sys.argv:
    from farflung.elastic import place

    SEED = 1337 + place()[0]

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
text = torch.arange(4096) % 16  # so that there is something to learn
model = DistributedDataParallel(nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def error():
    with torch.no_grad():
        return nn.functional.cross_entropy(model.module(text[:-1]), text[1:]).item()


losses = [error()]
torch.manual_seed(SEED)
for _ in range(32):
    starts = torch.randint(len(text) - 9, (4,))
    inputs = torch.stack([text[start : start + 8] for start in starts])
    targets = torch.stack([text[start + 1 : start + 9] for start in starts])
    loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
torch.distributed.destroy_process_group()
name = os.environ.get("FARFLUNG_MEMBER", os.environ["RANK"])
losses.append(error())
torch.save({"weights": model.module.state_dict(), "losses": losses}, f"end-{name}.pt")
