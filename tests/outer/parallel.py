# SPDX-License-Identifier: Apache-2.0
"""Models that the ranks of an island train by tensor, context or expert parallelism, alone or with FSDP2 over it."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from farflung.comm.shards import full
from farflung.outer import OuterLoop
from tests.outer.replicas import RATE

# Sizes of an island's dimensions.
LAYOUTS = {
    "tp": {"tp": 2},
    "fsdp+tp": {"dp": 2, "tp": 2},
    "hsdp": {"copies": 2, "dp": 2},
    "cp": {"cp": 2},
    "fsdp+cp": {"dp": 2, "cp": 2},
    "loss parallel": {"tp": 2},
    "ep": {"ep": 2},
}


class Block(nn.Module):
    """Two layers around a nonlinearity, behind a norm; `five` rows can't be cut into equal parts."""

    inner = 10
    loss = staticmethod(functional.mse_loss)

    def __init__(self):
        torch.manual_seed(3)
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, self.inner), nn.Linear(self.inner, 16, bias=False)
        self.last = nn.RMSNorm(16)
        self.five = nn.Linear(16, 5, bias=False)
        self.up.bias.requires_grad_(False)

    def forward(self, x):
        """Map `[n, 4, 16]` to `[n, 4, 5]`."""
        return self.five(self.last(self.down(self.up(self.norm(x)).tanh())))


class Attending(Block):
    """The same behind attention without a mask: torch's context parallelism on CPUs knows no other."""

    def forward(self, x):
        values = x[:, None]
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(x + functional.scaled_dot_product_attention(values, values, values)[:, 0])


class Rows(Block):
    """The same with matrices whose parts on a rank of any layout consist of whole blocks of 8 values."""

    inner = 16


class Classes(Block):
    """The same with classes to tell apart."""

    @staticmethod
    def loss(outputs, targets):
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(0, 1).argmax(-1))


class Experts(Block):
    """The same behind a mixture of three experts, which two ranks can't have equal numbers of."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 3, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 16, 16) / 4)

    def forward(self, x):
        values, gates = x.flatten(0, 1), self.router(x).softmax(-1).flatten(0, 1).T[..., None]
        if isinstance(self.experts, DTensor):
            mesh = self.experts.device_mesh
            values, gates = (DTensor.from_local(one, mesh, [Replicate()]) for one in (values, gates))
        mixed = (gates * torch.matmul(values.expand(3, -1, -1), self.experts)).sum(0)
        if isinstance(mixed, DTensor):
            mixed = mixed.redistribute(placements=[Replicate()]).to_local()
        return super().forward(x + mixed.view_as(x))


MADE = {"cp": Attending, "fsdp+cp": Attending, "loss parallel": Classes, "ep": Experts}


PLAN = {
    # The first norm computes with parts of the sequences, so its gradients are summands; the last one is plain.
    "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False),
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(),
    "five": ColwiseParallel(output_layouts=Replicate()),
}
IN_CLASSES = {"five": ColwiseParallel(use_local_output=False)}


def average(parameters, group):
    """Average gradients over the ranks of a group."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad.div_(group.size()), group=group)


class ParallelRun:
    """A model that an island trains, its optimizer and its outer loop, in fp64.

    Args:
        layout: one of `LAYOUTS`; None: an island is one rank.
        made: makes the model.
        mesh: of a layout whose replicas the loop learns from a membership.
    """

    def __init__(self, recipe, layout=None, made=Block, mesh=None, **options):
        sizes = LAYOUTS.get(layout, {})
        if mesh is None:
            mesh = init_device_mesh("cpu", (2, *sizes.values()), mesh_dim_names=("replica", *sizes))
            options |= {"mesh": mesh, "outer": "replica"}
        self.mesh, self.index = mesh, mesh.get_local_rank("replica")
        self.model = model = made().double()
        if "tp" in sizes:
            parallelize_module(model, mesh["tp"], PLAN if layout != "loss parallel" else PLAN | IN_CLASSES)
        if "ep" in sizes:
            model.experts = nn.Parameter(distribute_tensor(model.experts, mesh["ep"], [Shard(0)]))
        if "dp" in sizes:
            shards = mesh[("copies", "dp")] if "copies" in sizes else mesh["dp"]
            shards = mesh[("dp", "cp")]._flatten("dp_cp") if "cp" in sizes else shards
            fully_shard(model.up, mesh=shards)
            fully_shard(model, mesh=shards)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=RATE, foreach=False)
        self.rounds, self.in_classes = [], layout == "loss parallel"
        options = {"bucket_bytes": 256, "inner": self.optimizer} | options
        self.outer = OuterLoop(model, recipe, **options)
        self.outer.listeners.append(self.rounds.append)
        if layout == "cp":
            self.optimizer.register_step_pre_hook(lambda *_: average(trained, mesh["cp"].get_group()))
        self.optimizer.register_step_pre_hook(lambda *_: self.outer.average_gradients())

    def steps(self, *numbers):
        """Train on data of this island, the same on all its ranks."""
        for number in numbers:
            generator = torch.Generator().manual_seed(1000 * number + self.index)
            inputs = torch.randn(4, 4, 16, generator=generator, dtype=torch.float64)
            targets = torch.randn(4, 4, 5, generator=generator, dtype=torch.float64)
            self.optimizer.zero_grad()
            with self.cut(inputs, targets), loss_parallel() if self.in_classes else nullcontext():
                self.model.loss(self.model(inputs), targets).backward()
            self.optimizer.step()
            self.outer.step()
        return self

    def cut(self, *buffers):
        """Cut sequences over the ranks of context parallelism."""
        if "cp" not in self.mesh.mesh_dim_names:
            return nullcontext()
        return context_parallel(self.mesh["cp"], buffers=list(buffers), buffer_seq_dims=[1] * len(buffers))

    def values(self):
        """Copies of all parameters, whole ones: a collective of the island."""
        return {name: full(value.detach()).clone() for name, value in self.model.named_parameters()}
