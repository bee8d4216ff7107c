# SPDX-License-Identifier: Apache-2.0
"""Streams shared out among ranks that each read all of it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from accelerate.data_loader import IterableDatasetShard as PeerShard
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from farflung.base.errors import ConfigError
from farflung.data.iterable import IterableDatasetShard, told_apart
from farflung.data.prepare import skip_first_batches
from tests.data.support import Seat, SizedStream, Stream, gathered, on_two_ranks, prepared, walk


@st.composite
def cases(draw):
    size = draw(st.integers(1, 4))
    split = draw(st.booleans())
    batch_size = draw(st.integers(1, 5)) * (size if split else 1)
    return draw(st.integers(0, 40)), batch_size, size, split, draw(st.booleans())


def shards_of(case, shard=IterableDatasetShard, **settings):
    length, batch_size, size, split, drop_last = case
    return [shard(SizedStream(length), batch_size, drop_last, size, rank, split, **settings) for rank in range(size)]


@given(cases())
def test_shares_are_those_of_accelerate(case):
    assert [list(shard) for shard in shards_of(case)] == [list(shard) for shard in shards_of(case, PeerShard)]


@given(cases(), st.booleans())
def test_the_length_is_the_number_of_samples(case, even):
    assert all(len(shard) == len(list(shard)) for shard in shards_of(case, even_batches=even))


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("length", [0, 1, 13, 24])
def test_workers_have_padded_rounds_of_their_own_and_metrics_still_see_each_sample_once(length, even):
    loader = DataLoader(SizedStream(length), batch_size=3, num_workers=2, multiprocessing_context="fork")
    loaders = [prepared(loader, Seat(rank, 2), dispatch_batches=False, even_batches=even) for rank in range(2)]
    lengths = [len(one) for one in loaders]  # before they are walked: torch warns of batches beyond what it was told
    walks = [walk(one) for one in loaders]
    assert sorted(gathered(walks)) == list(range(length))
    assert not even or len(walks[0]) == len(walks[1])
    assert lengths == [len(one) for one in walks]


class Relaying(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


@pytest.mark.parametrize("kind", [DataLoader, Relaying])
def test_a_collate_function_that_is_replaced_gets_the_samples_themselves(kind):
    loader = prepared(kind(Stream(5), 2), Seat(0, 2), dispatch_batches=False)
    loader.collate_fn = torch.tensor
    assert walk(loader) == [([0, 1], False, 0), ([4, 0], True, 1)]
    assert loader.collate_fn is torch.tensor


@given(cases(), st.integers(2, 4), st.booleans())
def test_the_length_counts_the_last_batch_of_each_worker(case, workers, even):
    length, batch_size, size, split, drop_last = case
    for rank in range(size):
        whole, *shards = (
            IterableDatasetShard(part, batch_size, drop_last, size, rank, split, even_batches=even)
            for part in (range(length), *(range(worker, length, workers) for worker in range(workers)))
        )
        assert whole.num_batches(workers) == sum(-(-len(list(shard)) // shard.part) for shard in shards)


def test_workers_that_share_out_a_stream_in_another_way_are_told_of_by_torch():
    class Blocks(SizedStream):
        def __iter__(self):
            worker = get_worker_info()
            return iter(range(3 * worker.id, 3 * worker.id + 3) if worker.id else range(3, 6))

    loader = prepared(DataLoader(Blocks(4), 1, num_workers=2, multiprocessing_context="fork"), Seat(0, 1))
    assert len(loader) == 4
    with pytest.warns(UserWarning, match="Length of IterableDataset"):
        assert len(list(loader)) == 6


@pytest.mark.parametrize("length", [5, 6])
def test_one_process_with_workers_knows_its_length_too(length):
    loader = prepared(DataLoader(SizedStream(length), 2, num_workers=2, multiprocessing_context="fork"))
    assert len(loader) == len(walk(loader)) == length - 2
    assert len(skip_first_batches(loader, 1)) == length - 3


class Files(IterableDataset):
    """A stream in four files, of which each rank can be given some."""

    num_shards = 4

    def __init__(self, files=((0, 1, 2), (3,), (4, 5, 6, 7), (8, 9))):
        self.files = files

    def shard(self, num_shards, index):
        return Files(self.files[index::num_shards])

    def __iter__(self):
        return (item for file in self.files for item in file)


def test_files_are_shared_out_only_where_ranks_may_be_uneven():
    loader = DataLoader(Files(), batch_size=2)
    walks = on_two_ranks(loader, dispatch_batches=False, even_batches=False)
    assert [[numbers for numbers, _, _ in one] for one in walks] == [[[0, 1], [2, 4], [5, 6], [7]], [[3, 8], [9]]]
    assert gathered(on_two_ranks(loader, dispatch_batches=False)) == list(range(10))
    before = DataLoader(type("Before", (Files,), {"num_shards": None, "n_shards": 4})(), batch_size=2)
    assert on_two_ranks(before, dispatch_batches=False, even_batches=False) == walks, "by the name of older versions"


class Chunks(IterableDataset):
    """Whole batches of three, the last one of two."""

    def __iter__(self):
        return iter([torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5]), torch.tensor([6, 7])])


def test_items_that_are_batches_are_dealt_whole_and_counted():
    walks = on_two_ranks(DataLoader(Chunks(), batch_size=None), dispatch_batches=False)
    assert [numbers for numbers, _, _ in walks[1]] == [[3, 4, 5], [0, 1, 2]]
    assert gathered(walks) == list(range(8))


def test_splitting_needs_a_batch_size_that_can_be_cut():
    for batch_size in (3, None):
        loader = DataLoader(Stream(9), batch_size=batch_size)
        with pytest.raises(ConfigError, match="split_batches"):
            prepared(loader, Seat(0, 2), dispatch_batches=False, split_batches=True)
    with pytest.raises(ConfigError, match=r"\(1\)"):
        IterableDatasetShard(Stream(9), 1, num_processes=2, split_batches=True)


def test_samples_are_told_apart_by_their_content():
    samples = [torch.ones(2), np.arange(3), np.array(["a"]), "a", b"b", 1, True, None, [1, "a"], ["a", 1], ["a"] * 2]
    found = [told_apart(sample) for sample in samples]
    assert len({*found, None}) == len(samples) + 1
    assert [told_apart(copy.deepcopy(sample)) for sample in samples] == found
    assert [told_apart(other) for other in (object(), np.array([object()]), [1, object()], [])] == [None] * 4


def test_the_epoch_is_passed_on():
    class Knowing(Stream):
        def set_epoch(self, epoch):
            self.told = epoch

    shard = IterableDatasetShard(Knowing(3), 1, num_processes=2)
    shard.set_epoch(4)
    assert (shard.epoch, shard.dataset.told) == (4, 4)
    IterableDatasetShard(Stream(3)).set_epoch(2)
