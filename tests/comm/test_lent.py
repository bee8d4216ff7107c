# SPDX-License-Identifier: Apache-2.0
"""Tensors that are sent from where they live: who looks at them sees nothing of it, and nothing is lost."""

import copy
import io

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from farflung.base.errors import StateError
from farflung.comm import lent
from farflung.comm.lent import Lent

HELD = ["free", "free", "free", "viewed", "as numpy", "a part", "shared"]


def made(shape, held):
    """A parameter, and what else shows the same memory, if anything does."""
    values = torch.randint(-50, 50, shape).float()
    if held == "a part":
        whole = torch.stack([values, values])
        return nn.Parameter(whole[1]), whole[1]
    parameter = nn.Parameter(values)
    if held == "shared":
        parameter.share_memory_()
    others = {"viewed": lambda: parameter.detach().view(-1), "as numpy": lambda: parameter.detach().numpy()}
    return parameter, others.get(held, lambda: None)()


@st.composite
def parameters(draw):
    shapes = st.one_of(st.lists(st.integers(0, 6), max_size=3), st.sampled_from([[16], [4, 4], [32], [2, 8, 3]]))
    parts = draw(st.lists(st.tuples(shapes, st.sampled_from(HELD)), max_size=9))
    return [made(*part) for part in parts]


@settings(max_examples=100, deadline=None)
@given(parameters(), st.integers(4, 400), st.integers(0, 3))
@torch.no_grad()
def test_what_is_lent_and_given_back_comes_to_the_tensors_and_to_whoever_shares_their_memory(parts, cap, tail):
    tensors = [parameter for parameter, _ in parts]
    before = [tensor.detach().clone() for tensor in tensors]
    buckets = Lent(tensors, cap_bytes=cap, tail=tail)
    assert sum(buckets.sizes) == sum(tensor.numel() for tensor in tensors)
    assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, before, strict=True))
    for k in range(len(buckets)):
        values = buckets.lend(k)
        assert sum(part.numel() for part in values) == buckets.sizes[k]
        for part in values:
            part.add_(1000)
        buckets.give_back(k, values)
    assert all(torch.equal(tensor, value + 1000) for tensor, value in zip(tensors, before, strict=True))
    for parameter, other in parts:
        assert other is None or np.array_equal(np.ravel(other), np.ravel(parameter))


def is_home(tensor, buckets):
    home = buckets.home_with_tail()
    return 0 <= tensor.data_ptr() - home.data_ptr() < home.nbytes


def test_short_tensors_move_together_and_keep_aligned_storages_of_their_own():
    free, wide, odd, viewed = (nn.Parameter(torch.ones(n)) for n in (16, 64, 5, 32))
    view = viewed.detach()
    buckets = Lent([odd, free, viewed, wide], cap_bytes=4096)
    assert buckets.owners(0) == [1, 2, 3, 0]
    assert [is_home(t, buckets) for t in (free, wide, odd, viewed)] == [True, True, True, False]
    assert view.data_ptr() == viewed.data_ptr()
    assert all(t.data_ptr() % 64 == 0 for t in (free, wide))
    assert [t.untyped_storage().nbytes() for t in (free, wide, odd)] == [64, 256, 20]
    assert len({t.untyped_storage().data_ptr() for t in (free, wide, odd)}) == 3


def test_tensors_go_to_one_home_whole():
    tensors = [nn.Parameter(torch.ones(48)) for _ in range(3)]
    buckets = Lent(tensors, cap_bytes=400)
    assert buckets.sizes == [96, 48]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == 3
    torch._foreach_mul_([t.detach() for t in tensors], [2.0, 3.0, 4.0])
    assert [values.unique().tolist() for k in range(2) for values in buckets.lend(k)] == [[2.0, 3.0], [4.0]]
    assert buckets.lend(1)[0].data_ptr() == tensors[2].data_ptr()


def test_memory_that_processes_share_stays_shared():
    shared = nn.Parameter(torch.ones(16))
    shared.share_memory_()
    where = shared.data_ptr()
    Lent([shared, nn.Parameter(torch.ones(16))], cap_bytes=4096)
    assert shared.is_shared()
    assert shared.data_ptr() == where


