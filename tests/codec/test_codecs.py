# SPDX-License-Identifier: Apache-2.0
"""Codecs: stated bounds, real bytes, the same bits every time, and nothing lost under error feedback."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from farflung.codec import base
from farflung.codec.base import Cast, Identity
from farflung.codec.blockwise import E3M0, Fp8, Int4, Int8
from farflung.codec.feedback import ErrorFeedback
from farflung.codec.sparse import TopK

BLOCKWISE = [Int8(), Int8(block=6), Fp8(), Fp8(block=10), Int4(), Int4(block=2), Int4(block=6), E3M0(), E3M0(block=14)]
SPARSE = [TopK(), TopK(k=3, chunk=10), TopK(k=1, chunk=2), TopK(k=7, chunk=7), TopK(k=5, chunk=16, bits=32)]
BYTES = [*BLOCKWISE, *SPARSE, ErrorFeedback(Int4(block=4)), ErrorFeedback(Cast())]
ALL = [Identity(), Cast("bf16"), Cast("fp16"), *BYTES]
LEVELS = {
    "Int8": torch.arange(-127.0, 128) / 127,
    "Int4": torch.arange(-7.0, 8) / 7,
    "E3M0": torch.cat([-(2.0 ** torch.arange(-6, 1)), torch.zeros(1), 2.0 ** torch.arange(-6, 1)]),
    "Fp8": torch.arange(256).byte().view(torch.float8_e4m3fn).float() / 448,
}
LEAST = 2.0**-100
# One and three times powers of two, of both signs: next to 1 they lie between two levels of each float codec.
HALVES = torch.cat([sign * factor * 2.0 ** torch.arange(0, -12, -1) for sign in (1, -1) for factor in (1, 0.75)])
laws = settings(max_examples=30)


@st.composite
def tensors(draw, largest=1000):
    """Flat fp32 tensors: many magnitudes in one, zeros, equal values, outliers, all that fp32 can hold."""
    n = draw(st.integers(0, largest))
    make = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(n, generator=make)
    kinds = ["normal", "spread", "zeros", "equal", "outlier", "limit", "denormal", "sparse", "ties"]
    kind = draw(st.sampled_from(kinds))
    if kind == "spread":
        x *= 2.0 ** torch.randint(-140, 120, (n,), generator=make)
    elif kind == "zeros":
        x.zero_()
    elif kind == "equal":
        x.fill_(draw(st.floats(-(2.0**99), 2.0**99, width=32)))
    elif kind == "outlier" and n:
        x[draw(st.integers(0, n - 1))] = 3e38
    elif kind == "limit":
        x.sign_().mul_(float(torch.finfo(torch.bfloat16).max))
    elif kind == "denormal":
        x *= 1e-42
    elif kind == "ties":  # whole numbers that lie between two levels of some codec
        top = draw(st.sampled_from([14, 128, 254, 448]))
        x = torch.randint(-top, top + 1, (n,), generator=make).float()
        x[::3] = top
    elif kind == "sparse":
        x *= torch.rand(n, generator=make) < 0.02
    return x * 2.0 ** draw(st.integers(-40, 0))


def decoded(codec, x):
    return codec.decode(codec.encode(x), torch.full_like(x, math.nan))


def blocks(x, size):
    """Rows of `size`, the last filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % size)).view(-1, size)


@pytest.mark.law("stated-bytes")
@pytest.mark.parametrize("codec", ALL, ids=str)
@laws
@given(x=tensors())
def test_the_wire_has_the_size_that_was_promised_and_the_same_bits_each_time(codec, x):
    before = x.clone()
    wire = codec.encode(x)
    assert wire.nbytes == codec.wire_bytes(x.numel())
    assert wire.dim() == 1
    assert codec.linear or wire.dtype == torch.uint8
    assert torch.equal(x, before)
    assert torch.equal(wire, codec.encode(x.clone()))


@pytest.mark.law("stated-error")
@pytest.mark.parametrize("codec", BLOCKWISE, ids=str)
@laws
@given(x=tensors())
@example(x=HALVES)
def test_a_blockwise_error_is_within_its_bound_and_the_nearest_level_is_taken(codec, x):
    rows = blocks(x, codec.block).double()
    error = (rows - blocks(decoded(codec, x), codec.block)).abs()
    top = rows.abs().amax(1, keepdim=True) if rows.numel() else rows.new_zeros(0, 1)
    bound = {
        "Int8": top / 254,
        "Int4": top / 14,
        "E3M0": torch.maximum(rows.abs() / 3, top / 128),
        "Fp8": torch.maximum(rows.abs() / 16, top * 2**-18),
    }[type(codec).__name__]
    assert (error <= torch.where(top < LEAST, rows.abs(), bound * (1 + 2**-13))).all()
    levels = LEVELS[type(codec).__name__].double()
    levels = levels[levels.isfinite()] * top[..., None]
    nearest = (rows[..., None] - levels).abs().amin(2)
    assert ((error <= nearest + top * 2**-20) | (top < LEAST)).all()


