# SPDX-License-Identifier: Apache-2.0
"""Law 18: a compiled model is not compiled again because its weights were averaged."""

import pytest
import torch
from torch import nn

from laconic.comm.group import SoloGroup
from laconic.outer import OuterLoop, diloco, local_sgd


class Twice(SoloGroup):
    """Two ranks that hold the same, as far as a loop can tell."""

    size = 2

    def meet(self, x):
        return torch.stack([x, x])


@pytest.mark.parametrize("recipe", [local_sgd(1), diloco(1)])
def test_a_round_recompiles_nothing(recipe):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = OuterLoop(model, recipe, Twice())

    def step():
        optimizer.zero_grad()
        compiled(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()

    step()
    step()
    before = [p.detach().clone() for p in model.parameters()]
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(3):
            outer.step()
            step()
    assert outer.stats().rounds == 3
    assert not torch.equal(before[0], model[0].weight)
