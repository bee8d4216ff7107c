# SPDX-License-Identifier: Apache-2.0
"""Each iteration of a prepared loader is an epoch with an order of its own, drawn as a raw loader draws it."""

from __future__ import annotations

import multiprocessing
import os
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from farflung.data.prepare import skip_first_batches
from farflung.data.samplers import SeedableRandomSampler
from tests.data.support import Seat, gathered, prepared, values, walk
from tests.data.test_loader import numbers

# ---- epochs


class Recorder(list):
    """Keeps the epochs it was told."""

    def __init__(self):
        super().__init__(range(6))
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def test_every_iteration_is_an_epoch_whether_or_not_it_comes_to_its_end():
    data = Recorder()
    loader = prepared(DataLoader(data, 2))
    for _ in loader:
        assert loader.iteration == 0
    assert loader.iteration == 1
    for _ in loader:
        break
    for _ in loader:
        assert loader.iteration == 2
    kept = iter(loader)
    next(kept)
    list(skip_first_batches(loader, 1))  # which counts the same epochs
    list(loader)
    assert data.epochs == [0, 1, 2, 3, 4, 5]


def test_a_seedable_order_changes_with_each_epoch_also_after_a_break():
    def orders(breaking):
        torch.manual_seed(3)
        loader = prepared(DataLoader(range(8), 8, shuffle=True), use_seedable_sampler=True)
        found = []
        for _ in range(3):
            for batch in loader:
                found.append(values(batch))
                if breaking:
                    break
        return found

    assert orders(False) == orders(True)
    assert len({tuple(order) for order in orders(True)}) == 3


def test_an_epoch_chosen_by_hand_wins():
    data = Recorder()
    loader = prepared(DataLoader(data, 2))
    loader.set_epoch(7)
    list(loader)
    for _ in loader:
        loader.set_epoch(3)
    list(loader)
    assert data.epochs == [7, 7, 8, 3, 3, 3, 3]
    loader.iteration = 9  # said when it begins
    list(loader)
    assert (data.epochs[7:], loader.iteration) == ([9], 10)


@pytest.mark.parametrize("size", [1, 2])
def test_samplers_inside_samplers_are_told_the_epoch(size):
    class Inner(SequentialSampler):
        def set_epoch(self, epoch):
            told.append(("sampler", epoch))

    class Outer(BatchSampler):
        def set_epoch(self, epoch):
            told.append(("batch sampler", epoch))

    told = []
    data = Recorder()
    loader = prepared(DataLoader(data, batch_sampler=Outer(Inner(data), 2, False)), Seat(0, size))
    list(loader)
    list(skip_first_batches(loader, 1))
    assert sorted(told) == [("batch sampler", 0), ("batch sampler", 1), ("sampler", 0), ("sampler", 1)]
    assert data.epochs == [0, 1]


# ---- workers that persist


class Told(Dataset):
    """Its samples are the epoch, as this process knows it, and the process that makes them."""

    def __init__(self, epoch):
        self._epoch = epoch

    def set_epoch(self, epoch):
        if isinstance(self._epoch, torch.Tensor):
            self._epoch.fill_(epoch)
        else:
            self._epoch.value = epoch

    def __getitem__(self, index):
        return torch.tensor([int(getattr(self._epoch, "value", self._epoch)), os.getpid()])

    def __len__(self):
        return 3


class ToldStream(Told, IterableDataset):
    def __iter__(self):
        return (self[index] for index in range(3))


@pytest.mark.parametrize("kind", [Told, ToldStream])
@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize(
    ("make_epoch", "stays"),
    [
        (lambda: SimpleNamespace(value=0), False),
        (lambda: torch.tensor(0), False),
        (lambda: torch.tensor(0).share_memory_(), True),
        (lambda: multiprocessing.Value("i"), True),
    ],
)
def test_persistent_workers_see_the_epoch_and_start_again_only_where_they_would_not(
    kind, dispatched, make_epoch, stays, capfd
):
    loader = DataLoader(kind(make_epoch()), None, num_workers=1, persistent_workers=True)
    loader = prepared(loader, dispatch_batches=dispatched)
    found = [[batch.tolist() for batch in loader] for _ in range(3)]
    assert [[epoch for epoch, _ in batches] for batches in found] == [[0] * 3, [1] * 3, [2] * 3]
    assert len({worker for batches in found for _, worker in batches}) == (1 if stays else 3)
    said = "set_epoch that they would not see. If it keeps the epoch in shared memory"
    assert capfd.readouterr().err.count(said) == (0 if stays else 1)


class Drawn(IterableDataset):
    def __iter__(self):
        return (torch.rand(1) for _ in range(4))


@pytest.mark.parametrize("done", [0, 2])
def test_a_streams_persistent_workers_draw_again_from_a_state_that_was_loaded(done):
    loader = prepared(DataLoader(Drawn(), None, num_workers=1, persistent_workers=True))
    torch.manual_seed(5)
    state, drawn = loader.state_dict(), torch.get_rng_state()
    whole = []
    for batch in loader:
        whole.append(batch.item())
        if len(whole) == done:
            state, drawn = loader.state_dict(), torch.get_rng_state()
    list(loader)
    loader.load_state_dict(state)
    torch.set_rng_state(drawn)
    assert [batch.item() for batch in loader] == whole[done:]


# ---- shuffling


@pytest.mark.parametrize("shuffle", [True, False])
def test_one_process_draws_the_random_numbers_of_a_raw_loader(shuffle):
    def run(make):
        torch.manual_seed(11)
        loader = make(DataLoader(range(10), 3, shuffle=shuffle))
        return [numbers(loader) for _ in range(2)], torch.rand(1).item()

    assert run(prepared) == run(lambda loader: loader)


def test_a_generator_of_the_users_own_is_the_one_that_is_drawn_from():
    raw = DataLoader(range(10), 10, shuffle=True, generator=torch.Generator().manual_seed(4))
    expected = [numbers(raw) for _ in range(2)]
    halves = []
    for rank in range(2):
        loader = DataLoader(range(10), 5, shuffle=True, generator=torch.Generator().manual_seed(4))
        loader = prepared(loader, Seat(rank, 2))
        halves.append([numbers(loader)[0] for _ in range(2)])
    assert [[one + other] for one, other in zip(*halves, strict=True)] == expected


def test_the_users_loader_keeps_its_own_sampler():
    raw = DataLoader(range(10), 5, shuffle=True)
    loader = prepared(raw, use_seedable_sampler=True, data_seed=4)
    assert type(raw.sampler) is type(raw.batch_sampler.sampler) is RandomSampler
    assert isinstance(loader.sampler, SeedableRandomSampler)
    assert loader.batch_sampler.sampler is loader.sampler
    expected = SeedableRandomSampler(range(10), data_seed=4)
    assert [gathered([walk(loader)]) for _ in range(2)] == [list(expected) for _ in range(2)]
    own = DataLoader(range(10), 5, sampler=SeedableRandomSampler(range(10), data_seed=6))
    loader = prepared(own, use_seedable_sampler=True, data_seed=4)
    assert gathered([walk(loader)]) == list(SeedableRandomSampler(range(10), data_seed=6))
