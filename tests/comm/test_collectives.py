# SPDX-License-Identifier: Apache-2.0
"""Nested collectives on real ranks: right values, one collective, the same bits and the same errors everywhere."""

import hashlib
import re
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist

from farflung.base.errors import CollectiveMismatch, ConfigError, WrongType
from farflung.comm import collectives
from farflung.comm.exchange import Exchange
from farflung.comm.group import SoloGroup
from farflung.comm.scatter import Scatter
from farflung.testing.ranks import run_ranks
from tests.accelerator.conftest import on_ranks
from tests.comm.counting import CountingGroup
from tests.comm.test_packet import DTYPES, bytes_of, noise, same_bytes

Pair = namedtuple("Pair", "left right")


def connected() -> tuple[Exchange, CountingGroup]:
    group = CountingGroup()
    return Exchange(group), group


def tree_of(rank, rows=3):
    """What `rank` brings: every dtype, numbers, empty and strided tensors; any rank can build any other's."""
    torch.manual_seed(rank)
    every = {str(dtype): noise((rows, 2), dtype) for dtype in DTYPES}
    odd = Pair(torch.tensor(rank), (torch.tensor(rank > 0), torch.empty(0, 3), torch.empty(2, 0)))
    strided = [torch.randn(4, rows).t(), torch.randn(1, 5), torch.randn(rows, 1).expand(rows, 3), torch.randn(6)[::2]]
    return {"every": every, "odd": odd, "strided": strided, "conjugate": torch.randn(3, dtype=torch.complex64).conj()}


def leaves(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for child in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(child)]


def concatenated(trees):
    """What gather should return, made without it."""
    columns = zip(*map(leaves, trees), strict=True)
    return [[byte for x in column for byte in bytes_of(x)] for column in columns]


@pytest.mark.parametrize("num_ranks", [2, 4])
@on_ranks()
def test_gather_concatenates_every_dtype_and_shape_in_rank_order(num_ranks):
    exchange, _ = connected()
    rank = exchange.rank
    for rows in (3, 3, 1, 5, 3000, 3):  # 3000 rows do not fit into a packet
        gathered = collectives.gather(exchange, tree_of(rank, rows))
        assert list(gathered) == ["every", "odd", "strided", "conjugate"]
        assert type(gathered["odd"]) is Pair
        assert gathered["odd"].left.tolist() == list(range(num_ranks))
        assert gathered["odd"].right[1].shape == (0, 3)
        assert gathered["odd"].right[2].shape == (2 * num_ranks, 0)
        assert gathered["strided"][1].shape == (num_ranks, 5)
        expected = concatenated([tree_of(r, rows) for r in range(num_ranks)])
        for found, wanted in zip(leaves(gathered), expected, strict=True):
            assert found.is_contiguous()
            assert bytes_of(found) == wanted
    assert collectives.gather(exchange, {}) == {}
    assert collectives.gather(exchange, torch.empty(0)).shape == (0,)


@on_ranks(2)
def test_small_values_take_one_collective_and_large_ones_few():
    exchange, group = connected()
    small = {f"leaf{k}": torch.ones(8, 16).to(dtype) for k, dtype in enumerate(DTYPES)}
    large = {"long": torch.ones(1 << 19), "longer": torch.ones(1 << 20), "short": torch.ones(9), "int": torch.tensor(1)}
    floats = {key: x for key, x in small.items() if x.dtype in (torch.float32, torch.bfloat16, torch.int64)}
    for call in (
        lambda: collectives.gather(exchange, small),
        lambda: collectives.gather(exchange, small, ragged=True),
        lambda: collectives.reduce(exchange, floats, "sum"),
        lambda: collectives.broadcast(exchange, small, 1),
        lambda: collectives.pad_across_processes(exchange, {"x": torch.ones(2 + exchange.rank, 3), **small}),
        lambda: collectives.gather_object(exchange, [{"any": "object"}]),
        lambda: collectives.broadcast_object_list(exchange, ["any"], 1),
    ):
        call()
        group.taken()
        call()
        assert group.taken() == ["all_gather"]
    for _ in range(2):
        collectives.gather(exchange, large)
        # The headers, the two long leaves straight into their outputs, and the rest together.
        assert group.taken() == 4 * ["all_gather"]
        collectives.reduce(exchange, {key: x.float() for key, x in large.items()}, "sum")
        assert group.taken() == ["all_gather"] + 3 * ["all_reduce"]
        collectives.broadcast(exchange, large, 1)
        assert group.taken() == ["all_gather"] + 3 * ["broadcast"]


