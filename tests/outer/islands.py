# SPDX-License-Identifier: Apache-2.0
"""What tests of the outer loop over islands share: a grid of ranks, and models that are trained in its rows."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from farflung.comm.shards import full
from farflung.comm.torch_group import TorchGroup
from farflung.outer import OuterLoop
from tests.outer.replicas import RATE


class Grid:
    """Two rows of ranks, in each of which a replica is trained, and columns, in which replicas are averaged."""

    def __init__(self):
        shape = (2, dist.get_world_size() // 2)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
        self.column, self.island = (TorchGroup(self.mesh.get_group(name)) for name in self.mesh.mesh_dim_names)

    def sharded(self, model):
        """Shard a model over the row: its body, and then the rest."""
        fully_shard(model.body, mesh=self.mesh["dp_shard"])
        return fully_shard(model, mesh=self.mesh["dp_shard"])

    def in_step(self, model):
        """Let a row's ranks, each of which holds the whole model, average its gradients."""
        return DistributedDataParallel(model, process_group=self.island.pg)


class Uneven(nn.Module):
    """Layers of which two ranks hold different numbers of rows, or one of them none; a bias is frozen.

    Rows have 16 values: torch's fused SGD, the outer optimizer, rounds what does not fill its vectors in another way.
    """

    def __init__(self):
        torch.manual_seed(3)
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16, affine=False)
        self.five, self.one = nn.Linear(16, 5, bias=False), nn.Linear(16, 1, bias=False)
        self.body.bias.requires_grad_(False)

    def forward(self, x):
        """Map `[n, 16]` to `[n, 6]`."""
        inner = self.norm(self.body(x).tanh())
        return torch.cat([self.five(inner), self.one(inner)], dim=1)


class IslandRun:
    """A model that an island trains, `sharded` or `in_step` by DDP, or that each rank trains `alone`, and its loop."""

    def __init__(self, grid, recipe, wrap="sharded", **options):
        self.index, self.rounds = grid.column.rank, []
        self.bare = model = Uneven()
        self.model = model if wrap == "alone" else getattr(grid, wrap)(model)
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
        options = {"bucket_bytes": 256, "inner": self.optimizer} | options
        self.outer = OuterLoop(model, recipe, grid.column, island=None if wrap == "alone" else grid.island, **options)
        self.outer.listeners.append(self.rounds.append)
        self.optimizer.register_step_pre_hook(lambda *_: self.outer.average_gradients())

    def steps(self, *numbers):
        """Train on data of this island: the same on all its ranks, so that the mean of their gradients is exact."""
        for number in numbers:
            self.backward(number)
            self.optimizer.step()
            self.outer.step()
        return self

    def backward(self, number):
        """Compute the gradients of a step."""
        generator = torch.Generator().manual_seed(1000 * number + self.index)
        inputs, targets = torch.randn(4, 16, generator=generator), torch.randn(4, 6, generator=generator)
        self.optimizer.zero_grad()
        (self.model(inputs) - targets).square().mean().backward()

    def values(self):
        """Copies of all parameters and buffers, whole ones: a collective of the row where they are shards."""
        return {name: full(value).clone() for name, value in self.bare.state_dict().items()}
