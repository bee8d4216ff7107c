# SPDX-License-Identifier: Apache-2.0
"""Loops left early and loops inside loops: the windows of training follow the loop around the step and no other one.

Each sample is a number and each gradient is that number, so the gradient of a window says which samples are in it.
"""

import gc
import itertools
import weakref

import accelerate
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.state import AcceleratorState
from farflung.testing.ranks import run_ranks
from farflung.utils import DataLoaderConfiguration

ITSELF = "the training loader itself"


class Training:
    """A model whose gradient is the mean of the samples that it saw, with all windows that were completed.

    Attributes:
        windows: for each optimizer step, the mean of the samples in its window.
    """

    def __init__(self, num_samples=6, accumulation=2, others=(), accelerator=None):
        self.accelerator = accelerator or Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        self.layer = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.0)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(self.layer, optimizer, samples(num_samples))
        self.others = [
            self.loader if number == ITSELF else self.accelerator.prepare(samples(number)) for number in others
        ]
        self.windows = []

    def step(self, batch):
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(batch).mean())
            if self.accelerator.sync_gradients:
                self.windows.append(round(self.layer.weight.grad.item(), 4))
            self.optimizer.step()
            self.optimizer.zero_grad()


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
    training = Training(5, accumulation, others=[number])

    def evaluate():
        try:
            for batch in training.others[0]:
                if left_by == "break":
                    break
                if left_by == "an exception":
                    raise ZeroDivisionError
                assert training.accelerator.gather_for_metrics(batch).shape == (1, 1)
        except ZeroDivisionError:
            pass

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
    training = Training(5, accumulation, others=[number])
    draw_from_both(training, epochs=2)
    assert training.windows == means(5, accumulation) * 2


def draw_from_both(training, epochs=1):
    def endless():
        while True:
            yield from training.others[0]

    stream = endless()
    for _ in range(epochs):
        for batch in training.loader:
            next(stream)
            training.step(batch)


def test_accelerate_follows_the_loader_that_was_started_last():
    for number, windows in ((1, [0.5, 1.0, 1.5, 2.0, 2.5]), (9, [1.5, 3.5])):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        training = Training(5, others=[number], accelerator=accelerator)
        draw_from_both(training)
        assert training.windows == windows  # not [1.5, 3.5, 5.0]
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()


@WINDOWS
def test_loaders_in_step_follow_the_first_one(accumulation):
    training = Training(5, accumulation, others=[7])
    for batch, _ in zip(training.loader, training.others[0], strict=False):
        training.step(batch)
    assert training.windows == means(5, accumulation)


@WINDOWS
@pytest.mark.parametrize("every", [1, 2, 3])
def test_an_iterator_that_is_kept_alive_ends_no_window(accumulation, every):
    """A few batches of an evaluation now and then, from an iterator that waits meanwhile, also at its last batch."""
    training = Training(7, accumulation, others=[2])
    evaluation = iter(training.others[0])
    for index, batch in enumerate(training.loader):
        if index % every == 0:
            next(evaluation, None)
        training.step(batch)
    assert training.windows == means(7, accumulation)


def test_an_iterator_that_waits_from_before_ends_no_window():
    training = Training(6, 3, others=[4])
    waiting = iter(training.others[0])
    next(waiting)
    for batch in training.loader:
        training.step(batch)
    assert next(waiting).item() == 2.0
    assert training.windows == means(6, 3)


@WINDOWS
def test_batches_that_were_listed_first_make_whole_windows_only(accumulation):
    """Nobody knows where such data end, and an iterator that waits has nothing to say."""
    training = Training(6, accumulation, others=[2])
    waiting = iter(training.others[0])
    next(waiting)
    for batch in list(training.loader):
        training.step(batch)
    assert training.windows == means(6, accumulation)


@WINDOWS
def test_two_models_with_loaders_in_turn_each_follow_their_own(accumulation):
    one = Training(5, accumulation)
    other = Training(7, accumulation, accelerator=one.accelerator)
    loops = [(one, iter(one.loader)), (other, iter(other.loader))]
    for training, loop in loops * 7:
        for batch in itertools.islice(loop, 1):
            training.step(batch)
    assert one.windows == means(5, accumulation)
    assert other.windows == means(7, accumulation)