@pytest.mark.parametrize("codec", ALL, ids=str)
@laws
@given(
    x=tensors(),
    factor=st.sampled_from([1.0, -1.0, 0.5, 0.3, 0.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_add_is_decode_scaled_and_added_bit_for_bit(codec, x, factor, dtype):
    x = x.clamp(-6e4, 6e4)  # of fp16 no more survives
    wire = codec.encode(x)
    into = torch.arange(x.numel(), dtype=dtype).sin_()
    expected = into + factor * codec.decode(wire, torch.empty_like(into))
    assert codec.add(wire, into, factor) is into
    assert torch.equal(into, expected)


@pytest.mark.parametrize("codec", BYTES, ids=str)
@laws
@given(x=tensors())
def test_a_wire_may_be_decoded_over_its_source_from_any_byte_and_into_fp64(codec, x):
    wire, expected = codec.encode(x), decoded(codec, x)
    moved = torch.cat([wire.new_zeros(1), wire])[1:]
    wide = codec.decode(moved, torch.empty(x.numel(), dtype=torch.float64))
    assert torch.equal(wide, expected.double())
    assert torch.equal(codec.encode(x.double()), wire)
    assert codec.decode(wire, x) is x
    assert torch.equal(x, expected)


@pytest.mark.parametrize("codec", [*BLOCKWISE, TopK(k=3, chunk=10)], ids=str)
def test_the_size_of_the_pieces_does_not_show(codec, monkeypatch):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(3))
    wire, into = codec.encode(x), torch.ones(5000)
    expected = codec.add(wire, into.clone(), 0.3)
    for size in (1, 16, 700, 5000):
        monkeypatch.setattr(base, "_PIECE", size)
        assert torch.equal(codec.encode(x), wire)
        assert torch.equal(codec.add(wire, into.clone(), 0.3), expected)


@pytest.mark.parametrize("codec", [codec for codec in ALL if codec.limit < math.inf], ids=str)
@pytest.mark.parametrize("n", [1, 127, 5000])
def test_the_limit_survives(codec, n):
    x = torch.full((n,), codec.limit)
    x[::2] *= -1
    there = decoded(codec, x)
    sent = there != 0
    assert there.isfinite().all()
    assert torch.allclose(there[sent], x[sent], rtol=1e-6)
    assert sent.any()


@pytest.mark.parametrize("codec", BLOCKWISE, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_spoils_its_block_alone(codec, bad):
    x = torch.linspace(-1, 1, 3 * codec.block)
    clean = decoded(codec, x)
    x[codec.block] = bad
    there = decoded(codec, x)
    assert not there[codec.block : 2 * codec.block].isfinite().any()
    assert torch.equal(there[: codec.block], clean[: codec.block])
    assert torch.equal(there[2 * codec.block :], clean[2 * codec.block :])


def test_bits_are_packed_for_real():
    bits = {codec: codec.wire_bytes(1 << 20) * 8 / 2**20 for codec in (Int8(), Fp8(), Int4(), E3M0(), TopK())}
    assert [*bits.values()] == [8.125, 8.125, 4.25, 4.25, 64 * (12 + 2) / 4096 + 32 / 4096]


def test_a_blocks_maximum_is_exact_in_e3m0():
    x = torch.randn(4096, generator=torch.Generator().manual_seed(5))
    top = x.view(-1, 128).abs().amax(1)
    assert torch.equal(decoded(E3M0(), x).view(-1, 128).abs().amax(1), top)


@pytest.mark.parametrize("bits", [2, 32])
@laws
@given(x=tensors(300), k=st.integers(1, 20), chunk=st.integers(2, 40))
def test_top_k_sends_the_largest_of_each_chunk_and_of_equal_ones_the_first(bits, x, k, chunk):
    k = min(k, chunk)
    codec = TopK(k=k, chunk=chunk, bits=bits)
    index, _ = codec._sent(codec.encode(x), x)
    expected = []
    for start in range(0, x.numel(), chunk):
        sizes = x[start : start + chunk].abs().tolist()
        ranking = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
        expected += sorted(start + i for i in ranking[:k])
    assert index.tolist() == expected


@pytest.mark.law("stated-error")
@pytest.mark.parametrize("codec", [TopK(), TopK(k=3, chunk=10), TopK(k=7, chunk=7)], ids=str)
@laws
@given(x=tensors())
def test_top_k_contracts_as_it_says(codec, x):
    there = decoded(codec, x)
    rows, error = blocks(x, codec.chunk).double(), blocks(x - there, codec.chunk).double()
    sent = blocks(x * (there != 0), codec.chunk).double().abs().sum(1) ** 2 / codec.k
    whole = (rows**2).sum(1)
    normal = rows.abs().amax(1) > 1e-30 if rows.numel() else whole > 0  # below, bf16 loses bits
    assert ((error**2).sum(1) <= whole - (1 - 2**-16) * sent + 1e-6 * whole)[normal].all()
    assert (error.abs() <= rows.abs().amax(1, keepdim=True)).all() if rows.numel() else True


def test_the_levels_of_top_k_are_the_means_above_and_below_the_mean():
    x = torch.tensor([8.0, -6, 0.5, 1, -1, 0.25, 0])
    assert decoded(TopK(k=4, chunk=7), x).tolist() == [7, -7, 0, 1, -1, 0, 0]


@pytest.mark.law("lossless-is-plain")
@laws
@given(x=tensors(), chunk=st.integers(2, 200))
def test_top_k_of_density_one_is_nothing_and_leaves_no_residual(x, chunk):
    codec = ErrorFeedback(TopK(k=chunk, chunk=chunk, bits=32))
    rest = x.clone()
    wire = codec.encode_with(rest, torch.zeros_like(x))
    assert torch.equal(codec.decode(wire, torch.empty_like(x)), x)
    assert not rest.any()


def test_add_of_top_k_makes_nothing_dense():
    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            for tensor in made if isinstance(made, (list, tuple)) else [made]:
                if tensor.untyped_storage().data_ptr() != into.untyped_storage().data_ptr():
                    self.seen = max(self.seen, tensor.numel())
            return made

    codec, into = TopK(), torch.zeros(40 * 4096)
    wire = codec.encode(torch.randn(into.numel()))
    with Largest() as largest:
        codec.add(wire, into)
    assert 0 < largest.seen < into.numel() // 16


def dyadic(seed):
    return torch.randint(-1000, 1000, (700,), generator=torch.Generator().manual_seed(seed)) * 2.0**-10


def fed_back(codec, deltas):
    """What is sent of `deltas` with error feedback, what is left, and their sum."""
    codec, total = ErrorFeedback(codec), sum(delta.double() for delta in deltas)
    residual, sent = torch.zeros(700), torch.zeros(700)
    for x in deltas:
        codec.add(codec.encode_with(x, residual), sent)
        residual = x
    return sent, residual, total


@pytest.mark.law("feedback-telescopes")
@pytest.mark.parametrize("codec", [Identity(), Cast(), E3M0(block=14), *SPARSE], ids=str)
def test_what_was_sent_and_the_residual_are_all_there_was(codec):
    """Exactly, on dyadic data, where no sum rounds."""
    sent, residual, total = fed_back(codec, [dyadic(seed) for seed in range(3)])
    assert torch.equal(sent + residual, total.float())
    assert residual.any() or codec == Identity()


@pytest.mark.law("feedback-telescopes")
@pytest.mark.parametrize("codec", BLOCKWISE, ids=str)
def test_feedback_telescopes_within_rounding_and_keeps_the_residual_bounded(codec):
    make = torch.Generator().manual_seed(0)
    sent, residual, total = fed_back(codec, [torch.randn(700, generator=make) for _ in range(20)])
    assert torch.allclose((sent + residual).double(), total, atol=1e-4)
    assert residual.abs().max() < 4


@laws
@given(x=tensors(), seed=st.integers(0, 2**32), beta=st.sampled_from([0.95, 0.5, 1.0]))
def test_feedback_is_its_equation_and_leaves_the_old_residual_alone(x, seed, beta):
    codec = ErrorFeedback(Int4(block=6), beta)
    e = torch.randn(x.numel(), generator=torch.Generator().manual_seed(seed))
    old, accumulated = e.clone(), x.add(e, alpha=beta)
    wire = codec.encode_with(x, e)
    assert torch.equal(e, old)
    assert torch.equal(wire, Int4(block=6).encode(accumulated))
    assert torch.equal(x, accumulated - codec.decode(wire, torch.empty_like(x)))


@pytest.mark.parametrize("codec", [Cast("fp16"), Int8(), TopK()], ids=str)
def test_feedback_states_the_figures_of_what_it_wraps(codec):
    wrapped = ErrorFeedback(codec, 0.9)
    assert (wrapped.limit, wrapped.linear) == (codec.limit, False)
    assert wrapped.wire_bytes(12345) == codec.wire_bytes(12345)
    assert str(wrapped) == f"ErrorFeedback(codec={codec}, beta=0.9)"