@on_ranks(2)
def test_a_single_large_tensor_is_gathered_straight_into_its_output():
    exchange, group = connected()
    x = torch.full((1000, 300), float(exchange.rank))
    for _ in range(2):
        group.calls.clear()
        gathered = collectives.gather(exchange, {"only": x})["only"]
        (_, _, header_bytes), (name, pointer, num_bytes) = group.calls
        assert header_bytes <= 4096 * exchange.size  # a payload that never fits does not make the packets longer
        assert (name, pointer, num_bytes) == ("all_gather", gathered.data_ptr(), gathered.nbytes)
        assert gathered.shape == (2000, 300)
        assert gathered[:1000].eq(0).all()
        assert gathered[1000:].eq(1).all()


@on_ranks(2)
def test_results_own_their_memory_and_outlive_the_next_calls():
    exchange, _ = connected()
    rank = exchange.rank
    for n in (1, 10, 100_000):
        results = []
        for turn in range(3):
            value = {"a": torch.full((1, n), 10.0 * turn + rank), "b": torch.full((2,), turn)}
            sent = {"a": torch.full((1, n), float(turn)), "b": torch.full((2,), turn)}
            found = [collectives.gather(exchange, value)]
            found += [collectives.gather(exchange, {"a": torch.zeros(rank, n), "b": value["b"]}, ragged=True)]
            results.append([*found, collectives.reduce(exchange, value, "sum"), collectives.broadcast(exchange, sent)])
        found = leaves(results)
        assert len({x.untyped_storage().data_ptr() for x in found}) == len(found)
        for turn, (gathered, ragged, summed, sent) in enumerate(results):
            assert gathered["a"][:, 0].tolist() == [10.0 * turn, 10.0 * turn + 1]
            assert ragged["b"].tolist() == 4 * [turn]
            assert summed["a"][0, -1] == 20 * turn + 1
            assert sent["a"][0, -1] == turn


@on_ranks(3)
def test_ragged_gather_joins_what_differs_in_the_first_dimension():
    exchange, _ = connected()
    rank, size = exchange.rank, exchange.size
    for width in (1, 2000, 50_000):
        rows = [2 * r for r in range(size)]  # rank 0 has none
        mine = {"x": torch.full((rows[rank], width), rank), "y": torch.full((rows[rank],), rank % 2 == 0)}
        gathered = collectives.gather(exchange, mine, ragged=True)
        assert gathered["x"].shape == (sum(rows), width)
        assert gathered["x"][:, -1].tolist() == [r for r in range(size) for _ in range(rows[r])]
        assert gathered["y"].dtype is torch.bool
        assert gathered["y"].tolist() == [r % 2 == 0 for r in range(size) for _ in range(rows[r])]
    with pytest.raises(CollectiveMismatch, match="Only first dimensions may differ"):
        collectives.gather(exchange, torch.zeros(2, 1 + rank), ragged=True)
    with pytest.raises(CollectiveMismatch, match="Only first dimensions may differ"):
        collectives.gather(exchange, torch.zeros((2,) if rank else ()), ragged=True)
    with pytest.raises(CollectiveMismatch, match="Convert them to the same dtype"):
        collectives.gather(exchange, torch.zeros(1 + rank, dtype=(torch.int64, torch.int32)[rank % 2]), ragged=True)
    assert collectives.gather(exchange, torch.tensor(rank), ragged=True).tolist() == list(range(size))


