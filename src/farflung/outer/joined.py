# SPDX-License-Identifier: Apache-2.0
"""The states of an outer loop on some ranks, made into one that each of another number of ranks goes on from.

local       mean over the old ranks, by the work that each has done since it was last agreed on
anchor      kept, with its outer optimizer; where ranks have anchors of their own, their mean
residuals   of error feedback: their mean, so that the ranks together still owe what they owed
under way   counts as not sent: local weights hold it still
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farflung.base.checks import wrong_type
from farflung.base.tree import flatten, unflatten
from farflung.outer.asked import check_state


@dataclass(frozen=True)
class Joined:
    """What becomes of several ranks' states.

    Args:
        weights: local weights and buffers, by name.
        state: for `OuterLoop.load_state_dict`, on each of the new ranks. None for a recipe that has moved anchors by
            what is still under way (`eager_diloco`): it can only begin anew, at `weights`.
    """

    weights: dict[str, Tensor]
    state: dict[str, Any] | None


def joined(states: Sequence[dict[str, Any]]) -> Joined:
    """Make the states of all old ranks into one for any number of new ones, as when a machine has gone or come.

    Load the same state on each new rank, into a loop with the same recipe over the same model. An `Accelerator` does so
    by itself.

    Args:
        states: what `OuterLoop.state_dict()` returned on every old rank, in their order.

    Raises:
        ConfigError: there is no state, or one of them is none of an outer loop.
    """
    if not isinstance(states, (list, tuple)) or not states:
        raise wrong_type("joined: states", states, "a list of what state_dict() returned on each of the old ranks")
    for state in states:
        check_state("joined", state)
    columns = list(zip(*(state["rounds"]["fragments"] for state in states), strict=True))
    parts = [_joined_part(column, number, states) for number, column in enumerate(columns)]
    weights = {name: value for part in parts for name, value in part["local"].items()}
    if any("sent" in (part["agreed"] or {}) for part in parts):
        return Joined(weights, None)
    furthest = max(states, key=lambda state: state["position"])
    rounds = {**furthest["rounds"], "open": {}, "fragments": parts}
    return Joined(weights, {**furthest, "rounds": rounds})


def _joined_part(column: Sequence[dict[str, Any]], number: int, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    fresh = [_all_fresh(part, state["rounds"]["open"].get(number)) for part, state in zip(column, states, strict=True)]
    most = max(done[0] for done in fresh)
    by_work = [done[0] / most if most else 1.0 for done in fresh]  # all 1 where all did alike
    agreed = None if column[0]["agreed"] is None else _mean([part["agreed"] for part in column], [1.0] * len(column))
    return {
        "local": _mean([part["local"] for part in column], by_work),
        "agreed": agreed,
        "pending_weight": [sum(done) / len(fresh) for done in zip(*fresh, strict=True)],
        "history": {"seen": {}},  # of ranks that are others now
        "num_rounds": max(part["num_rounds"] for part in column),
        "digest": -1,
    }


def _all_fresh(part: dict[str, Any], trip: dict[str, Any] | None) -> list[float]:
    """What a rank has done since it was agreed on, with what it had sent off."""
    if trip is None:
        return list(part["pending_weight"])
    return [done + sent for done, sent in zip(part["pending_weight"], trip["claimed_weight"], strict=True)]


def _mean(trees: Sequence[Any], factors: Sequence[float]) -> Any:
    """Return the weighted mean of trees, leaf by leaf: of whole numbers the largest, of what is no tensor the first."""
    columns, spec = zip(*(flatten(tree)[0] for tree in trees), strict=True), flatten(trees[0])[1]
    return unflatten(spec, [_mean_leaf(column, factors) for column in columns])


def _mean_leaf(column: Sequence[Any], factors: Sequence[float]) -> Any:
    first = column[0]
    if not isinstance(first, Tensor) or all(torch.equal(first, other) for other in column[1:]):
        return first
    if not first.is_floating_point():
        return torch.stack(list(column)).amax(0)
    total = torch.zeros_like(first, dtype=torch.promote_types(first.dtype, torch.float32))
    for factor, value in zip(factors, column, strict=True):
        if factor:  # what does not count may be no number
            total.add_(value, alpha=factor)
    return (total / sum(factors)).to(first.dtype)
