# SPDX-License-Identifier: Apache-2.0
"""A compiled model is not compiled again because a round has written to its weights."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from farflung import Accelerator
from farflung.comm.torch_group import TorchGroup
from farflung.outer import OuterLoop, diloco, eager_diloco, local_sgd, streaming_diloco
from farflung.testing.sim import run_replicas
from tests.accelerator.conftest import on_ranks

TORCHS_OWN = pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")


@pytest.mark.law("no-recompilation")
@TORCHS_OWN  # on a GPU
@pytest.mark.parametrize("recipe", [local_sgd(1), diloco(1), streaming_diloco(2, 2, delay=1), eager_diloco(2)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_round_recompiles_nothing(recipe, device):
    def compiled(group):
        counter, counts = CompileCounter(), []
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(device)
        step = torch.compile(model, backend=counter)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = OuterLoop(model, recipe, group).attach(optimizer)
        for _ in range(6):
            optimizer.zero_grad()
            step(torch.randn(8, 3, device=device)).square().mean().backward()
            before = model[0].weight.detach().clone()
            optimizer.step()
            counts.append(counter.frame_count)
            assert not torch.equal(before, model[0].weight)
        assert outer.stats().rounds >= 2
        assert counts[1] > 0
        assert len(set(counts[1:])) == 1

    torch._dynamo.reset()
    # Here too: torch 2.11 with CUDA, but without a GPU, dies where only threads that end compile.
    torch.compile(torch.sin, backend="eager")(torch.ones(1))
    run_replicas(compiled, 2)


@on_ranks(2, each=(6, 3, True))
def test_a_step_inside_a_compiled_function_counts_and_runs_its_round():
    group = TorchGroup()
    torch.manual_seed(group.rank)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="aot_eager")
    outer = OuterLoop(model, local_sgd(2)).attach(optimizer)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        step()
    weights = [one.tolist() for one in group.all_gather_small(model.weight.detach().flatten())]
    return outer.position, outer.stats().rounds, weights[0] == weights[1]


@TORCHS_OWN
def test_a_prepared_optimizer_steps_inside_a_compiled_function():
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model := nn.Linear(3, 1), torch.optim.SGD(model.parameters(), lr=0.1))
    step = torch.compile(optimizer.step, backend="eager")
    with accelerator.outer(model, local_sgd(2)) as outer:
        for _ in range(6):
            accelerator.backward(model(torch.randn(8, 3)).square().mean())
            step()
            optimizer.zero_grad()
        assert (outer.position, outer.stats().rounds) == (6, 3)
