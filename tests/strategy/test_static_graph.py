# SPDX-License-Identifier: Apache-2.0
"""DDP with a static graph trains as without, also where its first backward passes are not synchronized."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from farflung import Accelerator
from farflung.base.errors import ConfigError
from farflung.outer import local_sgd
from farflung.testing.ranks import run_ranks
from farflung.utils import DistributedDataParallelKwargs
from tests.accelerator.conftest import on_ranks


class Model(nn.Module):
    """One layer is used twice and one not at all, which is what a static graph is for; and it has a buffer."""

    def __init__(self):
        super().__init__()
        self.twice, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.once, self.unused = nn.Linear(4, 1), nn.Linear(2, 2)

    def forward(self, x):
        return self.once(self.norm(self.twice(self.twice(x))))


def prepared(static, steps=1, **options):
    torch.manual_seed(0)
    handler = DistributedDataParallelKwargs(static_graph=static, find_unused_parameters=not static, **options)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, kwargs_handlers=[handler])
    model = Model()
    batches = torch.Generator().manual_seed(accelerator.process_index)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)), batches


def loss_of(model, batches):
    return model(torch.randn(8, 4, generator=batches)).square().mean()


def step(accelerator, model, optimizer, batches):
    """Train on a batch, with a step of the optimizer if there is one; return the sum of a gradient."""
    accelerator.backward(loss_of(model, batches))
    gradient = accelerator.unwrap_model(model).twice.weight.grad.sum().item()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return gradient


def accumulates(static):
    accelerator, model, optimizer, batches = prepared(static, steps=3)
    for _ in range(9):
        with accelerator.accumulate(model):
            yield step(accelerator, model, optimizer, batches)
    yield model


def skips_by_hand(static):
    accelerator, model, optimizer, batches = prepared(static)
    for number in range(8):
        is_synchronized = number in (1, 2, 4, 7)
        with nullcontext() if is_synchronized else accelerator.no_sync(model):
            yield step(accelerator, model, optimizer if is_synchronized else None, batches)
    yield model


def trains_alone_between_rounds(static):
    accelerator, model, optimizer, batches = prepared(static)
    with accelerator.outer(model, local_sgd(3)):
        for _ in range(7):
            yield step(accelerator, model, optimizer, batches)
    for _ in range(2):  # and together again
        yield step(accelerator, model, optimizer, batches)
    yield model


def trained(train, static):
    *gradients, model = train(static)
    return gradients, [one.detach() for one in model.parameters()]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("train", [accumulates, skips_by_hand, trains_alone_between_rounds])
def test_gradients_are_those_of_a_graph_that_is_not_static(train, size):
    for static, other in zip(
        run_ranks(trained, size, train, True), run_ranks(trained, size, train, False), strict=True
    ):
        torch.testing.assert_close(static, other)


@on_ranks(2)
def test_where_the_hook_is_torchs_own_one_sentence_says_what_to_leave_out():
    accelerator, model, _, batches = prepared(True, comm_hook="power_sgd")
    with pytest.raises(ConfigError, match="static_graph=True with comm_hook=power_sgd"), accelerator.no_sync(model):
        accelerator.backward(loss_of(model, batches))