def test_long_tensors_and_those_larger_than_a_bucket_stay_where_they_are(monkeypatch):
    monkeypatch.setattr(lent, "_LONG", 64)
    small, large, larger = (nn.Parameter(torch.ones(n)) for n in (16, 64, 256))
    where = [large.data_ptr(), larger.data_ptr()]
    buckets = Lent([larger, small, large], cap_bytes=512)
    assert buckets.sizes == [16, 128, 128, 64]
    assert [part.data_ptr() for k in (1, 2, 3) for part in buckets.lend(k)] == [where[1], where[1] + 512, where[0]]
    assert is_home(small, buckets)
    assert not Lent([large], cap_bytes=512).has_homes
    assert Lent([nn.Parameter(torch.ones(40))], cap_bytes=64).sizes == [16, 16, 8]


def test_moved_tensors_are_saved_copied_and_trained_as_before():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16))
    twin = copy.deepcopy(model)
    Lent(list(model.parameters()), cap_bytes=2**20)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, twin)]
    for _ in range(3):
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            each(torch.ones(2, 16)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = twin.state_dict()
    files = io.BytesIO(), io.BytesIO()
    torch.save(model.state_dict(), files[0])
    torch.save(expected, files[1])
    assert files[0].tell() == files[1].tell()
    files[0].seek(0)
    ways = (
        model.state_dict(),
        copy.deepcopy(model).state_dict(),
        torch.load(files[0]),
        safetensors.torch.load(safetensors.torch.save(model.state_dict())),
        {name: value.share_memory_() for name, value in copy.deepcopy(model).state_dict().items()},
    )
    for found in ways:
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_memory_that_is_new_is_moved_in_and_memory_in_use_is_found():
    a, b = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))
    buckets = Lent([a, b], cap_bytes=4096)
    a.data = torch.full((16,), 2.0)
    held = b.data = torch.full((16,), 3.0)
    buckets.rebind([a, b])
    assert (is_home(a, buckets), is_home(b, buckets)) == (True, False)
    with torch.no_grad():
        values = buckets.lend(0)
        assert values[0].tolist() == [2.0] * 16 + [3.0] * 16
        held.fill_(4)
        assert buckets.lend(0, is_loaded=True)[0].tolist() == [2.0] * 16 + [3.0] * 16
        values = buckets.lend(0)
        values[0].mul_(2)
        buckets.give_back(0, values)
    assert (a.tolist(), b.tolist(), held.tolist()) == ([4.0] * 16, [8.0] * 16, [8.0] * 16)


def test_other_shapes_and_layouts_are_refused():
    a, b = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(4, 8))
    buckets = Lent([a, b], cap_bytes=4096)
    a.data = torch.ones(32)
    with pytest.raises(StateError, match=r"\[16\].*\[32\]"):
        buckets.rebind([a, b])
    a.data, b.data = torch.ones(16), torch.ones(8, 4).t()
    with pytest.raises(StateError, match="contiguous"):
        buckets.rebind([a, b])


def test_tensors_that_were_given_another_dtype_are_copied(monkeypatch):
    monkeypatch.setattr(lent, "_LONG", 32)
    short, long = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(32))
    buckets = Lent([short, long], cap_bytes=4096)
    short.data, long.data = short.data.bfloat16(), long.data.bfloat16()
    buckets.rebind([short, long])
    with torch.no_grad():
        for k in range(2):
            values = buckets.lend(k)
            assert {part.dtype for part in values} == {torch.float32}
            for part in values:
                part.mul_(3)
            buckets.give_back(k, values)
    assert (short.tolist(), long.tolist()) == ([3.0] * 16, [3.0] * 32)
    assert short.dtype == long.dtype == torch.bfloat16


def test_a_backward_through_values_that_have_been_written_to_is_an_error():
    a = nn.Parameter(torch.ones(16))
    buckets = Lent([a], cap_bytes=4096)
    loss = a.square().sum()
    with torch.no_grad():
        buckets.give_back(0, buckets.lend(0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
