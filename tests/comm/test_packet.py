# SPDX-License-Identifier: Apache-2.0
"""Leaves lie in a payload apart from each other, aligned, and come out as they went in; headers say what they are."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st

from farflung.comm.packet import ALIGN, PayloadLayout, is_plain_bytes

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES += [torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8]
DTYPES += [torch.uint8, torch.uint16, torch.uint64, torch.bool]
shapes = st.lists(st.integers(0, 4), max_size=3)
kinds = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=8)


def noise(shape, dtype):
    """Random bytes as a tensor; for bool random truth."""
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    numel = torch.Size(shape).numel()
    return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)


def bytes_of(x):
    return x.resolve_conj().contiguous().view(-1).view(torch.uint8).tolist()


def same_bytes(a, b):
    return a.shape == b.shape and a.dtype is b.dtype and bytes_of(a) == bytes_of(b)


@settings(max_examples=100)
@given(kinds)
def test_views_hold_every_leaf_at_once_aligned_disjoint_and_close_together(leaves):
    tensors = [noise(shape, dtype) for shape, dtype in leaves]
    layout = PayloadLayout([x.shape for x in tensors], [x.dtype for x in tensors])
    payload = torch.zeros(layout.nbytes, dtype=torch.uint8)
    views = layout.views(payload)
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    assert all(map(same_bytes, views, tensors))
    spans = sorted((offset, offset + x.nbytes) for offset, x in zip(layout.offsets, tensors, strict=True))
    assert all(start % ALIGN == 0 for start, _ in spans)
    assert all(end <= start < end + ALIGN for (_, end), (start, _) in pairwise(spans))
    assert layout.nbytes % ALIGN == 0
    assert layout.nbytes <= sum(end - start + ALIGN - 1 for start, end in spans)


@pytest.mark.filterwarnings("ignore:.*(quantize|nested tensors)")
def test_what_is_not_plain_bytes_in_memory():
    x, wrapper = torch.ones(2), type("Wrapper", (torch.Tensor,), {"__tensor_flatten__": None})
    odd = [x.to_sparse(), torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), torch.nested.nested_tensor([x, x])]
    assert not any(map(is_plain_bytes, [*odd, x.to("meta"), x.as_subclass(wrapper)]))
    assert is_plain_bytes(x)
