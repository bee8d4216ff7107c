# SPDX-License-Identifier: Apache-2.0
"""`join_uneven_inputs`: ranks with different numbers of batches train as one process would, and none waits in vain."""

import time
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from farflung import Accelerator, ParallelismConfig
from farflung.accelerator.session import opened_session
from farflung.base.errors import ConfigError, RankFailure
from farflung.base.torch_internals import num_collectives
from farflung.process.world import joined_world
from farflung.state import AcceleratorState
from farflung.testing.patience import patience
from farflung.testing.ranks import run_ranks
from farflung.utils import GradScalerKwargs
from tests.accelerator.conftest import on_ranks

# For each rank the sizes of its batches. Ranks end in the middle of windows, at their ends, and in the same step.
SHARES = {
    2: [[(3, 5, 2), (4, 1, 6, 2)], [(2, 7, 1, 3, 4), (5,)], [(4, 2), (1, 3, 5)]],
    4: [[(3,), (1, 4, 2), (5, 2, 2, 6, 1), (2, 2)]],
}
PLANS = [(1, True, "no"), (2, True, "no"), (1, False, "no"), (2, False, "no"), (2, True, "fp16")]


def tokens(rank, number, count):
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(count, 4, generator=generator)


def network():
    torch.manual_seed(3)
    return nn.Linear(4, 1)


def loss_of(model, x):
    return (model(x) - 1.0).pow(2).sum()


class Share:
    """What a prepared loader tells the loop, over batches that only this rank has."""

    remainder = -1
    end_of_dataloader = False

    def __init__(self, accelerator, sizes):
        self.loop, self.rank, self.sizes = opened_session().loop, accelerator.process_index, sizes
        self.loader = self

    def __iter__(self):
        try:
            for number, count in enumerate(self.sizes):
                self.end_of_dataloader = number == len(self.sizes) - 1
                self.loop.enter(self)
                yield tokens(self.rank, number, count)
        finally:
            self.loop.leave(self)


def windows(shares, num_steps):
    """The (rank, number, count) in each window of all ranks: it ends where it is full, or any rank's data end."""
    window = []
    size = 0
    for number in range(max(map(len, shares))):
        window += [(rank, number, sizes[number]) for rank, sizes in enumerate(shares) if number < len(sizes)]
        size += 1
        if size == num_steps or any(number == len(sizes) - 1 for sizes in shares):
            yield window
            window, size = [], 0


def gradients_of(model):
    return torch.cat([parameter.grad.reshape(-1).clone() for parameter in model.parameters()])


def trained_by_one(shares, num_steps, weighted):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for window in windows(shares, num_steps):
        optimizer.zero_grad()
        if weighted:
            loss = sum(loss_of(model, tokens(*part)) for part in window) / sum(count for _, _, count in window)
        else:  # the mean over each rank's part of the window, divided by all ranks
            length = max(sum(part[0] == rank for part in window) for rank in range(len(shares)))
            loss = sum(loss_of(model, tokens(*part)) / part[2] for part in window) / length / len(shares)
        loss.backward()
        seen.append(gradients_of(model))
        optimizer.step()
    return seen, nn.utils.parameters_to_vector(model.parameters()).detach()


def trained_together(shares, num_steps, weighted, precision):
    handlers = [GradScalerKwargs(init_scale=256.0)] if precision == "fp16" else []
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=num_steps, mixed_precision=precision, kwargs_handlers=handlers
    )
    bare = network()
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9))
    seen = []
    with accelerator.join_uneven_inputs([model]):
        for x in Share(accelerator, shares[accelerator.process_index]):
            with accelerator.accumulate(model):
                loss = loss_of(model, x)
                if weighted:
                    accelerator.backward(loss, num_items=len(x))
                else:
                    accelerator.backward(loss / len(x))
                if accelerator.sync_gradients:
                    accelerator.unscale_gradients(optimizer)
                    seen.append(gradients_of(model))
                optimizer.step()
                optimizer.zero_grad()
    AcceleratorState._reset_state()  # the next one may have another precision
    return seen, nn.utils.parameters_to_vector(bare.parameters()).detach()


def all_trainings(many):
    return [trained_together(shares, *plan) for shares in many for plan in PLANS]


