# SPDX-License-Identifier: Apache-2.0
"""Prepared loaders that read for themselves: order, epochs, reports to the loop, attributes, skipping."""

from __future__ import annotations

import gc
import itertools
import os
from functools import partial
from unittest import mock

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from farflung.base.errors import ConfigError, StateError, Unsupported
from farflung.comm.group import SoloGroup
from farflung.data.dispatcher import DataLoaderDispatcher
from farflung.data.loader import DataLoaderShard
from farflung.data.prepare import prepare_data_loader, skip_first_batches
from farflung.data.samplers import BatchSamplerShard, SeedableRandomSampler
from farflung.data.torch_loaders import LoaderView, SkipDataLoader, Source
from farflung.loop.state import LoopState
from tests.data.support import (
    Late,
    Seat,
    SizedStream,
    Stream,
    gathered,
    on_two_ranks,
    out_of_order,
    prepared,
    values,
    walk,
)


def numbers(loader):
    return [values(batch) for batch in loader]


def current(state):
    return state.current and state.current.loader


def test_two_workers_read_the_same_as_none():
    for rank in range(2):
        loaders = (prepared(DataLoader(range(21), 4, num_workers=workers), Seat(rank, 2)) for workers in (0, 2))
        plain, with_workers = map(numbers, loaders)
        assert plain == with_workers


def test_a_padded_batch_is_the_last_one_whichever_worker_is_late():
    loader = DataLoader(Late(range(7)), 2, **out_of_order(6))
    assert walk(prepared(loader, Seat(1, 2))) == [([2, 3], False, 0), ([6, 0], True, 3)]


def test_custom_samplers_need_no_attributes():
    class Sampler:
        def __iter__(self):
            return iter([3, 1, 4, 0, 2])

    assert gathered(on_two_ranks(DataLoader(range(5), 2, sampler=Sampler()))) == [3, 1, 4, 0, 2]
    batches = [[0, 1, 2], [3, 4], [5]]
    loader = DataLoader(range(6), batch_sampler=batches)
    assert gathered(on_two_ranks(loader)) == [0, 1, 2, 3, 4, 5]
    assert numbers(prepared(loader)) == batches


def test_loaders_that_do_no_batching():
    table = torch.arange(11)  # takes one index or a list of them
    batched = DataLoader(table, sampler=BatchSampler(range(11), 2, False), batch_size=None)
    assert gathered(on_two_ranks(batched)) == list(range(11))
    assert numbers(skip_first_batches(prepared(batched, Seat(1, 2)), 2)) == [[10, 0]]
    single = DataLoader(table, batch_size=None)
    assert numbers(prepared(single, Seat(1, 2))) == [[1], [3], [5], [7], [9], [0]]
    assert numbers(prepared(single)) == [[k] for k in range(11)]
    chunks = DataLoader([torch.full((size,), size) for size in (3, 1, 2)], batch_size=None)
    assert walk(prepared(chunks, Seat(0, 2))) == [([3, 3, 3], False, 0), ([2, 2], True, 2)], "samples, not batches"
    seeded = prepared(DataLoader(table, None, shuffle=True), use_seedable_sampler=True, data_seed=5)
    assert numbers(seeded) == [[k] for k in SeedableRandomSampler(table, data_seed=5)]


class Recording(list):
    """Keeps which of its samples were read."""

    def __init__(self, length):
        super().__init__(range(length))
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return index


def test_the_batch_after_next_is_not_read_yet():
    data = Recording(10)
    iterator = iter(prepared(DataLoader(data, 2)))
    next(iterator)
    assert data.read == [0, 1, 2, 3]
    next(iterator)
    assert data.read == [0, 1, 2, 3, 4, 5]


