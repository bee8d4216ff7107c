# SPDX-License-Identifier: Apache-2.0
"""An outer loop's arguments: recipes by name, `OuterConfig`, and checks of all of them before anything is exchanged."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

import farflung.outer.recipes as recipes
from farflung.base.checks import (
    check_callable,
    check_number,
    check_protocol,
    check_type,
    check_whole,
    check_word,
    shown,
    wrong_type,
)
from farflung.base.errors import ConfigError, Unsupported
from farflung.base.sizes import bucket_bytes_for
from farflung.base.words import counted, numbered
from farflung.comm.group import Group, SoloGroup
from farflung.comm.shards import is_partial, is_sharded, meshes, num_parts, sharded_parts
from farflung.comm.torch_group import TorchGroup, mesh_along
from farflung.config.outer import AUTO, MACHINE, OuterSettings
from farflung.outer.inner import AverageState, Inner, KeepState, ResetState
from farflung.outer.membership import Membership
from farflung.outer.recipe import Recipe, too_few as too_few
from farflung.outer.robustness import robust
from farflung.outer.schedule import TrialSchedule

_STATE = ("description", "position", "synced", "began", "seconds", "lr", "stats", "rounds")


def _undecided() -> Recipe:
    """Return the recipe of a trial: its anchor is what all share when the recipe that was chosen begins."""
    return Recipe(schedule=TrialSchedule(), optimizer=partial(torch.optim.SGD, lr=1.0))


MAKERS: Mapping[str, Callable[..., Recipe]] = {
    AUTO: _undecided,
    **{name: getattr(recipes, name) for name in recipes.__all__},
}
_INNER: Mapping[str, Callable[[], Inner]] = {"keep": KeepState, "reset": ResetState, "average": AverageState}


class OuterConfig(OuterSettings):
    """An outer loop by the names of its recipe and options: `Accelerator(outer=OuterConfig("diloco", every=32))`.

    Args:
        recipe: the name of a recipe: that of its function in `farflung.outer`.
        options: the arguments of that function as plain values, and those below. What is left out, or None, is left to
            the recipe. `codec` is one of `none` (as it is), `bf16`, `fp16`, `int8`, `int4`, `fp8`, `e3m0` and `topk`.
            `levels` of `hierarchical` may be a text, `4:machine,64:all`, and may say `machine` for the ranks of a
            machine: `{4: "machine", 64: None}`.
        weigh_by: weight replicas by their `steps`, by the `items` in them (those passed to `backward(num_items=)`, or
            else the samples of their batches), or by `items_squared`, the squares of each step's items.
        anchor_on_cpu: keep the anchor and the outer optimizer's state in host memory.
        inner: what a round does with the inner optimizer's state: `keep` (each rank its own), `reset`, `average`.
        bucket_bytes: bucket size; see `OuterLoop`. Larger buckets pay off on fast links with high latency.
        same_data: replicas may see the same batches. Otherwise the run stops if their changes are equal to the last bit
            in their first rounds.
        robust: keep a faulty replica from spoiling the weights: `trimmed` or `clip`, see `farflung.outer.robust`.
        steps: optimizer steps of the whole run, if known: fewer than one round are refused, and fewer than ten rounds
            get a warning.
        report: when the main process prints a line about the rounds on stderr: `round` (after each), a number of
            seconds, or `off`; `auto`, the default, is every 5 seconds on a terminal, else each round.

    An option can be read as an attribute, `config.every`; it is None if it is left to the recipe.

    Raises:
        ConfigError: an unknown recipe, a missing or unknown option, or what the recipe refuses.
    """

    def __init__(self, recipe: str, **options: Any) -> None:
        super().__init__(recipe, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the recipe warns when it is used
            recipe_of(self, local_size=2)


def named_outer(name: str, outer: OuterConfig | str) -> OuterConfig:
    """Return `outer`, or the settings of the recipe that it names; `name` is for the error."""
    if isinstance(outer, str):
        check_word(name, outer, MAKERS)
        return OuterConfig(outer)
    if not isinstance(outer, OuterConfig):
        called = getattr(outer, "__name__", None)
        example = called if called in MAKERS else "diloco"
        raise wrong_type(name, outer, f"an OuterConfig({example!r}, every=32) or a recipe's name, such as {example!r}")
    return outer


def chosen_recipe(recipe: Recipe | OuterConfig | str, local_size: int = 1) -> Recipe:
    """Return `recipe`, or the one that a name or settings stand for, on a machine with `local_size` ranks."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, (OuterConfig, str)):
        return recipe_of(named_outer("recipe", recipe), local_size)
    called = getattr(recipe, "__name__", None)
    example = f"{called if called in MAKERS else 'diloco'}(every=32)"
    raise wrong_type("recipe", recipe, f"a recipe, such as {example}, or the name of one, such as 'diloco'")


