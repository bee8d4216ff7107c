# SPDX-License-Identifier: Apache-2.0
"""What of a run goes into a checkpoint: whole files, one rank's own files, and shards that ranks write together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from farflung.accelerator import gradients, lazy, states
from farflung.accelerator.run import Run
from farflung.base.errors import ConfigError
from farflung.base.tree import leaves_of
from farflung.checkpoint import layout, rng
from farflung.checkpoint.entries import Entry
from farflung.comm.shards import is_sharded, model_has_dtensor

if TYPE_CHECKING:
    from farflung.checkpoint.sharded import ShardPlanner


def shared_entries(run: Run, whole: WholeStates, safe: bool) -> list[Entry]:
    """Return what is the same on all ranks, in the files in which Accelerate keeps it.

    Args:
        whole: what is sharded and was gathered; the rest of it gets folders of its own, by `planners`.
    """
    registry = run.registry
    parts = [Entry(layout.model(k, safe), state, safe, f"model {k}") for k, state in enumerate(whole.models)]
    parts += [
        Entry(layout.optimizer(k), whole.optimizers.get(k) or one.state_dict(), origin=type(one.optimizer).__name__)
        for k, one in enumerate(registry.optimizers)
        if k in whole.optimizers or not states.has_shards(one)
    ]
    parts += [
        Entry(layout.scheduler(k), one.state_dict(), origin=type(one.scheduler).__name__)
        for k, one in enumerate(registry.schedulers)
    ]
    if run.precision.scaler is not None:
        parts.append(Entry(layout.SCALER, run.precision.state_dict(run.bare_optimizers)["after_update"]))
    parts += [
        Entry(layout.custom(k), _state_of(one), origin=f"the registered {type(one).__name__}")
        for k, one in enumerate(run.custom)
    ]
    return parts


def _state_of(registered: Any) -> Any:
    state = registered.state_dict()
    if any(isinstance(leaf, Tensor) and is_sharded(leaf) for leaf in leaves_of(state)):
        raise ConfigError(
            f"The state of the registered {type(registered).__name__} holds sharded tensors, of which its file would "
            "have one rank's part. Let it keep whole ones (tensor.full_tensor(), called on all ranks), or keep a copy "
            "of the weights in a model that is prepared too."
        )
    return state


def check_optimizers(run: Run) -> None:
    """Raise ConfigError where a sharded optimizer keeps something that can't be saved for all ranks."""
    for one in run.bare_optimizers:
        states.check_optimizer(run.bare_models, one)


@dataclass
class WholeStates:
    """States that are written as whole files.

    Attributes:
        gathered: those of sharded models, by the model's place.
        models: all of models, in order.
        optimizers: those of sharded optimizers, by the optimizer's place.
    """

    gathered: dict[int, dict[str, Any]] = field(default_factory=dict)
    models: list[dict[str, Any]] = field(default_factory=list)
    optimizers: dict[int, dict[str, Any]] = field(default_factory=dict)


def gathered(run: Run, writes: Callable[[str], bool]) -> WholeStates:
    """Gather what is sharded: a collective, where something is.

    Args:
        writes: whether this rank writes the file of a name.
    """
    whole = WholeStates()
    for k, model in enumerate(run.bare_models):
        if model_has_dtensor(model):
            state = states.model_shards(model)
            whole.gathered[k] = states.gathered_model(model, state, writes(layout.model(k)))
    for k, one in enumerate(run.registry.optimizers):
        if states.has_shards(one):
            whole.optimizers[k] = states.gathered_optimizer(one, writes(layout.optimizer(k)))
    return whole


def planners(run: Run, leader: int) -> list[ShardPlanner]:
    """Return this rank's shards of models and optimizers, for the folders in which Accelerate keeps them."""
    spread = run.spread
    if spread is None:
        return []
    leads = run.world.rank == leader
    takes_part = not run.replicas_differ or leader in spread[0]
    models = {
        layout.model_shards(k): {"model": states.model_shards(model)}
        for k, model in enumerate(run.bare_models)
        if model_has_dtensor(model)
    }
    optimizers = {
        layout.optimizer_shards(k): states.for_shards(
            states.by_name(one.state_dict(), states.parameter_names(run.bare_models, one))
        )
        for k, one in enumerate(run.registry.optimizers)
        if states.has_shards(one)
    }
    return [lazy.ShardPlanner(name, state, leads, takes_part) for name, state in (models | optimizers).items()]


def own_entries(run: Run, is_leader: bool) -> list[Entry]:
    """Return what only this rank knows."""
    rank, registry = run.world.rank, run.registry
    state = {
        "rank": rank,
        "world_size": run.world.size,
        "loop": run.loop.state_dict(run.modules),
        **gradients.state_of(run),
        "optimizers": [{"is_own": one.is_own, "was_skipped": one.step_was_skipped} for one in registry.optimizers],
        "spread": run.spread,
        "precision": run.precision.state_dict(run.bare_optimizers),
        "loaders": [loader.state_dict() for loader in registry.loaders],
        "buffers": [] if is_leader else [states.saved_buffers(model) for model in registry.models],
        "asks_for_buffers": [getattr(model, "require_forward_param_sync", None) for model in registry.models],
    }
    parts = [
        Entry(layout.random_states(rank), {"step": run.loop.step, **rng.read()}),
        Entry(layout.loop_state(rank), state, origin="the training loop"),
    ]
    loops = [*(loop.state_dict() for loop in run.outers.live), *run.outers.waiting]
    differing: dict[str, Any] = {}
    if run.replicas_differ and not is_leader:
        differing = {
            "optimizers": [states.local_optimizer(one) if one.is_own else None for one in registry.optimizers],
            "schedulers": [one.state_dict() for one in registry.schedulers],
        }
    if loops or differing:
        parts.append(Entry(layout.outer_state(rank), {"loops": loops, **differing}, origin="the outer loop"))
    return parts
