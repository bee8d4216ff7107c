# SPDX-License-Identifier: Apache-2.0
"""Loops left early and loops inside loops: the windows of training follow the loop around the step and no other one.

Each sample is a number and each gradient is that number, so the gradient of a window says which samples are in it.
"""

import gc
import itertools
import weakref
from contextlib import nullcontext, suppress
from functools import partial

import accelerate
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.base.errors import CollectiveMismatch
from farflung.state import AcceleratorState
from farflung.utils import DataLoaderConfiguration
from tests.accelerator.conftest import on_ranks

ITSELF = "the training loader itself"


class Training:
    """A model whose gradient is the mean of the samples that it saw, with all windows that were completed.

    Attributes:
        windows: for each optimizer step, the mean of the samples in its window.
    """

    def __init__(self, num_samples=6, accumulation=2, other=None, accelerator=None):
        self.accelerator = accelerator or Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        self.layer = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.0)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(self.layer, optimizer, samples(num_samples))
        self.other = self.loader if other == ITSELF else other and self.accelerator.prepare(samples(other))
        self.windows = []

    def step(self, batch):
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(batch).mean())
            if self.accelerator.sync_gradients:
                self.windows.append(round(self.layer.weight.grad.item(), 4))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def epoch(self):
        for batch in self.loader:
            self.step(batch)


def samples(number, batch_size=1):
    return DataLoader(torch.arange(1.0, number + 1).unsqueeze(1), batch_size=batch_size)


def means(number, size):
    """The means of 1 ... number in windows of `size`, the last of which may be short."""
    numbers = list(range(1, number + 1))
    groups = [numbers[start : start + size] for start in range(0, number, size)]
    return [round(sum(group) / len(group), 4) for group in groups]


WINDOWS = pytest.mark.parametrize("accumulation", [2, 3])


# ---- other loops inside the loop of training


@WINDOWS
@pytest.mark.parametrize("where", ["before the step", "after the step"])
@pytest.mark.parametrize("left_by", ["its end", "break", "an exception"])
@pytest.mark.parametrize("number", [1, 3, ITSELF])
def test_an_evaluation_inside_a_training_step_changes_no_window(accumulation, where, left_by, number):
    training = Training(5, accumulation, number)

    def evaluate():
        with suppress(ZeroDivisionError):
            for batch in training.other:
                if left_by == "break":
                    break
                if left_by == "an exception":
                    raise ZeroDivisionError
                assert training.accelerator.gather_for_metrics(batch).shape == (1, 1)

    for _ in range(2):
        for batch in training.loader:
            if where == "before the step":
                evaluate()
            training.step(batch)
            if where == "after the step":
                evaluate()
    assert training.windows == means(5, accumulation) * 2


@WINDOWS
@pytest.mark.parametrize("number", [1, 2, 4, 5, 9, ITSELF])
def test_a_second_loader_that_is_drawn_from_in_each_step_ends_no_window(accumulation, number):
    """As in training on labelled and unlabelled data: the second loader starts over whenever it is exhausted."""
    training = Training(5, accumulation, number)
    draw_from_both(training, epochs=2)
    assert training.windows == means(5, accumulation) * 2


def draw_from_both(training, epochs=1):
    stream = itertools.chain.from_iterable(itertools.repeat(training.other))
    for _ in range(epochs):
        for batch in training.loader:
            next(stream)
            training.step(batch)


@pytest.mark.parametrize(("number", "windows"), [(1, [0.5, 1.0, 1.5, 2.0, 2.5]), (9, [1.5, 3.5])])
def test_accelerate_follows_the_loader_that_was_started_last(number, windows):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    training = Training(5, other=number, accelerator=accelerator)
    draw_from_both(training)
    assert training.windows == windows  # not [1.5, 3.5, 5.0]


def in_step(training, waiting):
    """The first loader is the one that is followed."""
    for batch, _ in zip(training.loader, waiting, strict=False):
        training.step(batch)


