# SPDX-License-Identifier: Apache-2.0
"""One rank gives every rank a value of its own: tensors and objects, one collective, no traces of the value before."""

from collections import OrderedDict, namedtuple

import pytest
import torch

from farflung.base.errors import RankFailure
from farflung.comm.group import SoloGroup
from farflung.comm.packet import Header
from farflung.comm.scatter import Scatter
from tests.accelerator.conftest import on_ranks
from tests.comm.counting import CountingGroup, num_alive
from tests.comm.test_collectives import Unpicklable
from tests.comm.test_packet import DTYPES, noise, same_bytes

Batch = namedtuple("Batch", "ids stop")


class Text:
    """An object that is neither a container nor a tensor."""

    def __init__(self, words):
        self.words = words


def value_of(rank, rows):
    """What `rank` gets; any rank can build any other's."""
    torch.manual_seed(rank)
    every = {str(dtype): noise((rows, 2), dtype) for dtype in DTYPES}
    odd = [torch.tensor(rank), torch.empty(0, 3), torch.randn(4, rows).t(), torch.nn.Parameter(torch.ones(2))]
    plain = (None, True, 1, 1.0, "text", b"bytes", -0.0, 2**70, Text(["a"] * rows))
    return OrderedDict(batch=Batch(every, rank == 1), odd=odd, plain=plain, rank=rank, empty={})


def check(found, rank, rows):
    wanted = value_of(rank, rows)
    assert type(found) is OrderedDict
    assert type(found["batch"]) is Batch
    assert list(found) == list(wanted)
    assert all(same_bytes(found["batch"].ids[key], x) for key, x in wanted["batch"].ids.items())
    assert all(same_bytes(a, b.detach()) for a, b in zip(found["odd"], wanted["odd"], strict=True))
    assert not any(x.requires_grad for x in found["odd"])
    assert found["batch"].stop is (rank == 1)
    assert [(type(x), x) for x in found["plain"][:-1]] == [(type(x), x) for x in wanted["plain"][:-1]]
    assert str(found["plain"][6]) == "-0.0"
    assert found["plain"][-1].words == ["a"] * rows
    assert (found["rank"], found["empty"]) == (rank, {})


@pytest.mark.parametrize("num_ranks", [2, 3])
@on_ranks()
def test_each_rank_gets_its_own_value(num_ranks):
    group = CountingGroup()
    scatter = Scatter(group)
    received = []
    sizes = [3, 3, 1, 0, 40, 39, 3000, 3, 40, 3, 3, 3, 3, 3, 3, 3, 3, 3]
    for rows in sizes:
        if group.rank == 0:
            values = [value_of(rank, rows) for rank in range(group.size)]
            assert scatter.send(values) is values[0]
        else:
            received.append(scatter.receive())
            check(received[-1], group.rank, rows)
    for found, rows in zip(received, sizes, strict=False):  # later values did not write over earlier ones
        check(found, group.rank, rows)
    assert group.calls[-1][2] < 20_000  # bytes
    # One collective each, and one more where a value did not fit (40 and 3000 rows) and when the largest was long ago.
    assert len(group.taken()) == len(sizes) + 3


@on_ranks(2)
def test_a_steady_stream_takes_one_collective_each():
    group = CountingGroup()
    scatter = Scatter(group)
    for turn in range(200):  # lengths that wander, as batches padded to their longest sample do
        length = 90 + 7 * turn % 11
        if group.rank == 0:
            scatter.send([{"ids": torch.full((8, length), turn), "stop": turn == 199} for _ in range(group.size)])
        else:
            value = scatter.receive()
            assert value["ids"].equal(torch.full((8, length), turn))
            assert value["stop"] is (turn == 199)
    assert len(group.taken()) <= 202
    for length in range(600):  # no length comes twice
        if group.rank == 0:
            scatter.send([None, torch.full((length,), 7)])
        else:
            assert scatter.receive().shape == (length,)
    assert num_alive(Header) < 600


@on_ranks(3)
def test_a_source_that_fails_says_so_and_may_go_on():
    group = CountingGroup()
    scatter = Scatter(group)
    if group.rank == 0:
        scatter.fail("the data set raised: IndexError: 7")
        with pytest.raises(ArithmeticError):
            scatter.send([0, Unpicklable(), 0])
        scatter.send(["go", "on", torch.eye(2).to_sparse()])
        return
    for words in ("rank 0 could not send: the data set raised: IndexError: 7", "ArithmeticError: no pickle of me"):
        with pytest.raises(RankFailure, match=words):
            scatter.receive()
    found = scatter.receive()
    assert (found if group.rank == 1 else found.to_dense().tolist()) == [None, "on", [[1, 0], [0, 1]]][group.rank]


@on_ranks(2)
def test_inference_mode_and_gradients_leave_no_trace():
    group = CountingGroup()
    scatter = Scatter(group)
    for mode in (True, False, True, False):
        with torch.inference_mode(mode):
            x = torch.ones(3, requires_grad=not mode)
            if group.rank == 0:
                scatter.send([x, x])
            else:
                assert scatter.receive().tolist() == [1, 1, 1]


def test_alone_the_source_keeps_its_value():
    value = {"any": object()}
    scatter = Scatter(SoloGroup())
    assert scatter.send([value]) is value
    scatter.fail("nobody hears it")


class Slow(SoloGroup):
    """Rank 0 of two, whose scatters end only when they are waited for."""

    size = 2

    def __init__(self):
        self.words = []

    def scatter(self, out, parts, src):
        sent = [part.clone() for part in parts]
        self.words.append("started")

        class Work:
            def wait(work):
                unchanged = all(torch.equal(now, then) for now, then in zip(parts, sent, strict=True))
                self.words.append("waited" if unchanged else "overwritten")

        return Work()


def test_what_is_under_way_is_waited_for_before_its_buffer_is_used_again():
    group = Slow()
    scatter = Scatter(group)
    scatter.send([0, torch.zeros(8)])
    assert group.words == ["started"]
    scatter.send([0, torch.ones(8)])
    assert group.words == ["started", "waited", "started"]
    scatter.flush()
    scatter.flush()
    assert group.words == ["started", "waited", "started", "waited"]
    scatter.send([0, torch.zeros(5000)])  # first the capacity that it needs
    assert group.words[4:] == ["started", "waited", "started"]
