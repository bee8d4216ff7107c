# SPDX-License-Identifier: Apache-2.0
"""All ranks derive a packet's capacity from those before it, whatever the sizes, and what they remember is bounded."""

import torch

from farflung.comm import collectives
from farflung.comm.exchange import MAX_CAPACITY
from farflung.comm.packet import Header
from tests.accelerator.conftest import on_ranks
from tests.comm.counting import num_alive
from tests.comm.test_collectives import connected


@on_ranks(2)
def test_trees_of_many_leaves_need_more_than_a_packet():
    exchange, group = connected()
    for num_leaves, usual in ((300, 1), (5000, 3)):  # the header fits after the first time; it never fits
        tree = {f"a long name for leaf {k}": torch.tensor(k) for k in range(num_leaves)}
        for turn in range(2):
            gathered = collectives.gather(exchange, tree)
            assert gathered[f"a long name for leaf {num_leaves - 1}"].tolist() == 2 * [num_leaves - 1]
            empty = {key: torch.empty(0) for key in tree}
            assert len(collectives.gather(exchange, empty)) == num_leaves
            if turn:
                assert len(group.taken()) == usual + min(usual, 2)
            group.taken()


@on_ranks(3)
def test_ranks_agree_on_the_capacity_through_any_sequence_of_sizes():
    exchange, _ = connected()
    rank, size = exchange.rank, exchange.size
    generator = torch.Generator().manual_seed(5)
    for turn in range(80):
        n = int(10 ** (torch.rand((), generator=generator).item() * 5.3))
        kind = int(torch.randint(0, 5, (), generator=generator))
        if kind == 0:
            assert collectives.gather(exchange, [torch.full((n,), rank)])[0].sum() == n * sum(range(size))
        elif kind == 1:
            assert collectives.reduce(exchange, torch.full((n,), float(turn)), "mean").eq(turn).all()
        elif kind == 2:
            assert len(collectives.gather(exchange, torch.zeros(n * rank), ragged=True)) == n * sum(range(size))
        elif kind == 3:
            assert len("".join(collectives.gather_object(exchange, ["z" * n] * rank))) == n * sum(range(size))
        else:
            assert len(collectives.pad_across_processes(exchange, torch.zeros(n + rank))) == n + size - 1
    assert max(exchange._buffers) <= MAX_CAPACITY


@on_ranks(2)
def test_the_memory_for_headers_is_bounded():
    exchange, group = connected()
    for n in range(700):  # more forms than are remembered
        assert collectives.gather(exchange, torch.zeros(n + exchange.rank), ragged=True).shape == (2 * n + 1,)
    assert num_alive(Header) < 700
    group.taken()
    collectives.gather(exchange, torch.zeros(3))
    assert group.taken() == ["all_gather"]