def evaluated_now_and_then(every, training, waiting):
    """A few batches from an iterator that waits meanwhile, also at its last batch."""
    for index, batch in enumerate(training.loader):
        if index % every == 0:
            next(waiting, None)
        training.step(batch)


def waits_from_before(training, waiting):
    next(waiting)
    training.epoch()
    assert next(waiting).item() == 2.0


def listed_first(training, waiting):
    """Nobody knows where such data end, and an iterator that waits has nothing to say."""
    next(waiting)
    for batch in list(training.loader):
        training.step(batch)


@WINDOWS
@pytest.mark.parametrize(
    ("number", "other", "loop"),
    [
        (5, 7, in_step),
        *((7, 2, partial(evaluated_now_and_then, every)) for every in (1, 2, 3)),
        (6, 4, waits_from_before),
        (6, 2, listed_first),
    ],
)
def test_an_iterator_of_another_loader_that_is_kept_ends_no_window(accumulation, number, other, loop):
    training = Training(number, accumulation, other)
    loop(training, iter(training.other))
    assert training.windows == means(number, accumulation)


@WINDOWS
def test_two_models_with_loaders_in_turn_each_follow_their_own(accumulation):
    one = Training(5, accumulation)
    other = Training(7, accelerator=one.accelerator)
    loops = [(one, iter(one.loader)), (other, iter(other.loader))]
    for training, loop in loops * 7:
        for batch in itertools.islice(loop, 1):
            training.step(batch)
    assert (one.windows, other.windows) == (means(5, accumulation), means(7, accumulation))


@WINDOWS
def test_a_training_inside_a_training_follows_its_own_loop(accumulation):
    outer = Training(3, accumulation)
    inner = Training(5, accelerator=outer.accelerator)
    for batch in outer.loader:
        inner.epoch()
        outer.step(batch)
    assert (outer.windows, inner.windows) == (means(3, accumulation), means(5, accumulation) * 3)