@WINDOWS
def test_a_training_inside_a_training_follows_its_own_loop(accumulation):
    outer = Training(3, accumulation)
    inner = Training(5, accumulation, accelerator=outer.accelerator)
    for batch in outer.loader:
        for inner_batch in inner.loader:
            inner.step(inner_batch)
        outer.step(batch)
    assert outer.windows == means(3, accumulation)
    assert inner.windows == means(5, accumulation) * 3


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
    try:
        for index, batch in enumerate(kept or training.loader):
            training.step(batch)
            if index == 2 and left_by == "an exception":
                raise ZeroDivisionError
            if index == 2:
                break
    except ZeroDivisionError:
        pass
    assert training.windows == [1.5]
    for batch in training.loader:
        training.step(batch)
    assert training.windows == [1.5, 2.0, 2.5, 4.5]  # 3 and 1, 2 and 3, 4 and 5
    for batch in training.loader:
        training.step(batch)
    assert training.windows[4:] == means(5, 2)


def test_after_a_loop_that_was_left_at_its_last_batch_nothing_ends():
    training = Training(4, 3, others=[6])
    for batch in training.loader:
        training.step(batch)
        if training.accelerator.gradient_state.end_of_dataloader:
            break
    assert training.windows == means(4, 3)
    assert not training.accelerator.gradient_state.end_of_dataloader
    for batch in training.others[0]:
        training.step(batch)
    assert training.windows[2:] == means(6, 3)


# ---- metrics


def gathered_inside(dispatch, itself):
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=config)
    train = evaluation = accelerator.prepare(samples(7, 2))
    if not itself:
        train = accelerator.prepare(samples(5, 2))
    trained, evaluated = [], []
    for batch in train:
        one = []
        for inner in evaluation:
            one += accelerator.gather_for_metrics(inner).flatten().tolist()
        evaluated.append(one)
        for _ in evaluation:
            break
        trained += accelerator.gather_for_metrics(batch).flatten().tolist()
    return trained, evaluated


def gathered_in_all_ways():
    return [(itself, gathered_inside(dispatch, itself)) for dispatch in (False, True) for itself in (False, True)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_metrics_are_cut_by_the_iteration_whose_batch_is_in_hand(num_ranks):
    for outcome in run_ranks(gathered_in_all_ways, num_ranks, connect=num_ranks > 1):
        for itself, (trained, evaluated) in outcome:
            length = 7 if itself else 5
            assert trained == list(range(1, length + 1))
            assert evaluated == [list(range(1, 8))] * -(-length // (2 * num_ranks))


# ---- several Accelerators, and several calls of prepare


def test_a_second_accelerator_trains_beside_the_first_and_leaves_nothing_behind():
    first = Training(5, 2)
    second = Training(5, 3, accelerator=Accelerator(cpu=True, gradient_accumulation_steps=3))
    for batch, other in zip(first.loader, second.loader, strict=True):
        first.step(batch)
        second.step(other)
    assert first.windows == means(5, 2)
    assert second.windows == means(5, 3)
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
    assert third.gradient_accumulation_steps == 3  # as the session has it


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
    assert sum(1 for _ in bare.parameters()) == 4
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    AcceleratorState._reset_state()
    return state


def tied_in_both_ways():
    return [trained_tied(together, precision) for precision in ("no", "bf16") for together in (True, False)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_tied_weights_stay_tied_and_separate_calls_of_prepare_train_the_same(num_ranks):
    for together, apart, half, half_apart in run_ranks(tied_in_both_ways, num_ranks, connect=num_ranks > 1):
        assert torch.equal(together["out.weight"], together["embed.weight"])
        for one, other in ((together, apart), (half, half_apart)):
            assert all(torch.equal(one[name], other[name]) for name in one)
        assert not torch.equal(together["out.weight"], Tied().out.weight)
        assert set(together) == set(Tied().state_dict())