@on_ranks(3)
def test_objects_are_gathered_and_broadcast():
    exchange, _ = connected()
    rank, size = exchange.rank, exchange.size
    for length in (1, 3000, 300_000):
        items = [{"rank": rank, "text": "x" * length, "set": {rank}}] * rank
        gathered = collectives.gather_object(exchange, items)
        assert [item["rank"] for item in gathered] == [r for r in range(size) for _ in range(r)]
        assert all(item["set"] == {item["rank"]} and len(item["text"]) == length for item in gathered)
        mine = ["y" * length, {"any": (rank,)}, rank] if rank == 1 else [None, None, None]
        returned = collectives.broadcast_object_list(exchange, mine, from_process=1)
        assert returned is mine
        assert mine == ["y" * length, {"any": (1,)}, 1]
    rows = collectives.gather_object(exchange, torch.full((3, 4), float(rank)))
    assert [row.tolist() for row in rows] == [[float(r)] * 4 for r in range(size) for _ in range(3)]
    assert {row.untyped_storage().nbytes() for row in rows} == {16}
    assert collectives.gather_object(exchange, (rank, str(rank))) == [x for r in range(size) for x in (r, str(r))]


@on_ranks(2)
def test_broadcast_overwrites_in_place():
    exchange, _ = connected()
    rank = exchange.rank
    for rows, source in ((3, 0), (3, 1), (3000, 1), (200_000, 0)):
        mine, wanted = tree_of(rank, rows), tree_of(source, rows)
        mine["strided"][2] = mine["strided"][2].contiguous()  # one place in memory for many numbers can't be written
        if rows == 200_000:
            mine, wanted = ([tree["every"]["torch.float32"]] for tree in (mine, wanted))
        kept = leaves(mine)
        sent = collectives.broadcast(exchange, mine, from_process=source)
        assert all(a is b for a, b in zip(leaves(sent), kept, strict=True))
        for found, want in zip(kept, leaves(wanted), strict=True):
            assert same_bytes(found, want)
    weight = torch.nn.Parameter(torch.full((2,), float(rank)))
    collectives.broadcast(exchange, [weight], 1)
    assert (weight.tolist(), weight.requires_grad) == ([1, 1], True)