def test_batches_go_to_the_device_whatever_they_are_made_of():
    data = [{"x": torch.ones(2), "name": "a"}] * 3
    loader = prepared(DataLoader(data, 2), device=torch.device("meta"))
    assert [batch["x"].device.type for batch in loader] == ["meta", "meta"]
    assert [batch["x"].device.type for batch in prepared(DataLoader(data, 2), device=None)] == ["cpu", "cpu"]
    batch, meta = mock.Mock(), torch.device("meta")
    raw = DataLoader([0], collate_fn=lambda items: batch)
    made = DataLoaderShard([0], meta, _non_blocking=True, collate_fn=raw.collate_fn)
    there = prepare_data_loader(raw, meta, put_on_device=True, non_blocking=True)
    for number, loader in enumerate((made, there, prepared(raw, device=meta, non_blocking=True)), 1):
        assert list(loader) == [batch.to.return_value]
        assert batch.to.mock_calls == [mock.call(meta, non_blocking=True)] * number


# ---- the loop


@pytest.fixture
def state():
    """The state of a loop, of which nothing may be left."""
    state = LoopState()
    yield state
    assert state.loaders == []
    assert state.current is None


def test_the_end_is_known_while_the_last_batch_is_in_hand_and_no_longer(state):
    loader = prepared(DataLoader(range(5), 2), state=state)
    seen = [(state.end_of_dataloader, current(state) is loader) for _ in loader]
    assert seen == [(False, True), (False, True), (True, True)]
    assert not state.end_of_dataloader
    assert state.current is None
    for _ in loader:
        assert not state.end_of_dataloader
        break


def test_a_loader_inside_another_one_takes_its_place_and_gives_it_back(state):
    seen = []
    train, evaluation = (prepared(DataLoader(range(2), 1), state=state) for _ in range(2))
    for _ in train:
        seen.append((current(state) is train, state.end_of_dataloader))
        for _ in evaluation:
            seen.append((current(state) is evaluation, state.end_of_dataloader))
        seen.append((current(state) is train, state.end_of_dataloader))
    once = [(True, False), (True, True)]
    assert seen == [(True, False), *once, (True, False), (True, True), *once, (True, True)]


def test_loaders_in_turn_are_each_the_current_one_with_their_batch(state):
    one, other = (prepared(DataLoader(range(2), 1), state=state) for _ in range(2))
    iterators = iter(one), iter(other)
    seen = []
    for loader, iterator in zip((one, other) * 2, iterators * 2, strict=True):
        next(iterator)
        seen.append((current(state) is loader, state.end_of_dataloader))
    assert seen == [(True, False), (True, False), (True, True), (True, True)]
    assert all(next(iterator, None) is None for iterator in iterators)


def test_an_exception_in_the_loop_or_in_the_data_leaves_no_trace(state):
    failing = DataLoader(range(4), 1, collate_fn=lambda items: 1 // (2 - items[0]))
    with pytest.raises(ZeroDivisionError):
        list(prepared(failing, state=state))
    assert state.loaders == []
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for _ in prepared(DataLoader(range(4), 1), state=state)]
    gc.collect()


def test_an_iterator_thrown_away_late_does_not_disturb_the_one_after_it(state):
    loader = prepared(DataLoader(range(2), 1), state=state)
    abandoned = iter(loader)
    next(abandoned)
    for k, _ in enumerate(loader):
        if k == 1:
            assert state.end_of_dataloader
            del abandoned
            gc.collect()
            assert state.end_of_dataloader
            assert current(state) is loader


def test_two_iterations_of_one_loader_at_a_time(state):
    loader = prepared(DataLoader(range(3), 1), state=state)
    for one, other in zip(loader, itertools.islice(loader, 2), strict=False):
        assert (values(one), current(state)) == (values(other), loader)
    assert state.loaders == []
    first, second = iter(loader), iter(loader)
    next(first)
    assert len(list(second)) == 3
    assert [(values(batch), current(state) is loader) for batch in first] == [([1], True), ([2], True)]


def test_a_loader_inside_itself_is_two_iterations(state):
    loader = prepared(DataLoader(range(5), 2), Seat(0, 2), state=state)

    def told():
        assert (state.end_of_dataloader, state.remainder) == (loader.end_of_dataloader, loader.remainder)
        return loader.end_of_dataloader, loader.remainder

    outside, inside = [], []
    for _ in loader:
        before = told()
        inside.append([told() for _ in loader])
        assert told() == before
        for _ in loader:
            break
        assert told() == before
        outside.append(before)
    assert outside == [(False, 0), (True, 1)]
    assert inside == [outside] * 2


