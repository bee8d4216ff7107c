# SPDX-License-Identifier: Apache-2.0
"""SimGroup: the collectives of a group on threads, in rank order, and what happens when a replica leaves."""

import pytest
import torch

from farflung.base.errors import CollectiveMismatch, RankFailure
from farflung.testing.sim import run_replicas


def every_collective(group):
    mine = torch.arange(3.0) + 10 * group.rank
    gathered, swapped = torch.zeros(6), torch.zeros(6)
    total, top, low = mine.clone(), mine.clone(), mine.clone()
    sent, part = mine.clone(), torch.zeros(2)
    works = [group.all_reduce(total), group.all_reduce(top, "max"), group.all_reduce(low, "min")]
    works += [group.all_gather(gathered, mine), group.all_to_all(swapped, torch.arange(6.0) + 10 * group.rank)]
    works += [group.broadcast(sent, 1)]
    works += [group.scatter(part, list(torch.arange(4.0).split(2)) if group.rank == 0 else None, 0)]
    for work in works:
        work.wait()
    group.barrier()
    return [x.tolist() for x in (total, top, low, gathered, swapped, sent, part)]


def test_each_collective_does_what_the_protocol_says():
    first, second = run_replicas(every_collective, 2)
    assert first[:4] == second[:4] == [[10, 12, 14], [10, 11, 12], [0, 1, 2], [0, 1, 2, 10, 11, 12]]
    assert (first[4], second[4]) == ([0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15])
    assert first[5] == second[5] == [10, 11, 12]
    assert (first[6], second[6]) == ([0, 1], [2, 3])


def summed(group):
    x = torch.tensor([[1e8], [1.0], [-1e8], [1.0]][group.rank])
    group.all_reduce(x).wait()
    return x.item(), torch.randn(2).tolist()


def test_sums_are_made_in_rank_order_and_runs_repeat():
    torch.manual_seed(0)
    once = run_replicas(summed, 4)
    torch.manual_seed(0)
    assert run_replicas(summed, 4) == once
    assert [value for value, _ in once] == [1.0] * 4  # ((1e8 + 1) - 1e8) + 1 in fp32


def one_leaves(group):
    group.all_gather_small(torch.zeros(1))
    if group.rank == 1:
        group.leave("tired")
        return "left"
    with pytest.raises(RankFailure, match=r"rank 1 left \(tired\)"):
        group.all_gather_small(torch.zeros(1))
    return "told"


def test_a_rank_that_leaves_is_named_to_those_that_wait():
    assert run_replicas(one_leaves, 3) == ["told", "left", "told"]


def all_leave_and_come_back(group):
    group.leave("first try")
    group.all_gather_small(torch.zeros(1))
    return group.all_gather_small(torch.tensor([float(group.rank)])).flatten().tolist()


def test_ranks_that_all_left_can_meet_again():
    assert run_replicas(all_leave_and_come_back, 2) == [[0, 1], [0, 1]]


def one_fails(group):
    if group.rank == 1:
        raise ValueError("boom")
    group.barrier()


def test_the_cause_is_raised_and_not_its_consequence():
    with pytest.raises(ValueError, match="boom"):
        run_replicas(one_fails, 3)


def test_different_sizes_are_a_mismatch_and_a_wait_without_end_is_an_error_at_once():
    with pytest.raises(CollectiveMismatch, match="all_reduce"):
        run_replicas(lambda group: group.all_reduce(torch.zeros(2 + group.rank)).wait(), 2)
    with pytest.raises(RankFailure, match="rank 1 left"):
        run_replicas(lambda group: group.rank == 0 and group.barrier(), 2)
