# SPDX-License-Identifier: Apache-2.0
"""A recipe in the cost model's plain numbers. This file needs torch, as recipes do; the rest of the room does not."""

from __future__ import annotations

import torch
from torch import nn

from farflung.base.errors import ConfigError
from farflung.base.sizes import bucket_bytes_for
from farflung.codec.feedback import ErrorFeedback
from farflung.cost.methods import bits_on_the_wire
from farflung.cost.model import Exchange, Method
from farflung.methods.aggregate import GatherMean, Gossip, RadialMean, ReduceScatterMean, mean_of
from farflung.methods.agreement import Mean
from farflung.methods.inner import AverageState
from farflung.methods.recipe import Recipe
from farflung.methods.schedule import Levels, after_warmup

_FP32_BITS = 32
_STATE_TENSORS = 2  # of a parameter in the inner optimizer's state: Adam's


def method_of(
    recipe: Recipe,
    parameters: int,
    *,
    name: str,
    every: int | None = None,
    bucket_bytes: int | None = None,
) -> Method:
    """Return a recipe as plain numbers; its bytes are those that `stats()` of a real run counts.

    They describe the main part of a run: a warm-up is left out, and so are buffers such as those of a BatchNorm. Codecs
    are assumed to take no time: set `encode_s` and `decode_s` of the result to what `benchmarks/bench_codecs.py`
    measures.

    Args:
        parameters: number of trainable parameters.
        name: shown to people.
        every: steps in a round, needed if the schedule does not determine it (`ByTime`), or for longer ones of
            `Quadratic`.
        bucket_bytes: as for `OuterLoop`; None is its default for this many fp32 parameters.
    """
    bucket_bytes = bucket_bytes or bucket_bytes_for(_FP32_BITS // 8 * parameters)
    schedule = recipe.schedule
    every = every or recipe.every
    if every is None:
        raise ConfigError(f"{schedule} does not determine how many steps a round has: pass every=.")
    inside = after_warmup(schedule)
    levels = inside.sizes if isinstance(inside, Levels) else {}
    return Method(
        name,
        every=every,
        fragments=schedule.fragments,
        delay=schedule.delay,
        bits=bits_on_the_wire(recipe.codec.wire_bytes, parameters, schedule.fragments, bucket_bytes),
        exchange=_exchange(recipe),
        # Elsewhere the vote travels with the values, or in a message of its own.
        voted=recipe.votes_first,
        confirmed=True,
        anchor=recipe.optimizer is not None,
        outer_state=_outer_state(recipe),
        feedback=isinstance(recipe.codec, ErrorFeedback) or recipe.eager,
        bucket_bytes=bucket_bytes,
        state_bits=_state_bits(recipe),
        levels=tuple((steps, size) for steps, size in sorted(levels.items()) if size is not None),
    )


def _exchange(recipe: Recipe) -> Exchange:
    aggregator = recipe.exchange
    if isinstance(aggregator, RadialMean):
        aggregator = mean_of(recipe.codec)
    if isinstance(aggregator, (Mean, ReduceScatterMean)):
        return "reduced"
    if isinstance(aggregator, GatherMean) and aggregator.takes_two(recipe.codec):
        return "either"
    return "paired" if isinstance(aggregator, Gossip) else "gathered"


def _outer_state(recipe: Recipe) -> int:
    """Return how many tensors the outer optimizer keeps of a parameter, counted after a step of it."""
    if recipe.optimizer is None:
        return 0
    probe = nn.Parameter(torch.zeros(2))
    optimizer = recipe.optimizer([probe])
    probe.grad = torch.ones(2)
    optimizer.step()
    kept = optimizer.state[probe].values()
    return sum(isinstance(value, torch.Tensor) and value.shape == probe.shape for value in kept)


def _state_bits(recipe: Recipe) -> float:
    if not isinstance(recipe.inner, AverageState):
        return 0.0
    return _FP32_BITS * (sum(1 / period for period in recipe.inner.every.values()) or _STATE_TENSORS)