def test_persistent_workers_serve_one_iteration_at_a_time():
    loader = prepared(DataLoader(range(4), 1, num_workers=1, persistent_workers=True))
    outer = iter(loader)
    next(outer)
    assert numbers(loader) == [[0], [1], [2], [3]]
    with pytest.raises(StateError, match=r"again before this iteration ended.*use persistent_workers=False"):
        next(outer)
    assert numbers(loader) == [[0], [1], [2], [3]]


# ---- what it looks like


def test_a_prepared_loader_is_a_loader_with_the_settings_of_the_users_own():
    class Mine(DataLoader):
        colour = "blue"

    raw = Mine(range(9), 3, num_workers=2, timeout=5, persistent_workers=True, prefetch_factor=3, collate_fn=list)
    for size in (1, 2):
        loader = prepared(raw, Seat(0, size))
        assert isinstance(loader, DataLoader)
        assert isinstance(loader, DataLoaderShard)
        assert isinstance(loader.base_dataloader, Mine)
        names = ("dataset", "num_workers", "timeout", "persistent_workers", "prefetch_factor", "collate_fn", "colour")
        assert all(getattr(loader, name) == getattr(raw, name) for name in names)
        assert loader.multiprocessing_context is None
        with pytest.raises(AttributeError, match="nonsense"):
            _ = loader.nonsense
    assert isinstance(prepared(raw, Seat(0, 2)).batch_sampler, BatchSamplerShard)


def test_a_view_declares_what_torchs_loader_has():
    names = {"multiprocessing_context", *(name for name in vars(DataLoader(range(2))) if name[0] != "_")}
    assert names <= vars(LoaderView).keys()


def as_it_is(raw):
    return SkipDataLoader.over(Source(raw), 0)


@pytest.mark.parametrize("prepare", [prepared, partial(prepared, group=Seat(0, 2)), as_it_is])
def test_what_is_set_on_a_loader_takes_effect_there_and_leaves_the_users_own_alone(prepare):
    class Mine(DataLoader):
        colour = "blue"

    raw = Mine(range(4), 2)
    collate_fn = raw.collate_fn
    loader = prepare(raw)
    loader.collate_fn = sum
    assert 1 in list(loader)
    loader.mark, loader.colour = True, "red"
    assert (loader.mark, loader.colour) == (True, "red")
    for name, value in (("batch_size", 3), ("dataset", range(5)), ("sampler", [1])):
        with pytest.raises(ValueError, match="should not be set"):
            setattr(loader, name, value)
    assert (raw.collate_fn, raw.colour, hasattr(raw, "mark")) == (collate_fn, "blue", False)


def test_what_is_set_on_a_loader_of_a_loader_leaves_that_alone():
    skipping = SkipDataLoader(range(6), 1, batch_size=2)
    loader = prepared(skipping)
    loader.collate_fn = sum
    assert list(loader) == [5, 9]
    assert numbers(skipping) == [[2, 3], [4, 5]]


def test_a_sampler_that_is_set_inside_a_batch_sampler_decides_the_next_pass():
    one, two = prepared(DataLoader(range(4), 2)), prepared(DataLoader(range(4), 1), Seat(0, 2))
    one.batch_sampler.sampler = two.batch_sampler.batch_sampler.sampler = [3, 1, 2, 0]
    assert (numbers(one), numbers(two)) == ([[3, 1], [2, 0]], [[3], [2]])
    for loader in (one, two):
        loader.set_sampler([0, 1, 2, 3])
    assert (numbers(one), numbers(two)) == ([[0, 1], [2, 3]], [[0], [2]])
    with pytest.raises(Unsupported, match="the order comes from a list that holds no sampler"):
        prepared(DataLoader(range(2), batch_sampler=[[0, 1]])).set_sampler([1, 0])


