# SPDX-License-Identifier: Apache-2.0
"""Frozen weights and unsaved buffers: alike at the start, for newcomers, and after a flush."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from farflung.comm.tensor_memory import fingerprint
from farflung.outer import OuterLoop, diloco, local_sgd
from farflung.testing.sim import run_replicas
from tests.outer.replicas import on_replicas

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Student(nn.Module):
    """A layer that is trained, one that is not, a teacher that follows the first, and buffers that nobody saves."""

    def __init__(self):
        super().__init__()
        self.layer, self.frozen, self.teacher = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(4, 3)
        for one in (self.frozen, self.teacher):
            one.requires_grad_(False)
        self.strided = nn.Parameter(torch.randn(1, 2)[:, ::2], requires_grad=False)
        self.register_buffer("order", torch.randperm(64), persistent=False)
        self.eighths = nn.Parameter(torch.randn(5).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")])[torch.randint(0, 2, (9,))], persistent=False)

    def forward(self, x):
        return self.frozen(self.layer(x))

    def follow(self):
        for mine, theirs in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
            mine.data = mine.data * 0.5 + theirs.data * 0.5  # as momentum encoders do


def values(model):
    """All of it, the tensors that are in no state dict too."""
    every = (*model.named_parameters(), *model.named_buffers())
    return {name: one.clone(memory_format=torch.contiguous_format) for name, one in every}


def equal(one, other):
    return all(torch.equal(value.view(torch.uint8), other[name].view(torch.uint8)) for name, value in one.items())


def trained(group, recipe, cap):
    torch.manual_seed(group.rank)
    model = Student()
    own = values(model)
    outer = OuterLoop(model, recipe, group, bucket_bytes=cap)
    begun = values(model)
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    for _ in range(5):
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.follow()
        outer.step()
    apart = values(model)
    outer.flush()
    flushed = values(model)
    outer.close()
    return own, begun, apart, flushed, outer.stats()


@pytest.mark.law("alike-but-unsent")
@pytest.mark.parametrize("recipe", [diloco(every=2), local_sgd(2)], ids=["diloco", "local_sgd"])
def test_what_no_round_exchanges_is_alike_at_the_start_and_after_a_flush(recipe):
    own, begun, apart, flushed, _ = zip(*run_replicas(trained, 3, recipe, 64), strict=True)
    assert not equal(own[0], own[1])
    assert all(equal(own[0], each) for each in begun)
    assert not torch.equal(apart[0]["teacher.weight"], apart[1]["teacher.weight"])
    assert all(equal(flushed[0], each) for each in flushed)
    for name in ("teacher.weight", "teacher.bias"):
        mean = torch.stack([each[name] for each in apart]).mean(0)
        assert torch.allclose(flushed[0][name], mean, atol=1e-6)
    assert equal({name: flushed[0][name] for name in ("order", "mask", "frozen.weight")}, own[0])


def bytes_of_rounds(group, is_larger):
    torch.manual_seed(0)
    model = Student()
    if is_larger:
        model.frozen.extra = nn.Parameter(torch.zeros(10_000), requires_grad=False)
    with OuterLoop(model, diloco(every=1), group) as outer:
        for _ in range(3):
            outer.step()
    return outer.stats().bytes_sent, outer.stats().bytes_voting


def test_what_is_alike_costs_the_bytes_of_a_fingerprint():
    assert run_replicas(bytes_of_rounds, 2, False) == run_replicas(bytes_of_rounds, 2, True)


@on_replicas(2)
def test_buffers_of_other_shapes_stay(group):
    """What ranks have grown differently, or have alone, stays theirs."""
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.full((3 + group.rank,), float(group.rank)), persistent=False)
    if group.rank == 1:
        model.register_buffer("own", torch.ones(2), persistent=False)
    with OuterLoop(model, diloco(every=1), group):
        assert model.cache.tolist() == [[0.0] * 3, [1.0] * 4][group.rank]


@settings(max_examples=100)
@given(st.sampled_from([1, 2, 3, 8, 70, 5000, 40_000]), st.integers(0, 3), st.sampled_from(DTYPES), st.data())
def test_a_fingerprint_sees_each_bit_and_its_place_wherever_the_values_lie(length, offset, dtype, data):
    drawn = 3 * torch.randn(length + offset, generator=torch.Generator().manual_seed(length))
    values = (drawn > 0 if dtype == torch.bool else drawn.to(dtype))[offset:]
    before = fingerprint(values)
    for same_values in values.clone(), values.reshape(1, -1).t(), torch.stack([values, values], 1)[:, 0]:
        assert fingerprint(same_values) == before
    other, last_bit = values.clone(), 0 if dtype == torch.bool else 8 * dtype.itemsize - 2
    words = other.view(WORDS[dtype.itemsize])
    words[data.draw(st.integers(0, length - 1))] ^= 1 << data.draw(st.integers(0, last_bit))
    assert fingerprint(other) != before
    assert torch.equal(values, values.flip(0)) or fingerprint(values.flip(0)) != before


@on_replicas(2)
def test_frozen_weights_may_have_no_values_or_be_all_that_there_is(group):
    frozen = [nn.Linear(2, 1, device=where).requires_grad_(False) for where in ("meta", "cpu")]
    for parts in [nn.Linear(2, 1), frozen[0]], frozen[1:]:
        with OuterLoop(nn.ModuleList(parts), diloco(1), group) as outer:
            outer.step()
        assert (outer.stats().rounds, outer.stats().bytes_sent) == (1, 12 * (len(parts) - 1))
