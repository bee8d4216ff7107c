# SPDX-License-Identifier: Apache-2.0
"""Loaders with a state: Accelerate's `use_stateful_dataloader`, loaders that keep a state of their own, torchdata's."""

from __future__ import annotations

import copy
import pickle
import weakref
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from farflung.data_loader import (
    DataLoaderAdapter,
    DataLoaderDispatcher,
    DataLoaderShard,
    DataLoaderStateMixin,
    SkipDataLoader,
    prepare_data_loader,
    skip_first_batches,
)
from tests.accelerator.conftest import on_ranks
from tests.data.support import prepared, world


class Counting(IterableDataset):
    """0, 1, ... 10; knows how far it was read, and all that was read of it."""

    def __init__(self):
        self.at, self.read = 0, []

    def __iter__(self):
        while self.at < 11:
            self.at += 1
            self.read.append(self.at - 1)
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Plain(IterableDataset):
    """0, 1, ... 10; has no state."""

    def __init__(self, read):
        self.read = read

    def __iter__(self):
        for number in range(11):
            self.read.append(number)
            yield number


class Remembering(DataLoader):
    """A loader that knows how many batches it has made, and goes on there without its data set's help."""

    made = start = 0

    def __iter__(self):
        self.made, self.start = self.start, 0
        for number in range(self.made, 6):
            self.made += 1
            yield torch.arange(11)[2 * number : 2 * number + 2]
        self.made = 0

    def state_dict(self):
        return {"made": self.made}

    def load_state_dict(self, state):
        self.start = state["made"]


def gone_on(make, after=2):
    """What is left of an iteration whose state is loaded into a fresh loader, and the iteration that follows."""
    loader = make()
    batches = iter(loader)
    for _ in range(after):
        next(batches)
    state = loader.state_dict()
    other = make()
    other.load_state_dict(state)
    return [[batch.tolist() for batch in other] for _ in range(2)]


# torchdata uses what torch is about to drop.
about_to_be_dropped = pytest.mark.filterwarnings("ignore:'set_vital'", "ignore:.*:DeprecationWarning:torchdata")
numbers = partial(range, 11)
WHOLE = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]


@about_to_be_dropped
@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
@pytest.mark.parametrize("data", [numbers, Counting])
def test_a_stateful_loader_goes_on_where_its_state_was_taken(kind, data):
    made = []

    def make():
        made.append(data())
        return kind(made[-1], batch_size=2, use_stateful_dataloader=True)

    assert gone_on(make) == [WHOLE[2:], WHOLE]
    if data is Counting:
        assert made[-1].read[:5] == [6, 7, 8, 9, 10]  # the third batch had been read ahead


def test_a_loader_with_a_state_of_its_own_is_asked_for_it():
    read = []
    assert gone_on(lambda: prepared(Remembering(Plain(read), 2), use_stateful_dataloader=True)) == [WHOLE[2:], WHOLE]
    assert read == []


@about_to_be_dropped
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", [numbers, Counting])
def test_torchdatas_loader_goes_on_where_its_state_was_taken(data, workers):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make():
        return prepared(torchdata.StatefulDataLoader(data(), 2, num_workers=workers))

    assert gone_on(make) == [WHOLE[2:], WHOLE]


def check_that_another_goes_on(make):
    """Load the state of a loader after a batch into another one, which has what is left."""
    loader, other = make(), make()
    batches = iter(loader)
    next(batches)
    other.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in batches]


@about_to_be_dropped
@pytest.mark.parametrize("workers", [0, 1])
def test_torchdatas_shuffled_loader_keeps_its_order(workers):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    check_that_another_goes_on(
        lambda: prepared(torchdata.StatefulDataLoader(range(11), 2, shuffle=True, num_workers=workers))
    )


@about_to_be_dropped
@pytest.mark.parametrize("dispatch", [None, True])
def test_torchdatas_loader_goes_on_after_batches_that_were_skipped_or_handed_out_before_it_was_resumed(dispatch):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def gone_on_from(loader):
        batches = iter(loader)
        next(batches)
        other = prepared(torchdata.StatefulDataLoader(range(11), 2), dispatch_batches=dispatch)
        other.load_state_dict(loader.state_dict())
        return other

    first = prepared(torchdata.StatefulDataLoader(range(11), 2), dispatch_batches=dispatch)
    skipping = gone_on_from(skip_first_batches(first, 1))
    resumed = gone_on_from(gone_on_from(first))
    assert [[batch.tolist() for batch in loader] for loader in (skipping, resumed)] == [WHOLE[2:], WHOLE[2:]]


@on_ranks(2)
def test_torchdatas_loader_goes_on_in_a_share_of_a_stream():
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    for stream in (partial(Plain, []), Counting):
        check_that_another_goes_on(
            lambda stream=stream: prepared(torchdata.StatefulDataLoader(stream(), 2), world(), dispatch_batches=False)
        )


@about_to_be_dropped
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher, SkipDataLoader])
def test_loaders_are_of_the_classes_that_scripts_ask_for(kind, stateful):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    loader = kind(range(8), batch_size=2, use_stateful_dataloader=stateful)
    assert isinstance(loader, kind)
    assert isinstance(loader, DataLoaderAdapter)
    assert isinstance(loader, DataLoaderStateMixin) is (kind is not SkipDataLoader)
    assert (loader.use_stateful_dataloader, loader.gradient_state.sync_gradients) == (stateful, True)
    for one in (loader, loader.base_dataloader, copy.copy(loader)):
        assert isinstance(one, torchdata.StatefulDataLoader) is stateful
    made = prepare_data_loader(DataLoader(range(8), 2), use_stateful_dataloader=stateful)
    assert isinstance(made, torchdata.StatefulDataLoader) is stateful
    again = pickle.loads(pickle.dumps(loader))
    assert type(again) is type(loader)
    assert hasattr(loader, "state_dict") is (stateful or kind is not SkipDataLoader)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    if stateful:
        again.load_state_dict(loader.state_dict())
        assert [batch.tolist() for batch in again] == [batch.tolist() for batch in iterator] == [[2, 3], [4, 5], [6, 7]]


def test_a_loader_is_freed_with_its_last_reference_in_the_middle_of_an_iteration():
    loader = DataLoaderShard(range(8), batch_size=2)
    iterator, alive = iter(loader), weakref.ref(loader)
    next(iterator)
    assert loader.gradient_state.active_dataloader is loader
    del loader, iterator
    assert alive() is None