def reduces():
    exchange, _ = connected()
    rank, size = exchange.rank, exchange.size
    bits = []
    for n in (5, 100_000, 600_000):
        parts = [torch.randn(n, generator=torch.Generator().manual_seed(r)) for r in range(size)]
        wide = {"f": parts[rank], "d": (parts[rank].double(), parts[rank].to(torch.complex64) * (1 + 1j))}
        total = collectives.reduce(exchange, wide, "sum")
        if n == 5:  # in rank order, so that every run has the same bits
            in_order = ((parts[0] + parts[1]) + parts[2]) + parts[3]
            assert torch.equal(total["f"], in_order)
        assert torch.allclose(total["f"], torch.stack(parts).sum(0), atol=1e-5)
        assert torch.allclose(total["d"][1], torch.stack(parts).sum(0) * (1 + 1j), atol=1e-5)
        bits.append([hashlib.sha256(leaf.numpy()).hexdigest() for leaf in leaves(total)])
        half = {"low": torch.full((n,), 60000.0, dtype=torch.float16), "int": torch.full((n,), rank, dtype=torch.int16)}
        assert collectives.reduce(exchange, half["low"], "mean").eq(60000).all()  # a sum in fp16 would be infinite
        summed = collectives.reduce(exchange, half["int"], "sum")
        assert summed.dtype is torch.int16
        assert summed.eq(6).all()
        brain = torch.full((n,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
        assert collectives.reduce(exchange, [brain], "sum")[0].eq(260).all()  # in bf16, 256 + 1 is 256
        marks = {"b": torch.arange(n) % size == rank, "u": torch.full((n,), 200 + rank, dtype=torch.uint8), "f": brain}
        most = collectives.reduce(exchange, marks, "max")
        assert most["b"].dtype is torch.bool
        assert all(most[name].eq(top).all() for name, top in (("b", True), ("u", 203), ("f", 256)))
        scaled = collectives.reduce(exchange, torch.full((n,), float(rank)), "mean", scale=0.5)
        assert scaled.eq(0.75).all()
        assert collectives.reduce(exchange, torch.full((n,), rank), "sum", scale=2).eq(12).all()
    mine = torch.tensor([rank])
    kept = collectives.reduce(exchange, [mine], "none")[0]
    assert (kept.tolist(), kept is mine) == ([rank], False)
    assert [collectives.reduce(exchange, {}, reduction, scale=2) for reduction in ("mean", "max")] == [{}, {}]
    return bits


def test_reduce_sums_in_rank_order_and_gives_every_rank_the_same_bits():
    first, *others = run_ranks(reduces, 4)
    assert all(other == first for other in others)


@on_ranks(2)
def test_the_scripts_default_device_changes_nothing():
    exchange, group = connected()
    rank, scatter = exchange.rank, Scatter(group)
    few = {n: torch.full((n,), float(rank)) for n in (2, 300_000)}  # in a packet, and by itself
    many = {f"a long name for leaf {k}": torch.ones(1) for k in range(5000)}
    with torch.device("meta"):
        for n, x in few.items():
            assert collectives.gather(exchange, [x, x[0]])[0].sum() == n
            assert collectives.reduce(exchange, [x, x[0]], "sum")[0].sum() == n
            assert collectives.broadcast(exchange, [x.repeat(2)[::2], x[::2].clone()], 1)[0].sum() == n
            assert collectives.broadcast_object_list(exchange, ["x" * n * rank], 1) == ["x" * n]
            assert (scatter.receive() if rank else scatter.send([x, 1 - x])).tolist() == n * [float(rank)]
        assert len(collectives.gather(exchange, many)) == len(many)


@on_ranks(2)
def test_a_reduction_without_sense_is_refused_on_every_rank():
    exchange, _ = connected()
    for dtype, reduction, scale, words in (
        (torch.float32, "min", 1, "unknown reduction 'min'. Use sum, mean, max, none."),
        (torch.int64, "mean", 1, "the mean of torch.int64 values is not torch.int64. Use .float() or reduction='sum'."),
        (torch.bool, "sum", 1, "the sum of torch.bool is not defined. Use reduction='max' for any(), or .int()"),
        (torch.complex64, "max", 1, "torch.complex64 has no maximum."),
        (torch.int64, "sum", 0.5, "tensors of torch.int64 can't be scaled by 0.5. Use .float()."),
        (torch.float8_e5m2, "sum", 1, "tensors of torch.float8_e5m2 can't be reduced. Convert them first, for example"),
    ):
        match = f"reduce: {re.escape(words)}"
        tree = torch.ones(2).to(dtype)
        with pytest.raises(ConfigError, match=match):
            collectives.reduce(exchange, tree, reduction, scale)
        only_one = tree if exchange.rank == 1 else torch.ones(2)
        expected = ConfigError if exchange.rank == 1 else CollectiveMismatch
        if reduction != "min":
            with pytest.raises(expected, match=match):
                collectives.reduce(exchange, only_one, reduction, scale)
    assert collectives.reduce(exchange, torch.ones(1), "sum").item() == 2


@on_ranks(3)
def test_padding_reaches_the_longest_rank():
    exchange, _ = connected()
    rank, size = exchange.rank, exchange.size
    x = torch.full((1 + rank, 2), float(rank))
    tree = {"x": x, "y": [x.t().to(torch.int32), torch.tensor(rank)], "same": torch.ones(3, 3)}
    behind = collectives.pad_across_processes(exchange, tree, pad_index=-1)
    assert behind["x"].tolist() == (1 + rank) * [[rank, rank]] + (size - 1 - rank) * [[-1, -1]]
    assert behind["y"][0] is tree["y"][0]  # equally long in this dimension, whatever the other one
    assert behind["y"][1] is tree["y"][1]
    assert behind["same"] is tree["same"]
    before = collectives.pad_across_processes(exchange, tree, dim=-1, pad_index=9, pad_first=True)
    assert before["x"] is tree["x"]
    assert before["y"][0].tolist() == 2 * [(size - 1 - rank) * [9] + (1 + rank) * [rank]]
    flags = collectives.pad_across_processes(exchange, torch.ones(rank, dtype=torch.bool), pad_index=0)
    assert flags.dtype is torch.bool
    assert flags.tolist() == rank * [True] + (size - 1 - rank) * [False]
    grown = collectives.pad_across_processes(exchange, x.clone().requires_grad_())
    assert grown.requires_grad  # padding belongs to the graph
    for value in (0.5, 1 << 31):
        with pytest.raises(ConfigError, match=rf"torch\.int32 has no value {value}\."):
            collectives.pad_across_processes(exchange, tree, pad_index=value)
    with pytest.raises(CollectiveMismatch, match="the same number of dimensions"):
        collectives.pad_across_processes(exchange, torch.zeros((1,) * (1 + rank)))


def told(call):
    with pytest.raises((CollectiveMismatch, TypeError, ConfigError, AttributeError, ArithmeticError)) as caught:
        call()
    return caught.typename, str(caught.value)


def disagrees():
    exchange, _ = connected()
    rank = exchange.rank
    big = 1 << 20
    messages = [
        told(lambda: collectives.gather(exchange, torch.zeros(6 if rank == 3 else 8, 10))),
        told(lambda: collectives.gather(exchange, {"a": torch.zeros(big if rank == 2 else 8)})),
        told(lambda: collectives.gather(exchange, torch.zeros(big, dtype=[torch.int32, torch.float32][rank % 2]))),
        told(lambda: collectives.reduce(exchange, [torch.zeros(2)] * (1 + rank % 2))),
        told(lambda: collectives.reduce(exchange, torch.ones(2, dtype=[torch.int64, torch.float64][rank % 2]), "sum")),
        told(lambda: collectives.broadcast(exchange, torch.zeros(big + rank))),
        told(lambda: collectives.broadcast(exchange, torch.zeros(2), from_process=rank)),
    ]
    assert collectives.gather(exchange, torch.tensor(rank)).tolist() == [0, 1, 2, 3]  # nothing is left behind
    return messages


def test_ranks_that_disagree_all_raise_the_same():
    first, *others = run_ranks(disagrees, 4)
    assert all(other == first for other in others)
    assert {kind for kind, _ in first} == {"CollectiveMismatch"}
    assert first[0][1] == (
        "gather: ranks 0, 1 and 2 brought [8, 10] float32, rank 3 [6, 10] float32. "
        "Use pad_across_processes(dim=0) or gather_object."
    )
    assert all(dtype in first[4][1] for dtype in ("int64", "float64"))


class Unpicklable:
    def __reduce__(self):
        raise ArithmeticError("no pickle of me" + 300 * " or mine")


def fails_alone():
    exchange, _ = connected()
    bad = exchange.rank == 1
    collectives.broadcast(exchange, torch.zeros(2))  # of a tensor of the same shape that can be sent
    messages = [
        told(lambda: collectives.gather(exchange, {"x": "text" if bad else torch.zeros(2)})),
        told(lambda: collectives.reduce(exchange, [3 if bad else torch.zeros(2)])),
        told(lambda: collectives.broadcast(exchange, torch.zeros(2).to_sparse() if bad else torch.zeros(2))),
        told(lambda: collectives.pad_across_processes(exchange, None if bad else torch.zeros(2))),
        told(lambda: collectives.broadcast(exchange, torch.zeros(2), from_process=7 if bad else 0)),
        told(lambda: collectives.gather_object(exchange, [lambda: 0] if bad else [0])),
        told(lambda: collectives.gather_object(exchange, [Unpicklable() if bad else 0])),
    ]
    assert collectives.gather(exchange, torch.tensor(exchange.rank)).tolist() == [0, 1, 2]
    return messages


def test_a_rank_that_fails_alone_is_named_to_the_others():
    first, bad, last = run_ranks(fails_alone, 3)
    assert first == last
    assert [kind for kind, _ in bad] == [*4 * ["WrongType"], "ConfigError", "AttributeError", "ArithmeticError"]
    for (own_kind, own), (kind, message) in zip(bad, first, strict=True):
        assert kind == "CollectiveMismatch"
        assert message.endswith(f"rank 1 failed: {own_kind}: {own[:1000]}")
    assert bad[2][1] == (
        "broadcast: a Tensor (sparse_coo, torch.float32, on cpu) can't be sent as plain bytes. Pass dense tensors "
        "(to_dense(), full_tensor(), dequantize()), or use gather_object or broadcast_object_list."
    )


@on_ranks(2)
def test_inference_mode_and_gradients_leave_no_trace():
    exchange, _ = connected()
    weight = torch.ones(3, requires_grad=True)
    for big in (1, 300_000):
        tree = {"w": weight * 2, "x": torch.ones(big)}
        with torch.inference_mode():
            inside = collectives.gather(exchange, {"w": torch.ones(3), "x": torch.ones(big)})
            collectives.reduce(exchange, inside, "sum")
        outside = collectives.gather(exchange, tree)
        reduced = collectives.reduce(exchange, tree, "mean")
        assert not any(x.requires_grad for x in leaves(outside) + leaves(reduced))
        outside["w"].add_(1)
        assert collectives.gather(exchange, inside)["x"].shape == (4 * big,)
        with torch.inference_mode():
            collectives.broadcast(exchange, {"w": torch.ones(3), "x": torch.ones(big)})
        collectives.broadcast(exchange, {"w": torch.ones(3), "x": torch.ones(big)})


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_results_are_accelerate_s():
    from accelerate import PartialState
    from accelerate.utils import operations

    state = PartialState(cpu=True)
    assert state.num_processes == dist.get_world_size()
    exchange, _ = connected()
    rank = exchange.rank
    torch.manual_seed(rank)
    tree = {"a": torch.randn(3, 4), "b": [torch.randn(2).double(), torch.tensor(float(rank))], "c": (torch.ones(1, 5),)}
    uneven = {"a": torch.randn(2 + rank, 4), "b": [torch.randn(3, 1 + rank)]}

    def equal(ours, theirs):
        pairs = list(zip(leaves(ours), leaves(theirs), strict=True))
        return all(a.dtype is b.dtype and torch.equal(a, b) for a, b in pairs)

    assert equal(collectives.gather(exchange, tree), operations.gather(tree))
    for reduction in ("sum", "mean", "max"):
        assert equal(collectives.reduce(exchange, tree, reduction), operations.reduce(tree, reduction))
    for settings in ({}, {"dim": 1, "pad_index": 5}, {"dim": -1, "pad_first": True}, {"dim": 4}):
        ours = collectives.pad_across_processes(exchange, uneven, **settings)
        assert equal(ours, operations.pad_across_processes(uneven, **settings))
    copies = [{"x": torch.full((3,), float(rank))} for _ in range(2)]
    assert equal(collectives.broadcast(exchange, copies[0], 1), operations.broadcast(copies[1], 1))
    assert collectives.gather_object(exchange, [rank, {"r": rank}]) == operations.gather_object([rank, {"r": rank}])
    lists = [[rank, "text"], [rank, "text"]]
    assert collectives.broadcast_object_list(exchange, lists[0], 1) == operations.broadcast_object_list(lists[1], 1)


def test_alone_values_come_back_as_they_are():
    exchange = Exchange(SoloGroup())
    tree = {"x": torch.ones(2)}
    for call in (collectives.gather, collectives.broadcast):
        assert call(exchange, tree) is tree
    objects = [1, "two"]
    assert collectives.gather_object(exchange, objects) is objects
    assert collectives.broadcast_object_list(exchange, objects) is objects
    tensors = [torch.tensor([1, 2]), torch.tensor(3.0, dtype=torch.bfloat16)]
    reduced = collectives.reduce(exchange, tensors, "mean")
    assert reduced[0] is not tensors[0]
    assert reduced[0].tolist() == [1, 2]
    assert collectives.reduce(exchange, tensors, "sum", scale=2)[1].item() == 6
    assert collectives.pad_across_processes(exchange, tensors, pad_index=3) is tensors
    for call in (collectives.gather, collectives.broadcast, collectives.reduce, collectives.pad_across_processes):
        with pytest.raises(WrongType, match=f"{call.__name__}: found a str"):  # as among several ranks
            call(exchange, {**tree, "text": "lost"})
