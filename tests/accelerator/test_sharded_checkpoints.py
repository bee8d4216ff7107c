# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of sharded models: written in parts, whole or in other parts again, the run goes on as it was."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.config.sharding import FullyShardedDataParallelPlugin
from farflung.state import AcceleratorState, PartialState
from farflung.testing.ranks import run_ranks
from farflung.utils import ParallelismConfig

STEPS = 6


class Net(nn.Module):
    """Tied and frozen weights, sizes that no number of ranks divides, and fewer rows than ranks."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.last = nn.Linear(3, 1, bias=False)
        self.tied = nn.Linear(3, 1, bias=False)
        self.tied.weight = self.last.weight
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        self.seen += 1
        h = self.frozen(self.inner(x))
        return self.last(h) + self.tied(h)


class Run:
    """The objects of one rank, with the model sharded over rows of `columns` ranks; 1: not at all."""

    def __init__(self, columns, net=Net, **asked):
        AcceleratorState._reset_state(reset_partial_state=False)
        size = PartialState(cpu=True).num_processes
        settings = {}
        if columns > 1:
            wraps = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 30}
            settings["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, **wraps, **asked)
            settings["parallelism_config"] = ParallelismConfig(dp_replicate_size=size // columns, dp_shard_size=columns)
        self.accelerator = Accelerator(cpu=True, scheduler_ticks="per_update", **settings)
        torch.manual_seed(0)
        net = net()
        trained = [{"params": net.inner.parameters(), "lr": 0.02}, {"params": [net.last.weight]}]
        optimizer = torch.optim.AdamW(trained, lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        data = DataLoader(torch.randn(64, 5, generator=torch.Generator().manual_seed(1)), 2)
        self.model, self.optimizer, self.scheduler, self.data = self.accelerator.prepare(
            net, optimizer, scheduler, data
        )

    def train(self, steps):
        """Train on the same batch on all ranks, so that the layout does not matter; return the losses."""
        losses = []
        for step in steps:
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            loss = self.model(x).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def write(folder, columns):
    run = Run(columns)
    before = run.train(range(3))
    run.accelerator.save_state(folder / "at_once")
    run.accelerator.save_state(folder / "behind", block=False)
    state = run.accelerator.get_state_dict(run.model)
    run.accelerator.save_model(run.model, folder / "whole")
    run.accelerator.save_model(run.model, folder / "cut", max_shard_size=64)
    after = run.train(range(3, STEPS))
    run.accelerator._checkpointer.settle()
    return before, after, {name: value.clone() for name, value in state.items()}


def go_on(folder, columns):
    """Load each checkpoint in `folder` into freshly made objects, and return the losses that follow."""
    losses = []
    for name in ("at_once", "behind"):
        run = Run(columns)
        run.accelerator.load_state(folder / name)
        losses.append(run.train(range(3, STEPS)))
    return losses


def whole_run():
    run = Run(1)
    return run.train(range(STEPS)), {name: value.clone() for name, value in run.model.state_dict().items()}


@pytest.mark.ranks
def test_a_run_on_2x2_goes_on_in_any_other_layout(tmp_path):
    ranks = run_ranks(write, 4, tmp_path, 2)
    before, after, state = ranks[0]
    assert [rank[2] for rank in ranks[1:]] == [{}, {}, {}]
    (one,) = run_ranks(whole_run, 1)
    assert one[0] == pytest.approx(before + after, abs=1e-6)
    for columns in (4, 1, 2):
        for losses in run_ranks(go_on, 4, tmp_path, columns):
            assert losses == [pytest.approx(after, abs=1e-6)] * 2
    assert run_ranks(go_on, 1, tmp_path, 1) == [[pytest.approx(after, abs=1e-6)] * 2]