@WINDOWS
def test_micro_batches_cut_out_of_a_batch_belong_to_its_loader(accumulation):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    training = Training(0, accelerator=accelerator)
    for batch in accelerator.prepare(samples(10, batch_size=5)):
        for chunk in batch.split(1):
            training.step(chunk)
    first = accumulation * (5 // accumulation)
    assert training.windows[: 5 // accumulation] == means(first, accumulation)
    assert training.windows[-1] == 10.0


# ---- loops left early


@pytest.mark.parametrize("left_by", ["break", "an exception", "an iterator that is kept alive"])
def test_training_starts_again_after_a_loop_left_early(left_by):
    """The window that was open goes on with the next loop, and the end of that one is seen."""
    training = Training(5, 2)
    kept = iter(training.loader) if "iterator" in left_by else None
    with suppress(ZeroDivisionError):
        for index, batch in enumerate(kept or training.loader):
            training.step(batch)
            if index == 2 and left_by == "an exception":
                raise ZeroDivisionError
            if index == 2:
                break
    assert training.windows == [1.5]
    training.epoch()
    assert training.windows == [1.5, 2.0, 2.5, 4.5]  # 3 and 1, 2 and 3, 4 and 5
    training.epoch()
    assert training.windows[4:] == means(5, 2)


def test_after_a_loop_that_was_left_at_its_last_batch_nothing_ends():
    training = Training(4, 3, 6)
    for batch in training.loader:
        training.step(batch)
        if training.accelerator.gradient_state.end_of_dataloader:
            break
    assert training.windows == means(4, 3)
    assert not training.accelerator.gradient_state.end_of_dataloader
    for batch in training.other:
        training.step(batch)
    assert training.windows[2:] == means(6, 3)


# ---- metrics


def gathered_inside(dispatch, itself):
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=config)
    evaluation = accelerator.prepare(samples(7, 2))
    train = evaluation if itself else accelerator.prepare(samples(5, 2))
    trained, evaluated = [], []
    for batch in train:
        evaluated.append([x for inner in evaluation for x in accelerator.gather_for_metrics(inner).flatten().tolist()])
        next(iter(evaluation))
        trained += accelerator.gather_for_metrics(batch).flatten().tolist()
    return trained, evaluated


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@on_ranks()
def test_metrics_are_cut_by_the_iteration_whose_batch_is_in_hand(num_ranks):
    for dispatch, (itself, length) in itertools.product((False, True), ((False, 5), (True, 7))):
        trained, evaluated = gathered_inside(dispatch, itself)
        assert trained == list(range(1, length + 1))
        assert evaluated == [list(range(1, 8))] * -(-length // (2 * num_ranks))


# ---- several Accelerators, and several calls of prepare


def test_a_second_accelerator_trains_beside_the_first_and_leaves_nothing_behind():
    first = Training(5, 2)
    second = Training(5, 3)
    for batch, other in zip(first.loader, second.loader, strict=True):
        first.step(batch)
        second.step(other)
    assert (first.windows, second.windows) == (means(5, 2), means(5, 3))
    alive = [weakref.ref(first.layer.weight), weakref.ref(second.layer.weight)]
    second.accelerator.free_memory()
    third = Accelerator(cpu=True)
    del second, batch, other
    gc.collect()
    assert [ref() is None for ref in alive] == [False, True]
    first.accelerator.free_memory()
    del first
    gc.collect()
    assert alive[0]() is None
    assert third.gradient_accumulation_steps == 2  # as the first has it


@on_ranks(2)
def test_an_accelerator_with_other_accumulation_sees_the_loaders_of_the_first():
    uneven = DataLoaderConfiguration(even_batches=False)
    first, second = Accelerator(cpu=True, dataloader_config=uneven), Accelerator(gradient_accumulation_steps=2)
    even, odd = second.prepare_data_loader(samples(5, 2)), first.prepare(samples(5, 1))
    assert [x for batch in even for x in first.gather_for_metrics(batch).flatten().tolist()] == [1, 2, 3, 4, 5]
    layer, windows = second.prepare(nn.Linear(1, 1)), []
    refused = pytest.raises(CollectiveMismatch, match="join_uneven_inputs")
    with refused if first.is_main_process else nullcontext():  # which has a batch more
        for batch in odd:
            with second.accumulate(layer):
                second.backward(layer(batch).mean())
                windows.append(second.sync_gradients)
    assert windows == [False, True]


def test_a_loader_of_another_accelerator_ends_windows_and_outlives_memory_that_is_freed():
    first, second = Accelerator(cpu=True), Accelerator(gradient_accumulation_steps=2)
    windows = []
    for _ in first.prepare(samples(5, 1)):
        with second.accumulate():
            windows.append(second.sync_gradients)
        second.free_memory()
        assert first.gradient_state.in_dataloader
    windows.clear()
    for _ in first.prepare(samples(5, 1)):
        with second.accumulate():
            windows.append(second.sync_gradients)
    assert windows == [False, True, False, True, True]


def test_an_accelerator_that_is_gone_leaves_nothing_in_memory():
    first = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = first.prepare(nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))[0]
    seen = weakref.ref(model)
    second = Accelerator(gradient_accumulation_steps=4)
    del first, model
    gc.collect()
    assert seen() is None
    assert (Accelerator().gradient_accumulation_steps, second.gradient_accumulation_steps) == (2, 4)


def test_what_only_looks_is_no_first_accelerator():
    AcceleratorState(cpu=True)
    assert Accelerator(gradient_accumulation_steps=4).gradient_accumulation_steps == 4
    assert Accelerator().gradient_accumulation_steps == 4


@on_ranks(2)
def test_ranks_with_batches_left_and_without_resume_in_the_same_epoch():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader, again = (accelerator.prepare(samples(5, 1)) for _ in range(2))
    for number, _ in enumerate(loader, 1):
        if number == 2:
            state = loader.state_dict()
            break
    again.load_state_dict(state)
    assert len(list(again)) == (1 if accelerator.is_main_process else 0)


def inner_batches(folder, size, saves):
    """Return how many batches each inner loop has, or save on the last one of the first."""
    accelerator, model, counts = Accelerator(cpu=True), nn.Linear(1, 1), []
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    outer, inner = accelerator.prepare(samples(2, 1), samples(4, size))
    if not saves:
        accelerator.load_state(folder)
    for _ in outer:
        counts.append(0)
        for _ in inner:
            counts[-1] += 1
            optimizer.step()
            if saves and inner.end_of_dataloader:
                return accelerator.save_state(folder)
    return counts


def test_an_inner_loop_that_was_over_is_not_begun_again_with_another_batch_size(tmp_path):
    inner_batches(tmp_path, 1, saves=True)
    assert inner_batches(tmp_path, 2, saves=False) == [0, 2]


def windows_of(accelerator, model, optimizer, number=4):
    """Return for each micro-batch of `model` whether it completes the window that the optimizer follows."""
    complete = []
    for _ in range(number):
        with accelerator.accumulate(model):
            complete.append(optimizer.window_is_complete)
    return complete


def test_optimizers_follow_new_windows_after_memory_was_freed():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(layer := nn.Linear(1, 1), torch.optim.SGD(layer.parameters(), 1.0))
    assert windows_of(accelerator, model, optimizer, 1) == [False]
    accelerator.free_memory()
    assert windows_of(accelerator, model, optimizer) == [False, True, False, True]


def test_the_optimizers_of_one_accelerator_follow_new_windows_after_another_has_freed_its_memory():
    first, second = (Accelerator(cpu=True, gradient_accumulation_steps=2) for _ in range(2))
    layers = nn.Linear(1, 1), nn.Linear(1, 1)
    model, optimizer = first.prepare(layers[0], torch.optim.SGD(layers[0].parameters(), 1.0))
    second.prepare(layers[1], torch.optim.SGD(layers[1].parameters(), 1.0))
    assert windows_of(first, model, optimizer, 1) == [False]
    second.free_memory()
    assert windows_of(first, model, optimizer) == [False, True, False, True]


def test_fp16_gradients_are_clipped_at_their_size_after_another_accelerator_has_freed_its_memory():
    first, second = (Accelerator(cpu=True, mixed_precision="fp16") for _ in range(2))
    model, optimizer = first.prepare(layer := nn.Linear(2, 1, bias=False), torch.optim.SGD(layer.parameters(), 1.0))
    second.free_memory()
    first.backward(model(torch.tensor([[3.0, 4.0]])).sum() / 8)
    assert first.clip_grad_norm_(model.parameters(), 100.0).item() == 5 / 8
    optimizer.step()
    assert not optimizer.step_was_skipped


class Tied(nn.Module):
    """A layer that goes out where it came in, and one that shares its bias."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight
        self.head = nn.Linear(5, 1)
        self.again = nn.Linear(5, 1)
        self.again.bias = self.head.bias

    def forward(self, x):
        return self.head(self.out(self.embed(x))) + self.again(self.out(self.embed(x)))


def trained_tied(together, precision):
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if together:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    for step in range(4):
        with accelerator.accumulate(model):
            x = torch.tensor([step % 5, (step + accelerator.process_index) % 5])
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    bare = accelerator.unwrap_model(model)
    assert bare.out.weight is bare.embed.weight
    assert bare.again.bias is bare.head.bias
    assert len([*bare.parameters()]) == 4
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    AcceleratorState._reset_state()
    return state


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@on_ranks()
def test_tied_weights_stay_tied_and_separate_calls_of_prepare_train_the_same(num_ranks):
    fresh = Tied()
    for precision in ("no", "bf16"):
        together, apart = (trained_tied(at_once, precision) for at_once in (True, False))
        assert torch.equal(together["out.weight"], together["embed.weight"])
        assert all(torch.equal(together[name], apart[name]) for name in fresh.state_dict())
        assert not torch.equal(together["out.weight"], fresh.out.weight)
        assert set(together) == set(fresh.state_dict())
