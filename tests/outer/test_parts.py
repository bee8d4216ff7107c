# SPDX-License-Identifier: Apache-2.0
"""The small parts of the outer loop: schedule, codecs, fragments, shares of a vote, recipes."""

import math
import warnings
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from farflung.base.errors import ConfigError, Unsupported
from farflung.comm.tensor_memory import fingerprint
from farflung.outer import Cast, Identity, diloco, eager_diloco, streaming_diloco
from farflung.outer.ballot import Tally
from farflung.outer.fragments import whole, without_masks
from farflung.outer.weighting import ByWork, Decision


@settings(max_examples=50)
@given(st.integers(0, 300), st.sampled_from([Identity(), Cast("bf16"), Cast("fp16")]))
def test_codecs_keep_their_bound_and_weigh_what_they_say(n, codec):
    x = torch.randn(n) * 100
    kept = x.clone()
    wire = codec.encode(x)
    assert wire.nbytes == codec.wire_bytes(n)
    out = codec.decode(wire, torch.empty(n))
    error = {Identity(): 0.0, Cast("bf16"): 2.0**-8, Cast("fp16"): 2.0**-11}[codec]
    assert bool(((out - kept).abs() <= error * kept.abs()).all())
    assert torch.equal(codec.decode(codec.encode(x), x), out)  # in place, as the engine does


def test_a_codec_says_what_it_can_hold():
    assert math.isinf(Identity().limit)
    assert Cast("fp16").limit == 65504
    with pytest.raises(ConfigError, match="bf16, fp16"):
        Cast("int8")


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
    kept = without_masks(fragment)
    assert [place.name for place in kept.averages] == ["norm.running_mean", "norm.running_var"]


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
        (quantized(), Unsupported, r"torch\.qint8 tensor.*int_repr"),
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


def judged(*weights, norms=None, largest=None, sound=None):
    size = len(weights)
    tally = Tally(
        weights, norms or (0.0,) * size, largest or (0.0,) * size, sound or (True,) * size, False, 0, (-1,) * size
    )
    return tally, ByWork()(tally.weights, tally.norms, {})


def test_ranks_count_by_what_they_have_done_of_a_round():
    assert judged(1, 0.5, 0)[1] == Decision((1, 0.5, 0), 1.5)
    assert judged(0.25, 0.25, 0)[1] == Decision((1, 1, 0), 2)
    assert judged(1)[1] == Decision((1,), 1)
    assert judged(1, 0.5, 0.25, sound=(True, False, True))[0].sound_weights == (1, 0, 0.25)


def test_ranks_that_spoil_a_sum_are_named():
    assert judged(1, 1, 1, norms=(1.0, math.nan, math.inf))[1].unfit == (1, 2)
    assert judged(1, 1, norms=(1e30, 1e30))[1].unfit == ()

    def too_large(*weights, largest):
        tally, verdict = judged(*weights, largest=largest)
        return tally.too_large(verdict.factors, 65504)

    assert too_large(1, 1, largest=(3e4, 3e4)) == ()
    assert too_large(1, 1, largest=(1.0, 65504.0)) == (1,)
    assert too_large(30, 1, largest=(3e3, 3e3)) == ()  # in proportion, so that the largest is about 1
    tally, _ = judged(30, 1, largest=(3e3, 3e3))
    assert tally.too_large(tally.weights, 65504) == (0,)  # as they go on the wire before the vote


def test_a_momentum_that_short_runs_do_not_pay_back_is_warned_of():
    for make in (partial(diloco, 32), partial(streaming_diloco, 4, 2), partial(eager_diloco, 4)):
        with pytest.warns(UserWarning, match="hundreds of rounds"):
            make(rounds=30, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        diloco(32, rounds=100, momentum=0.9)
        diloco(32, rounds=30, momentum=0.6)
        diloco(32, momentum=0.0)


@settings(max_examples=100)
@given(
    st.integers(1, 70), st.integers(0, 3), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.data()
)
def test_a_fingerprint_sees_each_bit_wherever_the_values_lie(length, offset, dtype, data):
    values = torch.randn(length + offset).to(dtype)[offset:]
    before = fingerprint(values)
    assert fingerprint(values.clone()) == fingerprint(torch.stack([values, values], 1)[:, 0]) == before
    other = values.clone()
    words = other.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[other.element_size()])
    words[data.draw(st.integers(0, length - 1))] ^= 1 << data.draw(st.integers(0, 8 * other.element_size() - 2))
    assert fingerprint(other) != before
