# SPDX-License-Identifier: Apache-2.0
"""The accumulation window and those who follow it: optimizer, scheduler, clipping."""

import pickle
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from farflung.config.handlers import GradScalerKwargs
from farflung.loop.accumulation import Accumulate
from farflung.loop.clip import Clipping
from farflung.loop.optimizer import AcceleratedOptimizer
from farflung.loop.scheduler import AcceleratedScheduler
from farflung.loop.state import LoopState
from farflung.precision.amp import ScaledFp16
from farflung.precision.base import Precision


def loader(end=False, remainder=-1):
    return SimpleNamespace(end_of_dataloader=end, remainder=remainder, loader=object())


def made(num_steps=1, precision=None, lr=1.0):
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    state = LoopState(num_steps)
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    return model, AcceleratedOptimizer(inner, state=state, precision=precision or Precision()), state


def test_the_end_of_the_data_can_be_ignored():
    state = LoopState(2, sync_with_dataloader=False)
    state.enter(loader(end=True))
    assert [state.advance() for _ in range(4)] == [False, True, False, True]


def test_the_loader_that_handed_out_the_latest_batch_is_the_one_that_counts():
    state, train, evaluate = LoopState(), loader(remainder=3), loader(end=True, remainder=1)
    state.enter(train)
    state.enter(evaluate)
    assert (state.end_of_dataloader, state.remainder) == (True, 1)
    state.enter(train)  # the evaluation's iterator is still alive
    assert (state.end_of_dataloader, state.remainder) == (False, 3)
    state.leave(train)
    assert state.current is evaluate
    state.leave(evaluate)
    assert (state.current, state.remainder, state.end_of_dataloader) == (None, -1, False)


def test_only_the_micro_batches_inside_a_window_run_without_synchronization():
    entered = []
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)

    @contextmanager
    def no_sync(model):
        entered.append(model)
        yield
        entered.append("left")

    state = LoopState(2)
    for _ in range(2):
        with Accumulate(state, (one, other), no_sync):
            entered.append("body")
    assert entered == [one, other, "body", "left", "left", "body"]


def test_sync_each_batch_synchronizes_inside_the_window_too():
    state = LoopState(2, sync_each_batch=True)
    with Accumulate(state, (nn.Linear(1, 1),), lambda model: pytest.fail("entered no_sync")):
        assert not state.sync_gradients


def test_the_optimizer_passes_for_the_one_it_holds():
    model, optimizer, _ = made()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.defaults["lr"] == 1.0
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.5})
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.5]
    optimizer.load_state_dict(optimizer.state_dict())
    copy = pickle.loads(pickle.dumps(optimizer))
    assert copy.param_groups[1]["lr"] == 0.5
    LambdaLR(optimizer, lambda step: 0.1)
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(AttributeError):
        optimizer.no_such_thing  # noqa: B018


def updates(optimizer, scheduler, model, count=1):
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()


def test_ticks_past_the_end_of_a_one_cycle_are_dropped():
    model, optimizer, _ = made()
    inner = OneCycleLR(optimizer.optimizer, max_lr=1.0, total_steps=5)
    scheduler = AcceleratedScheduler(inner, [optimizer], ticks=2)
    with pytest.warns(UserWarning, match="after 5 steps"):
        updates(optimizer, scheduler, model, 4)
    assert inner.last_epoch == 5


def test_clipping_by_value_unscales_first():
    model, optimizer, state = made(precision=ScaledFp16("cpu", scaler=GradScalerKwargs(init_scale=1024.0)))
    optimizer.precision.scale(model(torch.tensor([[0.25, 4.0]])).sum()).backward()
    Clipping(optimizer.precision, state, [optimizer]).value_(model.parameters(), 1.0)
    assert torch.equal(model.weight.grad, torch.tensor([[0.25, 1.0]]))


def test_clipping_inside_a_window_changes_nothing_and_says_so():
    model, optimizer, state = made(num_steps=2)
    state.advance()
    model(torch.tensor([[30.0, 40.0]])).sum().backward()
    clipping = Clipping(optimizer.precision, state, [optimizer])
    assert clipping.norm_(model.parameters(), 1.0, 2).isnan()
    clipping.value_(model.parameters(), 1.0)
    assert torch.equal(model.weight.grad, torch.tensor([[30.0, 40.0]]))


