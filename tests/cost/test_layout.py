# SPDX-License-Identifier: Apache-2.0
"""What a layout costs a rank, as arithmetic: what is shared, what is not, and what travels along which axis."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from farflung.cost.memory import ModelSize, RankLayout, estimate
from farflung.cost.model import Method, Workload, cost_of
from farflung.cost.modules import size_of
from farflung.demo.gpt import GPT
from farflung.demo.settings import Shape

DILOCO = Method("diloco(8)", every=8, anchor=True, outer_state=1, confirmed=True)
SIZES = st.builds(
    ModelSize,
    st.lists(st.integers(1, 10**9), min_size=1, max_size=6).map(tuple),
    value_bytes=st.sampled_from([2, 4]),
    state_values=st.integers(0, 3),
)
LAYOUTS = st.builds(
    RankLayout,
    st.integers(1, 8),
    st.integers(1, 8),
    sharded=st.booleans(),
    reshard=st.booleans(),
    param_bytes=st.sampled_from([None, 2]),
    reduce_bytes=st.sampled_from([None, 2, 4]),
    micro_batches=st.integers(1, 4),
    gloo=st.booleans(),
)


@given(SIZES, LAYOUTS)
def test_what_rests_is_shared_by_the_shards_and_the_peak_has_room_for_it(size, layout):
    cost = estimate(size, layout)
    alone = estimate(size, RankLayout())
    shards = layout.dp_shard_size if layout.sharded else 1
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(cost, name) * shards == pytest.approx(getattr(alone, name))
    rest = cost.weights + cost.gradients + cost.optimizer
    assert cost.peak >= rest * (1 - 1e-9)
    assert cost.peak <= (rest + 3 * cost.gathered + 3 * cost.reducing) * (1 + 1e-9)
    # Nobody sends where an axis has one rank.
    assert estimate(size, replace(layout, dp_shard_size=1)).row_bytes == 0
    assert estimate(size, replace(layout, dp_replicate_size=1)).column_bytes == 0


@given(SIZES, st.integers(2, 64))
def test_sharding_sends_half_as_much_again_as_averaging(size, ranks):
    """All-gather twice and reduce-scatter once, next to an all-reduce, which is one of each: ZeRO, section 7."""
    size = replace(size, groups=(0, *size.groups))  # the root's are gathered once
    sharded = estimate(size, RankLayout(1, ranks, sharded=True))
    assert sharded.row_bytes == pytest.approx(1.5 * estimate(size, RankLayout(ranks, 1)).column_bytes)
    kept = estimate(size, RankLayout(1, ranks, sharded=True, reshard=False))
    assert kept.row_bytes == pytest.approx(estimate(size, RankLayout(ranks, 1)).column_bytes)


@given(SIZES, st.integers(2, 8), st.integers(1, 8))
def test_columns_exchange_their_shards_alone_and_an_outer_loop_costs_what_it_does_for_a_ranks_values(
    size, rows, shards
):
    each = estimate(size, RankLayout(rows, shards, sharded=True)).column_bytes
    assert each * shards == pytest.approx(estimate(size, RankLayout(rows, 1, sharded=True)).column_bytes)
    cost = estimate(size, RankLayout(rows, shards, sharded=True, outer=DILOCO))
    inside = estimate(size, RankLayout(1, shards, sharded=True))
    held = -(-size.parameters // shards)
    alone = cost_of(Workload(held, max(1, len(size.groups) - 1), 1.0, rows, 1e9, island_size=shards), DILOCO)
    assert cost.outer == alone.memory.total >= 8 * held
    assert cost.peak == pytest.approx(inside.peak + cost.outer)
    assert cost.row_bytes == inside.row_bytes
    assert cost.column_bytes == pytest.approx(alone.bytes_sent_per_round / 8)


def test_frozen_parameters_have_neither_gradients_nor_states():
    cost = estimate(ModelSize((10, 100, 100), trained=21), RankLayout(1, 2, sharded=True))
    assert (cost.weights, cost.gradients, cost.optimizer) == (4 * 105, 4 * 10.5, 8 * 10.5)
    assert cost.row_bytes == 0.5 * 4 * (210 + 200 + 21)


def test_mixed_precision_halves_what_is_gathered_and_sent_and_nothing_at_rest():
    whole = RankLayout(1, 4, sharded=True)
    layouts = (replace(whole, param_bytes=2, reduce_bytes=2), whole)
    half, full = (estimate(ModelSize((10, 100, 100)), layout) for layout in layouts)
    assert (half.row_bytes, half.gathered, half.weights) == (full.row_bytes / 2, full.gathered / 2, full.weights)


def test_a_model_is_measured_in_the_groups_that_it_is_sharded_in():
    with torch.device("meta"):
        model = GPT(Shape(width=32, depth=3, heads=4, context=8))
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    rest = sum(parameter.numel() for parameter in model.parameters()) - 3 * block
    assert size_of(model, ["Block"]) == ModelSize((rest, block, block, block), trained=rest + 3 * block)
    assert size_of(model).groups == (rest + 3 * block,)
    model._no_split_modules = ["Block", "LayerNorm"]  # those in a block are taken out of it
    assert size_of(model, state_values=1).groups[0] == rest - 2 * 32


def test_tied_weights_count_once_and_frozen_ones_are_not_trained():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    model[1].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    assert size_of(model) == ModelSize((16 + 8 + 2,), trained=18)
