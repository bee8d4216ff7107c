# SPDX-License-Identifier: Apache-2.0
"""The index arithmetic: shares of all ranks are made in one process and laid side by side."""

from __future__ import annotations

from itertools import count, islice

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard as PeerShard, SeedableRandomSampler as PeerSampler
from hypothesis import given, strategies as st
from torch.utils.data import BatchSampler, RandomSampler

from farflung.base.errors import ConfigError
from farflung.data.samplers import (
    BatchSamplerShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    batches_after,
    rounds,
)

sizes = st.integers(1, 4)
flags = st.booleans()


@st.composite
def cases(draw):
    size = draw(sizes)
    split = draw(flags)
    batch_size = draw(st.integers(1, 5)) * (size if split else 1)
    length = draw(st.integers(0, 40))
    order = draw(st.permutations(range(length))) if draw(flags) else list(range(length))
    return order, batch_size, size, split, draw(flags), draw(flags)


def shards_of(case, shard=BatchSamplerShard):
    order, batch_size, size, split, even, drop_last = case
    return [shard(BatchSampler(order, batch_size, drop_last), size, rank, split, even) for rank in range(size)]


def in_rounds(shares):
    """All batches, step by step, rank by rank."""
    return [share[step] for step in range(max(map(len, shares))) for share in shares if step < len(share)]


@given(cases())
def test_shares_are_those_of_accelerate(case):
    assert [list(shard) for shard in shards_of(case)] == [list(shard) for shard in shards_of(case, PeerShard)]


@given(st.lists(st.lists(st.integers(), min_size=1, max_size=4), max_size=9), sizes, st.integers(0, 5))
def test_batches_of_unknown_size_are_dealt_whole_and_as_many_to_each(batches, size, skip):
    shards = [BatchSamplerShard(batches, size, rank) for rank in range(size)]
    shares = [list(shard) for shard in shards]
    assert shares == [list(PeerShard(batches, size, rank)) for rank in range(size)]
    assert in_rounds(shares)[: len(batches)] == batches
    assert len({len(share) for share in shares}) == 1
    assert [len(shard) for shard in shards] == [len(share) for share in shares]
    left = len(batches) % size
    assert {shard.remainder for shard in shards} == {sum(map(len, batches[-left:])) if left else 0}
    assert [list(SkipBatchSampler(shard, skip)) for shard in shards] == [share[skip:] for share in shares]


class Varying(list):
    """Batches whose sizes are not what `batch_size` says."""

    batch_size = 3

    def __init__(self, *sizes):
        numbers = count()
        super().__init__(list(islice(numbers, size)) for size in sizes)


@pytest.mark.parametrize("sizes", [(3, 2, 3, 3), (3, 3, 2, 3), (2, 3), (3, 2, 3), (3, 4)])
def test_varying_batches_cannot_be_made_even(sizes):
    for rank in range(2):
        with pytest.raises(ConfigError, match=r"batch_size 3 but yielded a batch of [24] .*even_batches=False"):
            list(BatchSamplerShard(Varying(*sizes), 2, rank))


def test_varying_batches_are_handed_out_as_they_are_without_even_batches():
    batches = Varying(3, 2, 4, 3, 1)
    shares = [list(BatchSamplerShard(batches, 2, rank, even_batches=False)) for rank in range(2)]
    assert in_rounds(shares) == batches
    assert [len(BatchSamplerShard(batches, 2, rank, even_batches=False)) for rank in range(2)] == [3, 2]


def test_a_batch_too_long_to_be_cut_is_refused():
    sampler = Varying(3, 4)
    sampler.batch_size = 2
    with pytest.raises(ConfigError, match="batch_size 2 but yielded a batch of 3"):
        list(BatchSamplerShard(sampler, 2, 0, split_batches=True, even_batches=False))


def test_split_batches_needs_a_batch_size_that_can_be_cut():
    with pytest.raises(ConfigError, match=r"batch size \(6\) .* multiple of 4, the number of processes. Try 8"):
        BatchSamplerShard(BatchSampler(range(9), 6, False), 4, 0, split_batches=True)
    with pytest.raises(ConfigError, match="needs a known batch size"):
        BatchSamplerShard([[1, 2]], 2, 0, split_batches=True)


def test_even_batches_may_change_between_iterations():
    shard = BatchSamplerShard(BatchSampler(range(5), 2, False), 2, 1)
    assert [list(shard), shard.remainder] == [[[2, 3], [1, 2]], 1]
    shard.even_batches = False
    assert [list(shard), shard.remainder] == [[[2, 3]], 0]
    assert shard.total_length == 3, "of all processes, as Accelerate has it"


@given(st.lists(st.integers(), max_size=20), st.integers(1, 6))
def test_rounds_are_complete_but_for_the_last(items, size):
    plain = list(rounds(items, size, drop_last=False, even=False))
    assert [item for group, _ in plain for item in group] == items
    assert all(len(group) == real for group, real in plain)
    even = list(rounds(items, size, drop_last=False, even=True))
    assert all(len(group) == size for group, _ in even)
    assert [item for group, real in even for item in group[:real]] == items
    assert list(rounds(items, size, drop_last=True, even=True)) == [pair for pair in even if pair[1] == size]


def test_skipping_a_random_order_leaves_its_generator_where_reading_it_does():
    for settings_ in ({}, {"num_samples": 25}):
        worker_states, read = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
        sampler = RandomSampler(range(10), generator=worker_states, **settings_)
        rest = list(batches_after(BatchSampler(sampler, 2, False), 4, 0))
        assert rest == list(BatchSampler(RandomSampler(range(10), generator=read, **settings_), 2, False))[4:]
        assert torch.equal(worker_states.get_state(), read.get_state())


def test_a_seedable_order_is_that_of_accelerate():
    torch.manual_seed(7)
    ours, peers = SeedableRandomSampler(range(9)), PeerSampler(range(9))
    assert [list(ours) for _ in range(3)] == [list(peers) for _ in range(3)]
    assert (ours.epoch, isinstance(ours, RandomSampler)) == (3, True)


def test_ranks_can_tell_their_first_batches_apart_if_indices_are_numbers_or_texts():
    shards = [BatchSamplerShard([batch]) for batch in ([1, 2], [torch.tensor(1), 2], [2, 1], [object(), 2])]
    one, same, other, unknown = [list(shard) and shard.first for shard in shards]
    assert one == same != other
    assert unknown is None


def test_a_sampler_may_be_endless():
    shard = BatchSamplerShard(([k] for k in count()), 2, 1)
    assert list(islice(shard, 3)) == [[1], [3], [5]]