def test_gradients_are_unscaled_after_a_step_that_the_script_left_out():
    precision = ScaledFp16("cpu", scaler=GradScalerKwargs(init_scale=1024.0))
    model, optimizer, state = made(precision=precision)
    norms = []
    for _ in range(3):
        precision.scale(model(torch.tensor([[3.0, 4.0]])).sum()).backward()
        norms.append(Clipping(precision, state, [optimizer]).norm_(model.parameters(), 100.0, 2).item())
        if len(norms) != 1:
            optimizer.step()
        optimizer.zero_grad()
    assert norms == [5.0, 5.0, 5.0]
    assert torch.equal(model.weight, torch.tensor([[-5.0, -7.0]]))


def test_only_the_optimizers_that_own_the_clipped_parameters_are_unscaled():
    precision = ScaledFp16("cpu", scaler=GradScalerKwargs(init_scale=1024.0))
    first, one, state = made(precision=precision)
    second, other, _ = made(precision=precision)
    for model in (first, second):
        precision.scale(model(torch.tensor([[3.0, 4.0]])).sum()).backward()
    Clipping(precision, state, [one, other]).norm_(first.parameters(), 100.0, 2)
    assert torch.allclose(first.weight.grad, torch.tensor([[3.0, 4.0]]))
    assert torch.equal(second.weight.grad, torch.tensor([[3072.0, 4096.0]]))


def test_a_step_with_a_closure_returns_its_first_loss():
    model = torch.nn.Linear(1, 1)
    optimizer = AcceleratedOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=3))
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(1)) - 1).square().sum()
        loss.backward()
        seen.append(loss)
        return loss

    assert optimizer.step(closure) is seen[0]
    assert optimizer.step(lambda: torch.tensor(2.0, requires_grad=True)) == 2.0


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_a_short_last_window_is_the_mean_of_what_is_in_it(length, named):
    model, optimizer, state = made(num_steps=3)
    batches = loader()
    state.enter(batches)
    gradients = []
    for number in range(1, length + 1):
        batches.end_of_dataloader = number == length
        with Accumulate(state, (model,) if named else (), None):
            (model(torch.full((1, 2), float(number))).sum() / state.window.divisor).backward()
            if state.sync_gradients:
                gradients.append(model.weight.grad[0, 0].item())
            optimizer.step()
            optimizer.zero_grad()
    assert gradients == {1: [1.0], 2: [1.5], 3: [2.0], 4: [2.0, 4.0], 5: [2.0, 4.5]}[length]


def test_reduce_on_plateau_ticks_once_an_update():
    _, optimizer, _ = made()
    inner = ReduceLROnPlateau(optimizer.optimizer, patience=0, factor=0.5)
    scheduler = AcceleratedScheduler(inner, [optimizer], ticks=4)
    scheduler.step(1.0)
    scheduler.step(2.0)
    assert (inner.num_bad_epochs, optimizer.param_groups[0]["lr"]) == (0, 0.5)
    assert AcceleratedScheduler(inner, [optimizer]).state_dict() == scheduler.state_dict()


@pytest.mark.parametrize("resumed", [False, True])
def test_an_optimizer_returns_to_the_window_of_an_earlier_set_of_models(resumed):
    model, optimizer, state = made(num_steps=2)
    other = nn.Linear(1, 1)
    for models in (model, other), (model,):
        with Accumulate(state, models, None):
            assert not optimizer.window_is_complete
    if resumed:
        state.advance(state.window_of((model, other)))
        saved = state.state_dict([model, other])
        model, optimizer, state = made(num_steps=2)
        state.load_state_dict(saved, [model, other])
        assert optimizer.window_is_complete
        assert not state.advance(state.window_of((model, other)))
        assert not optimizer.window_is_complete
    with Accumulate(state, (model, other), None):
        assert optimizer.window_is_complete