@pytest.mark.parametrize("ranks", SHARES)
def test_ranks_train_as_one_process_would_on_what_those_with_data_bring(ranks):
    outcomes = run_ranks(all_trainings, ranks, SHARES[ranks])
    cases = [(shares, *plan) for shares in SHARES[ranks] for plan in PLANS]
    for number, (shares, num_steps, weighted, precision) in enumerate(cases):
        expected, final = trained_by_one(shares, num_steps, weighted)
        tolerance = 1e-6 if precision == "no" else 5e-3
        for seen, weights in (outcome[number] for outcome in outcomes):
            for mine, whole in zip(seen, expected, strict=False):  # a rank without data sees no more gradients
                assert torch.allclose(mine, whole, atol=tolerance, rtol=tolerance)
            assert torch.allclose(weights, final, atol=tolerance, rtol=tolerance)
        assert max(len(outcome[number][0]) for outcome in outcomes) == len(expected)


@on_ranks(4)
def test_replicas_have_the_same_weights_moments_rates_and_scales_after_each_uneven_epoch():
    scaling = GradScalerKwargs(init_scale=256.0, growth_interval=2)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[scaling])
    bare = network()
    data = DataLoader(TensorDataset(tokens(0, 0, 10)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(bare, torch.optim.Adam(bare.parameters(), lr=0.1), data)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 0.9))
    for _ in range(3):
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for (x,) in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, x), num_items=len(x))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
        state = optimizer.state_dict()["state"][0]
        numbers = torch.tensor([*scheduler.get_last_lr(), state["step"], accelerator.scaler.get_scale()])
        mine = torch.cat([bare.weight.detach().view(-1), bare.bias.detach(), state["exp_avg"].view(-1), numbers])
        first, *others = accelerator.gather(mine.unsqueeze(0))
        assert all(torch.equal(first, other) for other in others)
    assert state["step"] == 6  # two in each epoch, although three of the ranks had one batch
    before = num_collectives(joined_world().group.pg)
    with accelerator.no_sync(model):
        model(tokens(0, 0, 1))
    assert num_collectives(joined_world().group.pg) == before  # outside the block no pass asks who has joined


def breaks_off(fails):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(network())
    began = time.monotonic()
    try:
        with accelerator.join_uneven_inputs([model]):
            for number in range(1 + 3 * accelerator.process_index):
                if accelerator.process_index == 2 and number == fails:
                    raise ValueError("no such file")
                x = tokens(0, number, 2)
                accelerator.backward(loss_of(model, x), num_items=len(x))
    except (RankFailure, ValueError) as error:
        time.sleep(2 if isinstance(error, ValueError) else 0)  # the process that failed goes on elsewhere
        return type(error).__name__, str(error), time.monotonic() - began
    return None


@pytest.mark.parametrize("fails", [0, 2])
def test_a_rank_that_fails_is_named_to_those_with_and_without_data(fails):
    first, second, third = run_ranks(breaks_off, 3, fails)
    assert third[0] == "ValueError"
    for kind, said, seconds in (first, second):
        assert kind == "RankFailure"
        assert "rank 2 left (ValueError: no such file)" in said
        assert seconds < patience(8)


@on_ranks(2)
def test_a_model_that_is_not_under_ddp_is_left_alone_with_a_warning():
    accelerator = Accelerator(cpu=True)
    model, copy = accelerator.prepare(network()), network()
    with ExitStack() as stack:
        with pytest.warns(UserWarning, match="a Linear is not wrapped in DDP, so it is not joined"):
            stack.enter_context(accelerator.join_uneven_inputs([model, copy]))
        for number in range(1 + accelerator.process_index):
            model(tokens(number, 0, 2)).sum().backward()
            copy(tokens(number, 0, 2))


@on_ranks(2)
def test_a_sharded_model_is_refused():
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=2))
    model = accelerator.prepare(network())
    with pytest.raises(ConfigError, match="is sharded"), accelerator.join_uneven_inputs([model]):
        pass


def test_alone_there_is_nothing_to_join():
    model = network()
    with Accelerator(cpu=True).join_uneven_inputs([model]):
        model(tokens(0, 0, 2)).sum().backward()