@pytest.mark.parametrize("rank", [None, Seat(0, 2)])
def test_a_sampler_without_a_length_is_given_back_and_replaced(rank):
    class Endless(Sampler):
        def __iter__(self):
            return itertools.count()

    endless = Endless()
    loader = prepared(DataLoader(range(4), 2, sampler=endless), rank)
    assert loader.get_sampler() is endless
    loader.set_sampler([3, 1])
    assert numbers(loader) == [[3, 1]]
    assert loader.get_sampler() == [3, 1]


def test_persistent_workers_live_through_epochs():
    options = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    loader = prepared(DataLoader(range(2), None, collate_fn=lambda _: os.getpid(), **options))
    assert len({*loader, *loader}) == 1


def test_preparing_twice_changes_nothing():
    loader = prepared(DataLoader(range(4), 2), Seat(0, 2))
    assert (loader.end_of_dataloader, loader.remainder, loader.skip_batches) == (False, -1, 0)
    assert prepared(loader, Seat(0, 2)) is loader


# ---- skipping


def kinds_of_loaders():
    yield "raw", DataLoader(range(11), 2)
    yield "raw stream", DataLoader(SizedStream(11), 2)
    yield "one process", prepared(DataLoader(range(11), 2))
    yield "one process, stream", prepared(DataLoader(SizedStream(11), 2))
    for rank in range(2):
        yield "sharded", prepared(DataLoader(range(11), 2), Seat(rank, 2))
        yield "split", prepared(DataLoader(range(11), 4), Seat(rank, 2), split_batches=True)
        yield "uneven", prepared(DataLoader(range(11), 2), Seat(rank, 2), even_batches=False)
        yield "stream", prepared(DataLoader(SizedStream(11), 2), Seat(rank, 2), dispatch_batches=False)


@pytest.mark.parametrize("skip", [0, 1, 2, 3, 50])
def test_skipping_leaves_out_the_first_batches_and_nothing_else(skip):
    for name, loader in kinds_of_loaders():
        batches = walk if isinstance(loader, DataLoaderShard) else numbers
        whole, skipping = batches(loader), skip_first_batches(loader, skip)
        assert batches is numbers or (skipping.end_of_dataloader, skipping.remainder) == (False, -1)
        assert batches(skipping) == whole[skip:], name
        assert len(skipping) == max(0, len(loader) - skip), name
        assert numbers(skip_first_batches(skipping, 1)) == numbers(loader)[skip + 1 :], name
        assert isinstance(skipping, DataLoader)


