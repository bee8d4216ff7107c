# SPDX-License-Identifier: Apache-2.0
"""A round writes to the tensors that the model has at that moment, and to no other memory."""

import ctypes
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from farflung.outer import OuterLoop, diloco, local_sgd
from tests.outer.replicas import on_replicas

RECIPES = [local_sgd(1), diloco(1, lr=1.0, momentum=0.0)]
either = pytest.mark.parametrize("recipe", RECIPES, ids=["local_sgd", "diloco"])
among = pytest.mark.parametrize("size", [2, 3])


class Two(nn.Module):
    """Two parameters, filled with other numbers on each rank."""

    def __init__(self, a=None, b=None):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(8) if a is None else a)
        self.b = nn.Parameter(torch.zeros(8) if b is None else b)


def mean(size):
    """Of the numbers of all ranks, 0 to size - 1."""
    return (size - 1) / 2


@contextmanager
def trained(group, recipe, model):
    """Open a loop for a block and give each rank its own number in `a`, and ten more in `b`."""
    outer = OuterLoop(model, recipe, group)
    model.a.data.fill_(group.rank)
    model.b.data.fill_(group.rank + 10)
    yield outer
    outer.detach()


@either
@among
@on_replicas()
def test_weights_lent_to_a_model_come_back_as_they_were(group, recipe, size):
    """Every hand-written EMA: lend the model the averaged weights, and take them back."""
    model, ema = Two(), torch.full((8,), 4.0 * group.rank)
    with trained(group, recipe, model) as outer:
        backup = model.a.data
        model.a.data = ema
        outer.step()
        assert model.a.tolist() == ema.tolist() == [4.0 * mean(size)] * 8
        model.a.data = backup
        assert model.a.tolist() == [group.rank] * 8


def exchange_data(model):
    model.a.data, model.b.data = model.b.data, model.a.data


def give_back(model):
    """As offloading does: give the memory back between two rounds, and get new one."""
    kept, storage = model.a.detach().clone(), model.a.untyped_storage()
    num_bytes = storage.nbytes()
    storage.resize_(0)
    storage.resize_(num_bytes)
    model.a.data.copy_(kept)


CHANGES = {  # and whether the weights change places
    "exchange_data": (exchange_data, True),
    "exchange_tensors": (lambda model: torch.utils.swap_tensors(model.a, model.b), True),
    "assign_others": (
        lambda model: model.load_state_dict({"a": model.b.clone(), "b": model.a.clone()}, assign=True),
        True,
    ),
    "give_back": (give_back, False),
}


@pytest.mark.parametrize("change", CHANGES)
@either
@among
@on_replicas()
def test_weights_that_change_places_or_get_new_memory_are_averaged_where_they_are(group, recipe, size, change):
    model, (act, swaps) = Two(), CHANGES[change]
    with trained(group, recipe, model) as outer:
        act(model)
        outer.step()
        assert model.a.tolist() == [mean(size) + 10 * swaps] * 8
        assert model.b.tolist() == [mean(size) + 10 * (not swaps)] * 8


@either
@among
@on_replicas()
def test_weights_in_memory_of_others_are_seen_there(group, recipe, size, tmp_path):
    """On a numpy array, in a buffer of ctypes, in a file, and over DLPack."""
    array, other = (np.zeros(8, dtype=np.float32) for _ in range(2))
    block, path = (ctypes.c_float * 8)(), tmp_path / f"{group.rank}.bin"
    file = np.memmap(path, dtype=np.float32, mode="w+", shape=8)
    first = Two(torch.from_numpy(array), torch.frombuffer(block, dtype=torch.float32))
    second = Two(torch.from_numpy(file), torch.from_dlpack(other))
    pointers = [p.data_ptr() for model in (first, second) for p in model.parameters()]
    for model in (first, second):
        with trained(group, recipe, model) as outer:
            outer.step()
    file.flush()
    assert pointers == [p.data_ptr() for model in (first, second) for p in model.parameters()]
    assert array.tolist() == np.fromfile(path, dtype=np.float32).tolist() == [mean(size)] * 8
    assert list(block) == other.tolist() == [mean(size) + 10] * 8