def recipe_of(config: OuterSettings, local_size: int) -> Recipe:
    """Return the recipe that `config` names, with its options, on a machine with `local_size` ranks."""
    options = config.given()
    options.pop("report", None)
    steps, rule = options.pop("steps", None), options.pop("robust", None)
    if "levels" in options:
        # A machine with one rank has no level of its own.
        levels = {every: size for every, size in options["levels"].items() if (size, local_size) != (MACHINE, 1)}
        options["levels"] = {every: local_size if size == MACHINE else size for every, size in levels.items()}
    names = ("weigh_by", "anchor_on_cpu", "inner", "bucket_bytes", "same_data")
    parts = {name: options.pop(name) for name in names if name in options}
    if "inner" in parts:
        parts["inner"] = _INNER[parts["inner"]]()
    make = MAKERS[config.recipe]
    recipe = make(**options)
    if isinstance(recipe.schedule, TrialSchedule):
        parts["schedule"] = TrialSchedule(steps)
    elif steps is not None:
        rounds = _rounds_in(steps, recipe)
        if rounds is not None and "rounds" in signature(make).parameters:
            recipe = make(**{"rounds": rounds} | options)
    recipe = replace(recipe, **parts) if parts else recipe
    return recipe if rule is None else robust(recipe, rule)


def _rounds_in(steps: int, recipe: Recipe) -> int | None:
    """Return how many rounds so many steps are, None if that depends on a clock; warn if they are few, refuse none."""
    check_whole("steps", steps, least=1)
    every = recipe.every
    if every is None:
        return None
    if steps - recipe.warmup < every:
        warm = f" after a warm-up of {recipe.warmup}" if recipe.warmup else ""
        raise ConfigError(
            f"is {steps}, and the first round comes after {every}{warm}. Choose a smaller every.", "steps"
        )
    said = recipe.few_rounds(steps)
    if said:
        warnings.warn(said, stacklevel=4)
    return (steps - recipe.warmup) // every


def check_model(model: object) -> None:
    """Raise WrongType unless `model` is a module; a recipe in its place means that the two were swapped."""
    if isinstance(model, (Recipe, OuterConfig)):
        raise wrong_type("model", model, "an nn.Module: the model comes before the recipe")
    check_type("model", model, nn.Module, "an nn.Module")


def checked(
    model: nn.Module,
    recipe: Recipe | OuterConfig | str,
    group: Group | None,
    inner: Optimizer | None,
    island: Group | None,
    membership: Membership | None,
    bucket_bytes: int | None,
    clock: Callable[[], float],
) -> tuple[Recipe, int]:
    """Check the arguments of an `OuterLoop`; ConfigError names one that can't work. Returns recipe and bucket size."""
    check_model(model)
    if not model.state_dict():
        raise ConfigError(
            f"model is {shown(model)}, which has no parameters and no buffers: there is nothing to agree on."
        )
    for name, ranks, usual in (("group", group, "all ranks"), ("island", island, "none")):
        if ranks is not None:
            wanted = f"a group, such as TorchGroup() of farflung.comm.group; leave it out for {usual}"
            check_protocol(name, ranks, ("rank", "size", "all_reduce", "supports"), wanted)
    if membership is not None:
        needed = ("is_fixed", "most", "island", "enter", "lost")
        check_protocol("membership", membership, needed, "a membership, as farflung.outer.membership describes it")
        if group is not None or island is not None:
            raise ConfigError("A membership says who takes part, so OuterLoop takes no group and no island with it.")
        island = membership.island
    island = island or SoloGroup()
    _check_layout(model, island)
    _check_statistics(model, island)
    if inner is not None:
        check_type("inner", inner, Optimizer, "the torch optimizer that trains the model")
    if bucket_bytes is not None:
        check_whole("bucket_bytes", bucket_bytes, least=1)
    check_callable("clock", clock, "time.perf_counter")
    recipe = chosen_recipe(recipe)
    return recipe, bucket_bytes or recipe.bucket_bytes or _bucket_bytes_of(model)


def groups_of(mesh: object, outer: object, is_alone: bool) -> tuple[Group, Group | None]:
    """Return the ranks of `mesh` along its dimension `outer`, and those along all others: see `OuterLoop`.

    Args:
        is_alone: the loop was given no other ranks.
    """
    wanted = "the DeviceMesh whose dimension outer= has the replicas"
    check_type("mesh", mesh, DeviceMesh, wanted)
    assert isinstance(mesh, DeviceMesh)
    names = mesh.mesh_dim_names or ()
    if outer not in names:
        raise ConfigError(
            f"outer is {outer!r}, which is no dimension of mesh: it has {list(names)}. Name one of these."
        )
    if not is_alone:
        raise ConfigError("mesh= says which ranks are replicas and islands: leave out group, island and membership.")
    inner = [name for name in names if name != outer]
    return TorchGroup(mesh.get_group(str(outer))), TorchGroup(mesh_along(mesh, inner).get_group()) if inner else None


