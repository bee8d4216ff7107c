# SPDX-License-Identifier: Apache-2.0
"""A round writes to the tensors that the model has at that moment, and to no other memory."""

import ctypes

import numpy as np
import pytest
import torch
from torch import nn

from farflung.outer import OuterLoop, diloco, local_sgd
from farflung.testing.sim import run_replicas

SIZES = [2, 3]
RECIPES = [local_sgd(1), diloco(1, lr=1.0, momentum=0.0)]
either = pytest.mark.parametrize("recipe", RECIPES, ids=["local_sgd", "diloco"])
among = pytest.mark.parametrize("size", SIZES)


class Two(nn.Module):
    """Two parameters, filled with other numbers on each rank."""

    def __init__(self, a=None, b=None):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(8) if a is None else a)
        self.b = nn.Parameter(torch.zeros(8) if b is None else b)

    @torch.no_grad()
    def fill(self, a, b):
        self.a.fill_(a)
        self.b.fill_(b)


def mean(size):
    """Of the numbers of all ranks, 0 to size - 1."""
    return (size - 1) / 2


def trained(group, recipe, model):
    """Open a loop and give each rank its own number in `a`, and ten more in `b`."""
    outer = OuterLoop(model, recipe, group)
    model.fill(group.rank, group.rank + 10)
    return outer


def with_an_average_lent(group, recipe):
    """Every hand-written EMA: lend the model the averaged weights, and take them back."""
    model = Two()
    with trained(group, recipe, model) as outer:
        ema = torch.full((8,), 4.0 * group.rank)
        backup = model.a.data
        model.a.data = ema
        outer.step()
        lent = model.a.data.clone()
        model.a.data = backup
        mine = model.a.data.clone()
        outer.detach()
    return lent, mine, ema


@either
@among
def test_weights_lent_to_a_model_come_back_as_they_were(recipe, size):
    for rank, (lent, mine, ema) in enumerate(run_replicas(with_an_average_lent, size, recipe)):
        assert torch.equal(lent, torch.full((8,), 4.0 * mean(size)))
        assert torch.equal(ema, lent)
        assert torch.equal(mine, torch.full((8,), float(rank)))


def with_data_exchanged(group, recipe, swap):
    model = Two()
    with trained(group, recipe, model) as outer:
        swap(model)
        outer.step()
        seen = model.a.detach().clone(), model.b.detach().clone()
        outer.detach()
    return seen


def exchange_data(model):
    model.a.data, model.b.data = model.b.data, model.a.data


SWAPS = {
    "exchange_data": exchange_data,
    "exchange_tensors": lambda model: torch.utils.swap_tensors(model.a, model.b),
    "assign_others": lambda model: model.load_state_dict({"a": model.b.clone(), "b": model.a.clone()}, assign=True),
}


@pytest.mark.parametrize("swap", SWAPS)
@either
@among
def test_weights_that_change_places_are_averaged_where_they_are(recipe, size, swap):
    for a, b in run_replicas(with_data_exchanged, size, recipe, SWAPS[swap]):
        assert torch.equal(a, torch.full((8,), mean(size) + 10))
        assert torch.equal(b, torch.full((8,), mean(size)))


def in_memory_of_others(group, recipe, folder):
    """Weights on a numpy array, in a buffer of ctypes, in a file, and over DLPack."""
    array = np.zeros(8, dtype=np.float32)
    block = (ctypes.c_float * 8)()
    file = np.memmap(folder / f"{group.rank}.bin", dtype=np.float32, mode="w+", shape=8)
    other = np.zeros(8, dtype=np.float32)
    first = Two(torch.from_numpy(array), torch.frombuffer(block, dtype=torch.float32))
    second = Two(torch.from_numpy(file), torch.from_dlpack(other))
    pointers = [p.data_ptr() for model in (first, second) for p in model.parameters()]
    for model in (first, second):
        with trained(group, recipe, model) as outer:
            outer.step()
            outer.detach()
    file.flush()
    assert pointers == [p.data_ptr() for model in (first, second) for p in model.parameters()]
    return array.copy(), np.array(block), np.fromfile(folder / f"{group.rank}.bin", dtype=np.float32), other.copy()


@either
@among
def test_weights_in_memory_of_others_are_seen_there(recipe, size, tmp_path):
    for array, block, file, other in run_replicas(in_memory_of_others, size, recipe, tmp_path):
        assert array.tolist() == file.tolist() == [mean(size)] * 8
        assert block.tolist() == other.tolist() == [mean(size) + 10] * 8


def with_storage_freed(group, recipe):
    """As offloading does: give the memory back between two rounds, and get new one."""
    model = Two()
    with trained(group, recipe, model) as outer:
        kept = model.a.detach().clone()
        storage = model.a.untyped_storage()
        num_bytes = storage.nbytes()
        storage.resize_(0)
        storage.resize_(num_bytes)
        model.a.data.copy_(kept)
        outer.step()
        seen = model.a.detach().clone()
        outer.detach()
    return seen


@either
@among
def test_memory_can_be_given_back_between_rounds(recipe, size):
    for seen in run_replicas(with_storage_freed, size, recipe):
        assert torch.equal(seen, torch.full((8,), mean(size)))


def pointers_before_and_after(group, recipe):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 512))
    before = [(p.data_ptr(), p.untyped_storage().nbytes()) for p in (*model.parameters(), *model.buffers())]
    with OuterLoop(model, recipe, group) as outer:
        for _ in range(3):
            outer.step()
    return before == [(p.data_ptr(), p.untyped_storage().nbytes()) for p in (*model.parameters(), *model.buffers())]


@pytest.mark.law("memory-stays")
@either
@among
def test_no_tensor_gets_other_memory_from_before_the_loop_is_built(recipe, size):
    assert run_replicas(pointers_before_and_after, size, recipe) == [True] * size