@pytest.mark.parametrize("size", [1, 2])
def test_skipped_batches_are_not_read(size):
    data = Recording(100)
    raw = DataLoader(data, 2)
    ours = [[96, 97], [98, 99]] if size == 1 else [[96, 97]]
    assert numbers(skip_first_batches(prepared(raw, Seat(0, size)), 48 // size)) == ours
    assert min(data.read) == 96
    data.read.clear()
    list(skip_first_batches(raw, 49))
    assert data.read == [98, 99]
    data.read.clear()
    list(skip_first_batches(prepared(raw, dispatch_batches=True), 49))
    assert data.read == [0, 1, 98, 99], "the first ones may complete the last round"


@pytest.mark.filterwarnings("ignore:'set_vital'")  # torchdata uses what torch is about to drop
def test_a_skipping_loader_has_accelerates_constructor():
    loader = SkipDataLoader(range(7), skip_batches=2, batch_size=2)
    assert (numbers(loader), len(loader), loader.batch_size) == ([[4, 5], [6]], 2, 2)
    assert numbers(SkipDataLoader(range(4), 1, use_stateful_dataloader=True, batch_size=3)) == [[3]]
    with pytest.raises(ConfigError, match=r"skip_first_batches: num_batches.*-1"):
        skip_first_batches(DataLoader(range(3)), -1)
    with pytest.raises(ConfigError, match="use_stateful_dataloader"):
        SkipDataLoader(range(3), use_stateful_dataloader="yes")


def test_a_loader_that_skips_is_prepared_only_where_its_batches_need_no_sharing():
    skipping = skip_first_batches(DataLoader(Stream(8), 2), 1)
    assert numbers(prepared(skipping)) == [[2, 3], [4, 5], [6, 7]]
    with pytest.raises(ConfigError, match="A SkipDataLoader cannot be sharded across ranks: prepare the loader first"):
        prepared(skipping, Seat(0, 2), dispatch_batches=False)


# ---- what is refused, and the function of Accelerate's name


def test_data_pipes_are_refused_on_several_ranks():
    from torch.utils.data.datapipes.iter import IterableWrapper

    with pytest.raises(Unsupported, match="data pipe"):
        prepared(DataLoader(IterableWrapper(range(4)), 2), Seat(0, 2))


def test_only_streams_with_device_placement_are_dispatched_by_default():
    for size, data, device, dispatched in (
        (2, Stream(4), torch.device("cpu"), True),
        (2, Stream(4), None, False),
        (2, range(4), torch.device("cpu"), False),
        (1, Stream(4), torch.device("cpu"), False),
    ):
        loader = prepared(DataLoader(data, 2), Seat(0, size), device=device)
        assert isinstance(loader, DataLoaderShard) is not dispatched
    assert isinstance(prepared(DataLoader(range(4)), dispatch_batches=True), DataLoaderDispatcher)
    all_ranks, readers = SoloGroup(), SoloGroup()
    all_ranks.size, readers.size = 4, 2
    assert isinstance(prepared(DataLoader(Stream(4), 2), all_ranks, readers=readers), DataLoaderShard)
    with pytest.raises(Unsupported, match="dispatch_batches=True does not go with tensor parallelism"):
        prepared(DataLoader(range(4)), all_ranks, readers=readers, dispatch_batches=True)


def test_prepare_data_loader_shares_among_the_processes_it_is_told():
    assert numbers(prepare_data_loader(DataLoader(range(4), 2), put_on_device=True)) == [[0, 1], [2, 3]]
    share = partial(prepare_data_loader, num_processes=2, process_index=0)
    assert numbers(share(DataLoader(range(7), 2), even_batches=False, process_index=1)) == [[2, 3], [6]]
    assert numbers(share(DataLoader(range(7), 2), split_batches=True)) == [[0], [2], [4], [6]]
    assert numbers(share(DataLoader(range(3), 2), already_sharded=True)) == [[0, 1], [2]]
    seeded = share(DataLoader(range(6), 3, shuffle=True), use_seedable_sampler=True, data_seed=5)
    assert numbers(seeded) == [list(SeedableRandomSampler(range(6), data_seed=5))[:3]]
    for number, name in ((-1, "process_index"), (2, "process_index"), (0, "num_processes")):
        with pytest.raises(ConfigError, match=name):
            share(DataLoader(range(8)), **{name: number})
    with pytest.raises(ConfigError, match=r"True for process 1 of 2, but this is 0 of 1\."):
        prepare_data_loader(DataLoader(range(8)), num_processes=2, process_index=1, dispatch_batches=True)
    with pytest.raises(Unsupported, match=r"axes \['tp'\] is not supported\. Use \['dp', "):
        prepare_data_loader(DataLoader(range(8)), torch_device_mesh=type("Mesh", (), {"mesh_dim_names": ("tp", "dp")}))


def test_a_generator_of_an_iterable_data_set_is_the_shared_one():
    class Shuffled(IterableDataset):
        def __init__(self, seed):
            self.generator = torch.Generator().manual_seed(seed)

        def __iter__(self):
            return iter(torch.randperm(8, generator=self.generator).tolist())

    loaders = [prepared(DataLoader(Shuffled(1), 2), Seat(rank, 2), dispatch_batches=False) for rank in range(2)]
    first, second = (gathered([walk(loader) for loader in loaders]) for _ in range(2))
    assert first == list(Shuffled(1)) != second
    assert sorted(second) == list(range(8))