def check_attached(optimizers: Sequence[Optimizer], model: nn.Module, recipe: Recipe) -> None:
    """Raise ConfigError unless steps of `optimizers` can be counted as those of an outer loop over `model`."""
    mine = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        check_type("attach: optimizer", optimizer, Optimizer, "the torch optimizer that trains the model")
        if not any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            raise ConfigError("attach: this optimizer has no parameter of the outer loop's model.")
    if len(set(map(id, optimizers))) < len(optimizers):
        raise ConfigError("attach: the same optimizer was given twice; each of them once is enough.")
    if recipe.weighs_items:
        raise ConfigError(
            "attach: the recipe weights replicas by items, which an optimizer doesn't count. Call step(items=n)."
        )
    check_inner("attach", recipe, len(optimizers))


def check_inner(call: str, recipe: Recipe, num_optimizers: int) -> None:
    """Raise ConfigError if the recipe synchronizes the state of one inner optimizer, and a model has several."""
    if num_optimizers > 1 and recipe.inner.needs_optimizer:
        raise ConfigError(
            f"{call}: {recipe.inner} synchronizes the state of one optimizer, and {num_optimizers} train this model. "
            "Use KeepState (inner='keep'), or one optimizer for all parameters."
        )


def _check_layout(model: nn.Module, island: Group) -> None:
    """Raise an error unless the parts of all that is trained are within the island, and its gradients come together."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    spread = [mesh.mesh.flatten().tolist() for mesh in meshes(trained.values())]
    if isinstance(island, TorchGroup):
        odd = [ranks for ranks in spread if not {*ranks} <= {*dist.get_process_group_ranks(island.pg)}]
    else:
        odd = [ranks for ranks in spread if island.size % len(ranks)]
    if odd:
        raise ConfigError(
            f"The model is sharded over {numbered('rank', odd[0])}, which train one replica together: pass them as "
            f"OuterLoop(island=), which has {counted(island.size, 'rank')} now or others, and the ranks of all islands "
            "that hold the same shards as group=; or their mesh, as OuterLoop(mesh=, outer=) with the name of the "
            "dimension of replicas. An Accelerator does so, by dp_replicate_size and dp_shard_size."
        )
    summands = [name for name, parameter in trained.items() if is_partial(parameter)]
    if summands:
        raise Unsupported(
            f"{summands[0]} is a DTensor of summands (Partial), which nothing trains as one tensor. Redistribute it to "
            "Replicate() or Shard(dim)."
        )
    whole = [name for name, parameter in trained.items() if not is_sharded(parameter)]
    if whole and sharded_parts(model.modules()):  # whose ranks have different data
        raise Unsupported(
            f"{whole[0]} is not sharded, though other parameters that are trained are, so nothing averages its "
            "gradients within an island. Shard it too (fully_shard of the whole model), or freeze it."
        )


def _check_statistics(model: nn.Module, island: Group | None) -> None:
    """Raise Unsupported for a SyncBatchNorm over other ranks than the island's: it sends in each forward pass."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    own = island.pg if isinstance(island, TorchGroup) else None
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and (module.process_group is None or module.process_group is not own):
            raise Unsupported(
                f"{name} is a SyncBatchNorm, which averages statistics over other ranks in each forward pass, so "
                "replicas could not train independently. Use BatchNorm, whose statistics each round averages, or give "
                "convert_sync_batchnorm the process group of the ranks that train this replica."
            )


def _bucket_bytes_of(model: nn.Module) -> int:
    """Return the bucket size, from the values that this rank trains, if neither the loop nor the recipe sets one."""
    trained = [p for p in model.parameters() if p.requires_grad and not is_lazy(p)]
    return bucket_bytes_for(sum(4 * p.numel() // num_parts(p) for p in trained))


def checked_items(items: object, done: bool, recipe: Recipe) -> float:
    """Return how many items a step had, given as a number or a one-element tensor; raise ConfigError for others."""
    if not (isinstance(items, Tensor) and items.numel() == 1):
        check_number("items", items, least=0)
    count = float(cast(float, items))
    if recipe.weighs_items and done and not count > 0:
        raise ConfigError(f"items is {count!r}; the recipe weighs by items, so each step done must say how many.")
    return count


def check_form(where: str, state: object) -> None:
    """Raise ConfigError unless `state` is that of an outer loop."""
    if not isinstance(state, Mapping):
        raise wrong_type(where, state, "what OuterLoop.state_dict() returned")
    missing = [name for name in _STATE if name not in state]
    if missing:
        raise ConfigError(
            f"{where}: {shown(list(state)) if state else '{}'} is not the state of an outer loop: {', '.join(missing)} "
            "is missing. Give it what OuterLoop.state_dict() returned."
        )


def check_state(state: Mapping[str, Any], like: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the state of a loop has the same description and shards as `like`."""
    saved, here = state["description"], like["description"]
    if saved != here:
        pairs = zip(state["parts"], like["parts"], strict=False) if "parts" in state else [(saved, here)]
        odd = [f"{theirs} (here {mine})" for theirs, mine in pairs if theirs != mine]
        raise ConfigError(f"This state was saved by another outer loop, with {', '.join(odd)}. Give both the same.")
    old, new = state.get("shard", 0), like.get("shard", 0)
    if old != new:
        raise ConfigError(
            f"This state was saved by rank {old} of an island, and this is rank {new} of one, with other shards. "
            "Load on each rank what it saved."
        )
