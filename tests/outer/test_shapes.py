# SPDX-License-Identifier: Apache-2.0
"""Whole rounds over models of any shapes: empty, scalar, not contiguous, narrow, tied, frozen, larger than a bucket."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from farflung.methods.aggregate import GatherMean, ReduceScatterMean
from farflung.methods.recipes import diloco, eager_diloco, edit, gossip, local_sgd, sparse_loco, streaming_diloco
from farflung.outer import Identity, Int8, OuterLoop, by_bytes
from farflung.testing.sim import run_replicas
from tests.outer.replicas import same

MEANS = [
    local_sgd(1),
    diloco(1, lr=1.0, momentum=0.0),
    replace(diloco(1, lr=1.0, momentum=0.0), aggregator=GatherMean()),
    streaming_diloco(1, 1, delay=0, alpha=0.0, lr=1.0, momentum=0.0, codec=Identity()),
    edit(1, lr=1.0, momentum=0.0, temperature=float("inf"), max_norm=float("inf")),
]
OTHERS = [
    local_sgd(1, codec=Int8(8)),
    replace(diloco(1), codec=Int8(8), aggregator=ReduceScatterMean()),
    streaming_diloco(2, 1, delay=1, cut=by_bytes),
    eager_diloco(1),
    sparse_loco(1),
    edit(1),
    gossip(1),
]
SHAPES = st.one_of(st.lists(st.integers(0, 5), max_size=3), st.sampled_from([[16], [4, 4], [2, 8, 2]]))


@st.composite
def models(draw):
    """A list of what a model shall have: shape, dtype, and what is odd about each tensor."""
    kinds = st.sampled_from(["plain", "plain", "turned", "strided", "frozen", "tied", "counter", "average"])
    dtypes = st.sampled_from([torch.float32, torch.float32, torch.bfloat16])
    parts = draw(st.lists(st.tuples(SHAPES, dtypes, kinds), min_size=1, max_size=7))
    wide = draw(st.booleans())
    return [(shape, torch.float64 if wide else dtype, kind) for shape, dtype, kind in parts]


def laid_out(shape, dtype, kind):
    whole = torch.zeros(shape, dtype=dtype)
    if kind == "turned" and len(shape) >= 2:
        return torch.zeros([*shape[:-2], shape[-1], shape[-2]], dtype=dtype).transpose(-1, -2)
    if kind == "strided" and shape:
        return torch.zeros([*shape[:-1], 2 * shape[-1]], dtype=dtype)[..., ::2]
    return whole


class Model(nn.Module):
    def __init__(self, parts):
        super().__init__()
        for number, (shape, dtype, kind) in enumerate(parts):
            if kind == "counter":
                self.register_buffer(f"b{number}", torch.zeros(shape, dtype=torch.int64))
            elif kind == "average":
                self.register_buffer(f"b{number}", torch.zeros(shape))
            else:
                parameter = nn.Parameter(laid_out(shape, dtype, kind), requires_grad=kind != "frozen")
                self.register_parameter(f"p{number}", parameter)
                if kind == "tied":
                    self.register_parameter(f"t{number}", parameter)

    @torch.no_grad()
    def move(self, rank, step):
        """By small whole numbers, other ones in each element."""
        for number, tensor in enumerate((*self.parameters(), *self.buffers())):
            draws = torch.Generator().manual_seed(100 * step + 10 * number + rank)
            tensor.add_(torch.randint(0, 3, tensor.shape, generator=draws).to(tensor.dtype))


def tensors(model):
    return {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}


def places(model):
    return [(tensor.data_ptr(), tensor.stride()) for tensor in (*model.parameters(), *model.buffers())]


def rounds(group, recipe, parts, steps, bucket_bytes):
    model = Model(parts)
    seen, kept = [], places(model)
    with OuterLoop(model, recipe, group, bucket_bytes=bucket_bytes) as outer:
        for step in range(steps):
            model.move(group.rank, step)
            before = tensors(model)
            outer.step()
            seen.append((before, tensors(model)))
        state = outer.state_dict()
        again = OuterLoop(model, recipe, group, bucket_bytes=bucket_bytes)
        again.load_state_dict(state)
        frozen = {name for name, one in model.named_parameters() if not one.requires_grad}  # which begin alike
        assert same(*({k: one for k, one in each.items() if k not in frozen} for each in (tensors(model), seen[-1][1])))
        outer.detach()
    again.close()
    assert places(model) == kept
    return seen, tensors(model)


def expected(name, befores, parts):
    kind = parts[int(name[1:])][2]
    values = [before[name] for before in befores]
    if kind == "frozen":
        return None
    if kind == "counter":
        return torch.stack(values).amax(0)
    return (sum(value.double() for value in values) / len(values)).to(values[0].dtype)


@pytest.mark.law("memory-stays")
@settings(max_examples=25)
@given(models(), st.sampled_from(MEANS), st.sampled_from([2, 4]), st.integers(4, 200))
def test_all_that_is_trained_becomes_its_mean_and_counters_their_maximum(parts, recipe, size, bucket_bytes):
    outcomes = run_replicas(rounds, size, recipe, parts, 1, bucket_bytes)
    befores = [seen[0][0] for seen, _ in outcomes]
    for (seen, _), before in zip(outcomes, befores, strict=True):
        for name, value in seen[0][1].items():
            target = expected(name, befores, parts)
            assert torch.equal(value, before[name] if target is None else target), name


@settings(max_examples=25)
@given(models(), st.sampled_from(OTHERS), st.integers(2, 3), st.integers(4, 200))
def test_in_the_end_all_have_the_same_also_of_frozen_weights_that_were_moved(parts, recipe, size, bucket_bytes):
    outcomes = run_replicas(rounds, size, recipe, parts, 3, bucket_bytes)
    for name in outcomes[0][1]:
        rows = [weights[name] for _, weights in outcomes]
        assert all(torch.equal(rows[0], row) for row in rows), name
