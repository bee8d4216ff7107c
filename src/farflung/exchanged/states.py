# SPDX-License-Identifier: Apache-2.0
"""States of outer loops, merged on some ranks into one from which any number of ranks can continue.

local       the mean over the old ranks, weighted by the work that each has done since its last round; values that are
            not finite count only if there are no others
anchor      kept, with its outer optimizer; if each rank has its own anchor, their mean
residuals   of error feedback: their mean, so that the ranks together still owe what they owed
in flight   counts as not sent: it is still in the local weights
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farflung.base.checks import wrong_type
from farflung.base.tree import flatten, unflatten
from farflung.exchanged.structure import check_form, check_state


@dataclass(frozen=True)
class MergedState:
    """One state for all new ranks."""

    weights: dict[str, Tensor]  # local weights and buffers, by name
    # For `OuterLoop.load_state_dict` on each of the new ranks. None for a recipe whose anchors have moved by what is
    # still in flight (`eager_diloco`): load `weights` into the model on each of them, and make a new loop over it.
    state: dict[str, Any] | None


def merge_states(states: Sequence[dict[str, Any]]) -> MergedState:
    """Merge the states of all old ranks into one for any number of new ranks, as when a machine has left or joined.

    Load the same `state` on each new rank, into a loop with the same recipe over the same model. If it is None, load
    `weights` into the model there instead, and make the loop after that. An `Accelerator` does this by itself.

    Args:
        states: what `OuterLoop.state_dict()` returned on each old rank, in rank order. Of a model that was sharded over
            islands: on each old rank that held the same shards as the new one does.

    Raises:
        ConfigError: there is no state, one of them is not that of an outer loop, or they hold different shards.
    """
    if not isinstance(states, (list, tuple)) or not states:
        raise wrong_type(
            "merge_states: states", states, "a list of what state_dict() returned on each of the old ranks"
        )
    for state in states:
        check_form("merge_states", state)
        check_state(state, states[0])
    columns = list(zip(*(state["rounds"]["fragments"] for state in states), strict=True))
    fragments = [_merged_fragment(column, number, states) for number, column in enumerate(columns)]
    weights = {name: value for fragment in fragments for name, value in fragment["local"].items()}
    if any("sent" in (fragment["agreed"] or {}) for fragment in fragments):
        return MergedState(weights, None)
    furthest = max(states, key=lambda state: state["position"])
    trained = _merged_turns([state["rounds"]["trained"] for state in states if "trained" in state["rounds"]])
    wishes = [one.get("wish", {}) for state in states for one in state["rounds"]["open"].values()]
    trained["names"] = sorted({*trained["names"], *(name for wish in wishes for name in wish.get("names", ()))})
    rounds = {**furthest["rounds"], "open": {}, "fragments": fragments, "trained": trained}
    weights |= trained["rest"]
    return MergedState(weights, {**furthest, "rounds": rounds})


def _merged_turns(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge what each rank has trained that was not exchanged, or is not any more; see `TrainedSet.state_dict`."""
    names = sorted({name for state in states for name in state["rest"]})
    columns = {name: [state["rest"][name] for state in states if name in state["rest"]] for name in names}
    return {
        "names": sorted({name for state in states for name in state["names"]}),
        "rest": {name: _mean(column, [1.0] * len(column)) for name, column in columns.items()},
        "before": {name: value for state in states for name, value in state["before"].items()},
    }


def _merged_fragment(column: Sequence[dict[str, Any]], number: int, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    pending = [
        _all_pending(part, state["rounds"]["open"].get(number)) for part, state in zip(column, states, strict=True)
    ]
    sound = [all(bool(torch.isfinite(one).all()) for one in part["local"].values()) for part in column]
    counts = [float(one or not any(sound)) for one in sound]
    most = max(done[0] * count for done, count in zip(pending, counts, strict=True))
    by_work = [done[0] / most * count if most else count for done, count in zip(pending, counts, strict=True)]
    agreed = None if column[0]["agreed"] is None else _mean([part["agreed"] for part in column], [1.0] * len(column))
    kept = [part["kept"] for part in column if "kept" in part]
    return {
        "local": _mean([part["local"] for part in column], by_work),
        "agreed": agreed,
        "pending_weight": [sum(done) / len(pending) for done in zip(*pending, strict=True)],
        "history": {"seen": {}},  # its ranks are no longer these
        "num_rounds": max(part["num_rounds"] for part in column),
        "num_averaged": max(part.get("num_averaged", 0) for part in column),
        "digest": -1,
        **({"kept": _mean(kept, [1.0] * len(kept))} if kept else {}),
    }


def _all_pending(part: dict[str, Any], open_round: dict[str, Any] | None) -> list[float]:
    """Return the work that a rank has done since its last round, including work that it had sent."""
    if open_round is None:
        return list(part["pending_weight"])
    return [done + sent for done, sent in zip(part["pending_weight"], open_round["claimed_weight"], strict=True)]


def _mean(trees: Sequence[Any], factors: Sequence[float]) -> Any:
    """Return the weighted mean of trees, leaf by leaf: the maximum of integers, the first of what is not a tensor."""
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
        if factor:  # what does not count need not be finite
            total.add_(value, alpha=factor)
    return (total / sum(factors)).to(first.dtype)
