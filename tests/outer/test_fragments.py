# SPDX-License-Identifier: Apache-2.0
"""Fragments are disjoint and hold each trainable parameter, and each buffer, exactly once."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from farflung.base.errors import ConfigError, Unsupported
from farflung.comm.group import SoloGroup
from farflung.methods.fragments import whole, without_masks
from farflung.outer import OuterLoop, apart, blocks, by_bytes, local_sgd, streaming_diloco, strided
from tests.outer.replicas import on_replicas


class Tower(nn.Module):
    """Layers between an embedding and a head that is tied to it; some of it is frozen."""

    def __init__(self, layers=5, width=4, tied=True, frozen=0):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        parts = ({"norm": nn.BatchNorm1d(width), "linear": nn.Linear(width, width)} for _ in range(layers))
        self.layers = nn.ModuleList(map(nn.ModuleDict, parts))
        self.head = nn.Linear(width, 10)
        if tied:
            self.head.weight = self.embed.weight
        for layer in self.layers[:frozen]:
            layer["linear"].requires_grad_(False)


def names(fragments, kind="parameters"):
    return [[place.name for place in getattr(fragment, kind)] for fragment in fragments]


CUTS = [strided, blocks, by_bytes, apart(strided), apart(by_bytes)]


@pytest.mark.law("each-tensor-once")
@settings(max_examples=60)
@given(st.sampled_from(CUTS), st.integers(1, 7), st.integers(2, 4), st.booleans(), st.integers(0, 2))
def test_every_cut_holds_each_tensor_once(cut, layers, count, tied, frozen):
    model = Tower(layers, 4, tied, frozen)
    try:
        fragments = cut(model, count)
    except ConfigError:
        assert count > layers
        return
    assert len(fragments) == count
    assert all(fragment.parameters for fragment in fragments)
    held = [id(place.get()) for fragment in fragments for place in fragment.parameters]
    assert len(held) == len(set(held))
    assert set(held) == {id(p) for p in model.parameters() if p.requires_grad}
    buffers = [id(place.get()) for fragment in fragments for place in (*fragment.averages, *fragment.counters)]
    assert len(buffers) == len(set(buffers))
    assert set(buffers) == {id(b) for b in model.buffers()}


def layers_of(fragment):
    return {int(name.split(".")[1]) for name in fragment if name.startswith("layers.")}


def test_strides_take_layers_from_all_depths_and_blocks_take_neighbours():
    model = Tower(6)
    assert [layers_of(fragment) for fragment in names(strided(model, 3))] == [{0, 3}, {1, 4}, {2, 5}]
    assert [layers_of(fragment) for fragment in names(blocks(model, 3))] == [{0, 1}, {2, 3}, {4, 5}]
    assert [layers_of(fragment) for fragment in names(blocks(Tower(5), 2))] == [{0, 1, 2}, {3, 4}]


def test_a_blocks_buffers_travel_with_it():
    fragments = strided(Tower(4), 2)
    assert [layers_of(part) for part in names(fragments, "averages")] == [{0, 2}, {1, 3}]
    assert [layers_of(part) for part in names(fragments, "counters")] == [{0, 2}, {1, 3}]


def test_a_sequential_model_is_its_own_list_of_blocks():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    assert names(strided(model, 2)) == [
        ["0.weight", "0.bias", "2.weight", "2.bias"],
        ["1.weight", "1.bias", "3.weight", "3.bias"],
    ]


def test_of_two_longest_lists_blocks_are_those_of_the_one_with_more_values_and_the_rest_is_spread_by_bytes():
    small, large, rest = (nn.ModuleList(nn.Linear(n, n, bias=False) for _ in range(2)) for n in (1, 3, 2))
    rest[0].requires_grad_(False)  # costs no byte
    rest[0].register_buffer("once", torch.zeros(1))
    rest[1].register_buffer("again", rest[0].once)
    fragments = strided(nn.ModuleDict({"a": small, "b": large, "c": rest}), 2)
    assert names(fragments) == [["b.0.weight", "c.1.weight"], ["a.0.weight", "a.1.weight", "b.1.weight"]]
    assert names(fragments, "averages") == [[], ["c.0.once"]]


@settings(max_examples=50)
@given(st.lists(st.integers(1, 400), min_size=3, max_size=12), st.integers(1, 3))
def test_by_bytes_is_as_even_as_whole_tensors_allow(sizes, count):
    model = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in sizes])
    loads = [sum(place.get().numel() for place in fragment.parameters) for fragment in by_bytes(model, count)]
    assert max(loads) - min(loads) <= max(sizes)


def test_embeddings_apart_are_the_last_fragment_and_tied_heads_go_with_them():
    *others, last = names(apart(strided)(Tower(4), 3))
    assert last == ["embed.weight"]
    assert not any("embed.weight" in fragment or "head.weight" in fragment for fragment in others)
    *_, last = names(apart(by_bytes, nn.BatchNorm1d)(Tower(2), 3))
    assert last == ["layers.0.norm.weight", "layers.0.norm.bias", "layers.1.norm.weight", "layers.1.norm.bias"]
    model = Tower(4)
    with pytest.raises(ZeroDivisionError):
        apart(lambda model, count: 1 / 0)(model, 3)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_streaming_takes_strides_where_there_are_layers_and_else_bytes():
    cut = streaming_diloco(4, 2).fragments
    assert [layers_of(fragment) for fragment in names(cut(Tower(4), 2))] == [{0, 2}, {1, 3}]
    assert len(cut(nn.Linear(3, 2), 2)) == 2


@on_replicas(2)
def test_complex_buffers_are_averaged_where_they_are(group):
    model, memory = nn.Linear(2, 2), torch.ones(3, dtype=torch.complex64)
    model.register_buffer("frequencies", memory)
    loop = OuterLoop(model, local_sgd(1), group)
    memory.mul_(complex(1 + group.rank, -group.rank))
    loop.step()
    assert model.frequencies is memory
    assert memory.tolist() == [1.5 - 0.5j] * 3
    model.frequencies = torch.full((3,), complex(group.rank, 1))  # anew, as some forward passes do
    loop.step()
    assert model.frequencies.tolist() == [0.5 + 1j] * 3


def test_complex_numbers_and_several_devices_are_refused():
    for model, error, why in (
        (nn.ParameterDict({"x": torch.zeros(2, dtype=torch.complex64)}), ConfigError, "x is complex"),
        (nn.ParameterList([torch.zeros(2), torch.zeros(2, device="meta")]), Unsupported, "several devices"),
    ):
        with pytest.raises(error, match=why):
            OuterLoop(model, local_sgd(2), SoloGroup())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.a.weight
        self.same_memory = nn.Parameter(self.a.bias.data)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.norm = nn.BatchNorm1d(2)
        self.nothing = nn.Parameter(torch.empty(0))
        self.also_nothing = nn.Parameter(torch.empty(0))
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
        self.register_buffer("causal", torch.ones(2, 2, dtype=torch.bool).tril())
        self.register_buffer("cache", torch.ones(3), persistent=False)
        self.register_buffer("absent", None)


def test_a_fragment_has_each_trained_tensor_once_and_no_frozen_one():
    (fragment,) = whole(Net())
    names = [place.name for place in fragment.parameters]
    assert names[:3] == ["same_memory", "nothing", "also_nothing"]
    assert names[3:] == ["a.weight", "tied.bias", "norm.weight", "norm.bias"]  # a.bias is same_memory


def test_buffers_go_by_kind_and_caches_stay():
    (fragment,) = whole(Net())
    assert [place.name for place in fragment.averages] == ["mask", "norm.running_mean", "norm.running_var"]
    assert [place.name for place in fragment.counters] == ["causal", "norm.num_batches_tracked"]
    assert [place.name for place in without_masks(fragment).averages] == ["norm.running_mean", "norm.running_var"]


def test_a_replaced_tensor_is_found_where_it_was():
    net = Net()
    (fragment,) = whole(net)
    net.norm.running_mean = torch.tensor([3.0, 4.0])
    place = next(place for place in fragment.averages if place.name == "norm.running_mean")
    assert place.get() is net.norm.running_mean


def quantized():
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:.*(quantize|nested tensors)")
def test_what_can_not_be_exchanged_is_refused_by_name_with_what_to_do():
    frozen = nn.LazyLinear(3, bias=False)
    frozen.weight.requires_grad = False
    for lazy, name in (nn.LazyLinear(3), "0.weight"), (frozen, "0.weight"), (nn.LazyBatchNorm1d(affine=False), "0.run"):
        with pytest.raises(ConfigError, match=rf"^{name}.* has no shape yet\. Run one batch"):
            whole(nn.Sequential(lazy))
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for odd, error, words in (
        (quantized(), Unsupported, r"torch\.qint8 tensor.* averaged.*of a quantized one int_repr.*persistent=False"),
        (torch.ones(3).view(torch.uint8).view(torch.bits8), Unsupported, r"torch\.bits8 tensor"),
        (nested, Unsupported, "nested tensor.*to_padded_tensor"),
        (torch.ones(3, device="meta"), ConfigError, "meta device.*Load"),
    ):
        net = nn.Linear(2, 2)
        net.register_buffer("odd", odd)
        with pytest.raises(error, match=f"^odd is .*{words}"):
            whole(net)


@pytest.mark.filterwarnings("ignore:.*(quantize|nested tensors)")
def test_frozen_tensors_that_nothing_sends_may_be_of_any_dtype():
    for odd in quantized(), torch.ones(3, device="meta"), torch.ones(3).to(torch.float8_e4m3fn):
        net = nn.Linear(2, 2)
        net.odd = nn.Parameter(odd, requires_grad=False)
        assert [place.name for place in whole(net)[0].parameters] == ["weight", "bias"]
