# SPDX-License-Identifier: Apache-2.0
"""`Accelerator(skip_nonfinite=)`: steps with a loss or gradients that are not finite on any rank are skipped on all."""

import random

import pytest
import torch
from torch import nn

from farflung import Accelerator, FullyShardedDataParallelPlugin
from farflung.base.errors import ConfigError, NonFinite, Unsupported
from farflung.base.events import EVENTS, Kind, Sink
from farflung.comm.shards import full
from farflung.state import AcceleratorState
from farflung.testing.ranks import run_ranks

STEPS = 12
POISONS = ("nan", "inf", "gradient", "loss")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x, poison=""):
        if poison in ("nan", "inf"):
            x = x * float(poison)
        y = self.second(torch.tanh(self.norm(self.first(x)))).square().mean()
        if poison == "gradient":  # of one weight alone, which one rank of a sharded model holds
            bias = self.second.bias.to_local() if hasattr(self.second.bias, "to_local") else self.second.bias
            y = y + (bias[:1] * torch.zeros(1)).sqrt().sum()
        return y + float("inf") if poison == "loss" else y  # whose gradients are finite


def run(layout, poisoned, skips, accumulation=1, clips=False, **options):
    """Train through all steps, or but for the poisoned ones; return weights and buffers, and what was counted."""
    AcceleratorState._reset_state()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if layout == "fsdp" else None
    most = STEPS if skips else None
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=accumulation, skip_nonfinite=most, **options
    )
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    rates, seen = [], []
    for step in range(STEPS):
        odd = {place for place in poisoned if place[0] == step}
        if odd and not skips:
            continue
        for micro in range(accumulation):
            with accelerator.accumulate(model):
                torch.manual_seed(100 * step + 10 * micro + accelerator.process_index)
                poison = {(rank, at): kind for _, rank, at, kind in odd}.get((accelerator.process_index, micro), "")
                accelerator.backward(model(torch.randn(3, 4), poison))
                if clips:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                if accelerator.sync_gradients:
                    assert accelerator.optimizer_step_was_skipped == bool(odd)
                optimizer.zero_grad()
        rates.append(schedule.get_last_lr())
    state = accelerator.unwrap_model(model).state_dict()
    seen.append({name: full(value.detach()).clone() for name, value in state.items()})
    return seen[0], rates[-1], accelerator.skipped_steps


def drawn(ranks, accumulation, seed):
    draw = random.Random(seed)
    steps = draw.sample(range(1, STEPS), 4)  # DDP puts gradients in another order after its first step
    return [
        (at, draw.randrange(ranks), draw.randrange(accumulation), kind) for at, kind in zip(steps, POISONS, strict=True)
    ]


@pytest.mark.parametrize(
    ("layout", "ranks", "accumulation", "clips"),
    [
        ("one", 1, 1, False),
        *(("ddp", 2, 1, False), ("ddp", 2, 2, True), ("ddp", 4, 1, True)),
        *(("fsdp", 2, 1, False), ("fsdp", 2, 2, True), ("fsdp", 4, 1, False)),
    ],
)
def test_a_run_with_poisoned_batches_is_one_without_them(layout, ranks, accumulation, clips):
    for seed in range(2):
        poisoned = drawn(ranks, accumulation, seed)
        for with_them, without in run_ranks(both, ranks, layout, poisoned, accumulation, clips):
            assert with_them[2] == 4
            assert with_them[1] == without[1]
            assert all(torch.equal(with_them[0][name], value) for name, value in without[0].items())


def both(layout, poisoned, accumulation, clips):
    return [run(layout, poisoned, skips, accumulation, clips) for skips in (True, False)]


def test_without_it_such_a_step_is_made():
    weights, _, skipped = run("one", [], False)
    assert skipped == 0
    accelerator = Accelerator(cpu=True)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.randn(3, 4), "nan"))
    optimizer.step()
    assert not torch.isfinite(model.second.weight).any()
    assert torch.isfinite(weights["second.weight"]).all()


def test_large_gradients_whose_squares_overflow_are_finite():
    accelerator = Accelerator(cpu=True, skip_nonfinite=1)
    model = nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-30))
    accelerator.backward(1e30 * model(torch.ones(2)).sum())
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped


class Seen(Sink):
    def __init__(self):
        super().__init__()
        self.events = []

    def show(self, event):
        self.events.append(event)


def test_each_is_an_event_and_so_many_in_a_row_an_error(monkeypatch):
    monkeypatch.setattr(EVENTS, "handlers", [seen := Seen()])
    accelerator = Accelerator(cpu=True, skip_nonfinite=3)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.first.weight.detach().clone()

    def step(poison):
        accelerator.backward(model(torch.ones(3, 4), poison))
        optimizer.step()
        optimizer.zero_grad()

    for poison in ("nan", "inf", "", "nan", "loss"):
        step(poison)
    with pytest.raises(NonFinite, match="3 steps in a row"):
        step("gradient")
    found = [event.facts for event in seen.events if event.kind is Kind.SKIPPED]
    assert [(one["in_a_row"], one["total"]) for one in found] == [(1, 1), (2, 2), (1, 3), (2, 4), (3, 5)]
    assert not torch.equal(before, model.first.weight)
    assert torch.isfinite(model.first.weight).all()
    assert accelerator.skipped_steps == 5


def test_what_can_not_be_skipped_or_counted_is_refused():
    with pytest.raises(ConfigError, match="skip_nonfinite is 0"):
        Accelerator(cpu=True, skip_nonfinite=0)
    accelerator = Accelerator(cpu=True, skip_nonfinite=3)
    optimizer = accelerator.prepare(torch.optim.LBFGS([nn.Parameter(torch.ones(2))]))
    with pytest.raises(Unsupported, match="closure"):
        optimizer.step(lambda: torch.zeros(()))


def under_an_outer_loop():
    accelerator = Accelerator(cpu=True, outer="diloco", skip_nonfinite=5)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(70):
        torch.manual_seed(10 * step + accelerator.process_index)
        accelerator.backward(model(torch.randn(3, 4), "nan" * (step % 10 == accelerator.process_index)))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return accelerator.skipped_steps, {
        name: x.clone() for name, x in accelerator.unwrap_model(model).state_dict().items()
    }


def test_replicas_of_an_outer_loop_skip_their_own_steps_and_end_alike():
    (first, one), (second, other) = run_ranks(under_an_outer_loop, 2)
    assert (first, second) == (7, 7)
    assert all(torch.isfinite(value).all() and torch.equal(value, other[name]) for name, value in one.items())


def test_a_step_that_the_loss_scaler_of_fp16_skips_counts_too():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", skip_nonfinite=2)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step(poison):
        accelerator.backward(model(torch.ones(3, 4), poison))
        optimizer.step()
        optimizer.zero_grad()

    step("nan")
    assert (accelerator.optimizer_step_was_skipped, accelerator.skipped_steps) == (True, 1)
    step("")
    step("nan")
    with pytest.raises(NonFinite, match="2 steps in a row"):
        step("nan")
    assert torch.isfinite(model.first.weight).all()