def test_setting_the_flag_by_hand_reaches_every_window():
    model, optimizer, state = made(num_steps=2)
    with Accumulate(state, (model,), None):
        assert not optimizer.window_is_complete
    state.sync_gradients = True
    assert optimizer.window_is_complete
    state.num_steps = 4
    assert (state.num_steps, state.window.divisor) == (4, 4)


class Batches(list):
    """A loader of known length that is being iterated."""

    end_of_dataloader, remainder, loader = False, 0, None


def decay(step, num_training_steps):
    return max(0.0, 1 - step / num_training_steps)


def decay_over(num_training_steps):
    return lambda step: decay(step, num_training_steps)


def warmed_up(optimizer):
    up = LinearLR(optimizer, start_factor=0.5, total_iters=2)
    return SequentialLR(optimizer, [up, CosineAnnealingLR(optimizer, T_max=2)], milestones=[2])


SCHEDULES = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=4),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=1.0, total_steps=4),
    "transformers": lambda optimizer: LambdaLR(optimizer, partial(decay, num_training_steps=4)),
    "closure": lambda optimizer: LambdaLR(optimizer, decay_over(4)),
    "linear": lambda optimizer: LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=4),
    "polynomial": lambda optimizer: PolynomialLR(optimizer, total_iters=4),
    "warmed up": lambda optimizer: warmed_up(optimizer),
}


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch's own, where one schedule follows another
def test_a_schedule_that_ends_before_the_data_is_said_aloud_once_with_the_number_that_fits(kind):
    model, optimizer, state = made()
    state.enter(Batches(range(6)))
    scheduler = AcceleratedScheduler(SCHEDULES[kind](optimizer.optimizer), [optimizer], ticks=2)
    updates(optimizer, scheduler, model, 2)
    with pytest.warns(UserWarning, match="after 4 steps.*6 updates, so 12 steps"):
        updates(optimizer, scheduler, model)
    updates(optimizer, scheduler, model)


def test_a_schedule_that_ends_before_a_stream_of_unknown_length_is_said_aloud_without_a_number():
    class Endless(Batches):
        def __len__(self):
            raise TypeError

    model, optimizer, state = made()
    state.enter(Endless())
    scheduler = AcceleratedScheduler(CosineAnnealingLR(optimizer.optimizer, T_max=1), [optimizer])
    updates(optimizer, scheduler, model)
    with pytest.warns(UserWarning, match=r"steps it once here\.$"):
        updates(optimizer, scheduler, model)


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch's own, where one schedule follows another
def test_a_warm_up_that_is_over_is_no_schedule_that_is_over():
    model, optimizer, _ = made()
    up = LinearLR(optimizer.optimizer, start_factor=0.5, total_iters=1)
    updates(optimizer, AcceleratedScheduler(up, [optimizer]), model, 4)


def test_a_rate_below_zero_is_said_aloud_once_with_the_ticks_that_there_will_be():
    model, optimizer, state = made()
    state.enter(Batches(range(6)))
    scheduler = AcceleratedScheduler(LambdaLR(optimizer.optimizer, lambda step: 1 - step / 4), [optimizer], ticks=2)
    updates(optimizer, scheduler, model, 2)
    with pytest.warns(UserWarning, match=r"gives -0\.5 after 6 steps, a rate below zero\. .*6 updates, so 12 steps"):
        updates(optimizer, scheduler, model)
    updates(optimizer, scheduler, model)


@pytest.mark.parametrize("rate", [decay_over(2), lambda step: -1.0 * step])
def test_other_processes_than_the_main_one_do_not_warn_of_a_schedule(rate):
    model, optimizer, _ = made()
    scheduler = AcceleratedScheduler(LambdaLR(optimizer.optimizer, rate), [optimizer], warns=False)
    updates(optimizer, scheduler, model, 4)


def test_one_norm_over_parameters_of_different_dtypes():
    half = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    full = nn.Parameter(torch.zeros(1))
    half.grad, full.grad = torch.full_like(half, 3.0), torch.full_like(full, 4.0)
    assert Clipping(Precision(), LoopState(), []).norm_([half, full], 1.0, 2).item() == 5.0
    assert half.grad.item() == pytest.approx(0.6, rel=1e-2)
    assert full.grad.item() == pytest.approx(0.8)
