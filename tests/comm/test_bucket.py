# SPDX-License-Identifier: Apache-2.0
"""Buckets: whatever the tensors are, packing and writing back loses nothing, and touches nothing else."""

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import nn

from farflung.base.errors import StateError, Unsupported
from farflung.base.sizes import CAP_BYTES, num_buffers_among
from farflung.comm.bucket import Buckets
from farflung.comm.shards import addresses, local

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["plain", "transposed", "strided", "parameter"]


@st.composite
def tensors(draw, dtypes=tuple(FLOATS)):
    shape = draw(st.lists(st.integers(0, 6), max_size=3))  # scalars, empty and one-element tensors are among them
    dtype = draw(st.sampled_from(dtypes))
    values = torch.randint(-100, 100, shape).to(dtype)
    kind = draw(st.sampled_from(KINDS))
    if kind == "transposed" and values.dim() > 1:
        return values.transpose(0, -1)
    if kind == "strided" and values.dim() > 0:
        return torch.stack([values, values], dim=-1)[..., 0]
    return nn.Parameter(values, requires_grad=dtype.is_floating_point) if kind == "parameter" else values


many = st.lists(tensors(), max_size=8)
caps = st.integers(1, 200)


def pack_and_unpack(buckets):
    """Pack each bucket, overwrite its tensors, and write them back."""
    for k in range(len(buckets)):
        packed = buckets.pack(k).clone()
        for t in buckets.pieces(k):
            t.zero_()
        buckets.flat(k).copy_(packed)
        buckets.unpack(k)


def divide(buckets, divisor):
    for k in range(len(buckets)):
        buckets.pack(k)
        buckets.unpack(k, divisor)


@settings(max_examples=60)
@given(many, caps, st.integers(1, 3))
@torch.no_grad()
def test_what_is_packed_comes_back(ts, cap, num_buffers):
    before, where = [t.clone() for t in ts], addresses(ts)
    pack_and_unpack(Buckets(ts, cap_bytes=cap, num_buffers=num_buffers))
    assert all(map(torch.equal, ts, before))
    assert addresses(ts) == where


@settings(max_examples=60)
@given(many, caps)
@example([torch.empty(0), torch.empty(3, 0)], 1)
def test_buckets_hold_each_value_once_and_keep_to_their_size(ts, cap):
    buckets = Buckets(ts, cap_bytes=cap)
    assert sum(buckets.sizes) == sum(t.numel() for t in ts)
    assert all(buckets.sizes), "nothing makes no bucket"
    room = max(1, cap // 4)
    whole = [t.numel() for t in ts if not t.is_contiguous()]
    assert all(size <= room or size in whole for size in buckets.sizes)
    flat = [buckets.pack(k).clone() for k in range(len(buckets))]
    expected = [local(t).reshape(-1).float() for t in ts]
    assert torch.equal(torch.cat([torch.empty(0), *flat]), torch.cat([torch.empty(0), *expected]))


@settings(max_examples=40)
@given(many, caps, st.sampled_from([2, 3, 4]))
@torch.no_grad()
def test_dividing_on_the_way_back_is_dividing(ts, cap, divisor):
    expected = [(t.float() / divisor).to(t.dtype) for t in ts]
    divide(Buckets(ts, cap_bytes=cap), divisor)
    assert all(map(torch.equal, ts, expected))


@torch.no_grad()
def test_large_tensors_are_divided_piece_by_piece_with_the_same_bits():
    t = torch.randn(3 * 2**16 + 5)
    expected = t / 3
    buckets = Buckets([t], cap_bytes=4 * 2**16)
    assert [buckets.is_coarse(k) for k in range(len(buckets))] == [True, True, True, False]
    divide(buckets, 3)
    assert torch.equal(t, expected)


@settings(max_examples=30)
@given(st.lists(tensors(dtypes=(torch.int64, torch.int32, torch.uint8, torch.bool)), max_size=6), caps)
@torch.no_grad()
def test_integers_are_exact(ts, cap):
    ts = [local(t) for t in ts]
    if ts:
        ts.append(torch.tensor(2**53 + 1))  # more than a float64 holds
    before = [t.clone() for t in ts]
    pack_and_unpack(Buckets(ts, torch.int64, cap_bytes=cap))
    assert all(map(torch.equal, ts, before))


def test_tensors_of_several_devices_share_no_buffer():
    with pytest.raises(Unsupported, match=r"several devices \(cpu, meta\)"):
        Buckets([torch.zeros(2), torch.zeros(2, device="meta")])


def test_two_buffers_take_turns():
    buckets = Buckets([torch.arange(10.0)], cap_bytes=16)
    assert buckets.sizes == [4, 4, 2]
    first, second = buckets.pack(0), buckets.pack(1)
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert buckets.pack(2).data_ptr() == first.data_ptr()
    assert buckets.pack(0).data_ptr() == first.data_ptr()


@torch.no_grad()
def test_tensors_that_got_other_memory_are_found_again():
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))
    buckets = Buckets([a, b])
    a.data = torch.full((3,), 5.0)
    buckets.rebind([a, b])
    assert buckets.pack(0).tolist() == [5, 5, 5, 1, 1, 1, 1]
    buckets.flat(0).fill_(7)
    buckets.unpack(0)
    assert a.tolist() == [7, 7, 7]


def test_other_shapes_and_layouts_are_refused():
    a = nn.Parameter(torch.ones(3, 2))
    buckets = Buckets([a])
    a.data = torch.ones(2, 3)
    with pytest.raises(StateError, match=r"\[3, 2\].*\[2, 3\]"):
        buckets.rebind([a])
    a.data = torch.ones(2, 3).t()
    with pytest.raises(StateError, match="contiguous"):
        buckets.rebind([a])


def test_buckets_that_take_turns_between_two_ranks_are_25_mb_and_others_wait_in_as_many_more():
    assert [num_buffers_among(size) for size in (1, 2, 3, 64)] == [2, 2, 4, 4]
    assert num_buffers_among(2) * CAP_BYTES == 25 * 2**20
