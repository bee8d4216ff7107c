# SPDX-License-Identifier: Apache-2.0
"""Many members at an address: how many requests they wait for one after the other, on a clock of the test's own."""

import threading
import time

import pytest
import torch

from farflung.address.object_group import ObjectGroup
from tests.comm.test_objects import Watch
from tests.memory_bucket import memory_board
from tests.virtual_time import virtual_time
from tests.waits import until

LATE_S = 0.1  # each answer


def each(size, function):
    """Call a function for each number, in a thread each; return the results."""
    found = [None] * size

    def act(number):
        found[number] = function(number)

    threads = [threading.Thread(target=act, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in found
    return found


def waits_of_a_sum(size):
    """How many answers a rank waits for, one after the other, in an all-reduce of a few values."""
    board = memory_board(LATE_S)

    def summed(rank):
        group, x = ObjectGroup(board, "group", rank, size, Watch()), torch.arange(256.0)
        group.all_reduce(x).wait()
        began = time.monotonic()
        group.all_reduce(x).wait()
        assert x[1] == size**2
        return (time.monotonic() - began) / LATE_S

    with virtual_time():
        return max(each(size, summed))


def test_each_of_16_ranks_that_swap_writes_one_share_and_reads_one():
    size, board = 16, memory_board()
    groups = [ObjectGroup(board, "group", rank, size, Watch()) for rank in range(size)]
    outs, mine = torch.empty(size, 300_000), torch.arange(float(size))[:, None].expand(size, 300_000)
    works = [one.swap(outs[one.rank], mine[one.rank], (one.rank + 3) % size, (one.rank - 3) % size) for one in groups]
    until(lambda: all(work.written.is_over for work in works))
    assert board.counts == {"write": size}
    for work in works:
        work.wait()
    assert torch.equal(outs, mine.roll(3, 0))
    assert board.counts == {"write": size, "read": size}


def test_ranks_that_only_swap_wait_for_others_that_lag_and_leave_few_objects():
    size, board = 4, memory_board()

    def swapped(rank):
        group, out = ObjectGroup(board, "group", rank, size, Watch()), torch.empty(1)
        for number in range(100):
            to, source = (rank + number) % size, (rank - number) % size
            group.swap(out, torch.tensor([100.0 * rank + number]), to, source).wait()
            assert out == 100 * source + number
        return len(board.list(""))

    with virtual_time():
        assert max(each(size, swapped)) < 40 * size


@pytest.mark.parametrize("hop_bytes", [0, ObjectGroup.hop_bytes])
def test_a_sum_of_32_ranks_waits_for_as_many_answers_as_one_of_few(hop_bytes, monkeypatch):
    monkeypatch.setattr(ObjectGroup, "hop_bytes", hop_bytes)
    few, many = waits_of_a_sum(4), waits_of_a_sum(32)
    assert many <= few + 3
