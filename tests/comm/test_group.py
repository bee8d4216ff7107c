# SPDX-License-Identifier: Apache-2.0
"""Group: the collectives of a group that has none but `all_gather` and `broadcast`."""

from itertools import accumulate

import pytest
import torch

from farflung.base.errors import ConfigError, Unsupported
from farflung.comm.group import Group, SoloGroup
from farflung.comm.torch_group import TorchGroup
from farflung.testing.sim import run_replicas
from tests.accelerator.conftest import on_ranks

SIZES = [1, 2, 3, 4]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class Gathering(Group):
    """The two collectives of another group."""

    def __init__(self, inner):
        self.rank, self.size = inner.rank, inner.size
        self.all_gather, self.broadcast = inner.all_gather, inner.broadcast

    all_gather = broadcast = None


def on_threads(size, function):
    run_replicas(lambda group: function(Gathering(group)), size)


def drawn(rank, dtype):
    return (100 * torch.randn(2, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int8], ids=str)
@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_goes_in_rank_order_and_rounds_half_precision_once(size, op, dtype):
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
    *_, expected = accumulate((drawn(rank, dtype).to(wide) for rank in range(size)), combine)

    def reduce(group):
        x = drawn(group.rank, dtype)
        group.all_reduce(x, op).wait()
        assert torch.equal(x, expected.to(dtype))

    on_threads(size, reduce)


@pytest.mark.parametrize("size", SIZES)
def test_plain_data_of_each_rank_arrive_on_all_in_rank_order(size):
    contents = [{"rank": rank, "names": ["ä"] * 50 * rank, "none": None} for rank in range(size)]

    def gather(group):
        assert group.all_gather_json(contents[group.rank]) == contents
        assert group.all_gather_json([]) == [[]] * size

    on_threads(size, gather)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_sent_arrives_where_it_is_sent_to(size):
    def exchange(group):
        came, passed, part = torch.empty(size, 2), torch.empty(3), torch.empty(2, dtype=torch.int32)
        sent = torch.arange(2.0 * size) + 100 * group.rank
        right, left = (group.rank + 1) % size, (group.rank - 1) % size
        parts = [torch.full((2,), 7 + rank, dtype=torch.int32) for rank in range(size)]
        last = size - 1
        works = [group.all_to_all(came, sent), group.swap(passed, torch.full((3,), float(group.rank)), right, left)]
        works.append(group.scatter(part, parts if group.rank == last else None, last))
        group.barrier()
        for work in works:
            work.wait()
        small = group.all_gather_small(torch.tensor([group.rank, -group.rank]))
        first = 2 * group.rank
        assert came.tolist() == [[100 * other + first, 100 * other + first + 1] for other in range(size)]
        assert passed.tolist() == [left] * 3
        assert part.tolist() == [7 + group.rank] * 2
        assert small.tolist() == [[other, -other] for other in range(size)]

    on_threads(size, exchange)


def test_a_second_wait_changes_nothing():
    def twice(group):
        x = torch.ones(2)
        work = group.all_reduce(x)
        work.wait()
        x.add_(5)
        work.wait()
        assert x.tolist() == [7, 7]

    on_threads(2, twice)


def test_parameters_can_be_reduced():
    weight = torch.nn.Parameter(torch.ones(3))
    SoloGroup().all_reduce(weight).wait()
    assert weight.tolist() == [1, 1, 1]
    assert weight.is_leaf


def test_ranks_of_which_no_blocks_can_be_made_are_not_split():
    def split(group):
        for size, error, words in (
            (2, Unsupported, "Gathering"),
            (3, ConfigError, "left alone"),
            (1, ConfigError, "left alone"),
        ):
            with pytest.raises(error, match=words):
                group.split(size)

    on_threads(4, split)


@on_ranks(3)
def test_they_are_torchs_collectives():
    torchs = TorchGroup()
    results = []
    for group in (torchs, Gathering(torchs)):
        values = [torch.arange(6) * 10**group.rank + 3, torch.arange(6.0) - 4 * group.rank]
        found = []
        for value in values:
            total, top, low = value.clone(), value.clone(), value.clone()
            turned, passed, part = torch.empty_like(value), torch.empty_like(value), torch.empty_like(value[:2])
            parts = [value[:2] + rank for rank in range(3)] if group.rank == 1 else None
            works = [group.all_reduce(total), group.all_reduce(top, "max"), group.all_reduce(low, "min")]
            works += [group.all_to_all(turned, value), group.scatter(part, parts, 1)]
            works += [group.swap(passed, value, (group.rank + 2) % 3, (group.rank + 1) % 3)]
            for work in works:
                work.wait()
            group.barrier()
            small = group.all_gather_small(value)
            found += [x.tolist() for x in (total, top, low, turned, passed, part, small)]
        results.append(found)
    assert results[0] == results[1]
