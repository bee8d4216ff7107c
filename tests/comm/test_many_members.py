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


@pytest.mark.parametrize("hop_bytes", [0, ObjectGroup.hop_bytes])
def test_a_sum_of_32_ranks_waits_for_as_many_answers_as_one_of_few(hop_bytes, monkeypatch):
    monkeypatch.setattr(ObjectGroup, "hop_bytes", hop_bytes)
    few, many = waits_of_a_sum(4), waits_of_a_sum(32)
    assert many <= few + 3
