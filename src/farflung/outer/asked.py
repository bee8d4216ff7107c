# SPDX-License-Identifier: Apache-2.0
"""Checks of an outer loop's arguments, made before anything is exchanged."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.base.checks import (
    check_callable,
    check_number,
    check_protocol,
    check_type,
    check_whole,
    shown,
    wrong_type,
)
from farflung.base.errors import ConfigError, Unsupported
from farflung.base.words import counted, numbered
from farflung.comm.group import Group, SoloGroup
from farflung.comm.shards import is_sharded, meshes
from farflung.comm.torch_group import TorchGroup
from farflung.outer.named import OuterConfig, chosen_recipe
from farflung.outer.recipe import Recipe

_PARTS = re.compile(r"[;,] (?![^(]*\))")  # of a description: commas that are not within parentheses
_STATE = ("description", "position", "synced", "began", "seconds", "lr", "stats", "rounds")


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
    bucket_bytes: int | None,
    clock: Callable[[], float],
) -> Recipe:
    """Check the arguments of an `OuterLoop`; return its recipe.

    Raises:
        ConfigError: an argument that can't work; the message names it.
    """
    check_model(model)
    if not model.state_dict():
        raise ConfigError(
            f"model is {shown(model)}, which has no parameters and no buffers: there is nothing to agree on."
        )
    wanted = "a group, such as TorchGroup() of farflung.comm.group; leave it out for all ranks"
    if group is not None:
        check_protocol("group", group, ("rank", "size", "all_reduce", "supports"), wanted)
    if island is not None:
        check_protocol(
            "island", island, ("rank", "size", "all_reduce", "supports"), wanted.replace("all ranks", "none")
        )
    _check_shards_are_of_island(model, island or SoloGroup())
    _check_statistics(model, island)
    if inner is not None:
        check_type("inner", inner, Optimizer, "the torch optimizer that trains the model")
    if bucket_bytes is not None:
        check_whole("bucket_bytes", bucket_bytes, least=1)
    check_callable("clock", clock, "time.perf_counter")
    return chosen_recipe(recipe)


def _check_shards_are_of_island(model: nn.Module, island: Group) -> None:
    """Raise an error unless all that is trained is sharded over the island, or nothing of it is sharded."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    spread = [mesh.mesh.flatten().tolist() for mesh in meshes(trained.values())]
    if isinstance(island, TorchGroup):
        odd = [ranks for ranks in spread if ranks != dist.get_process_group_ranks(island.pg)]
    else:
        odd = [ranks for ranks in spread if len(ranks) != island.size]
    if odd:
        raise ConfigError(
            f"The model is sharded over {numbered('rank', odd[0])}, which train one replica together: pass them as "
            f"OuterLoop(island=), which has {counted(island.size, 'rank')} now or others, and the ranks of all islands "
            "that hold the same shards as group=. An Accelerator does so, by dp_replicate_size and dp_shard_size."
        )
    whole = [name for name, parameter in trained.items() if not is_sharded(parameter)]
    if spread and whole and island.size > 1:
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


def one_number(name: str, value: object) -> float:
    """Return a number, or a tensor with one element, as a float."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    check_number(name, value, least=0)
    return float(cast(float, value))


def check_same(saved: str, here: str) -> None:
    """Raise ConfigError unless two descriptions of outer loops have the same model and the same recipe."""
    if saved != here:
        pairs = zip(_PARTS.split(saved), _PARTS.split(here), strict=False)
        odd = [f"{theirs} (here {mine})" for theirs, mine in pairs if theirs != mine]
        raise ConfigError(f"This state was saved by another outer loop, with {', '.join(odd)}. Give both the same.")


def check_shard(saved: int, here: int) -> None:
    """Raise ConfigError unless a state was saved by the same rank of an island, which holds the same shards."""
    if saved != here:
        raise ConfigError(
            f"This state was saved by rank {saved} of an island, and this is rank {here} of one, with other shards. "
            "Load on each rank what it saved."
        )


def check_state(where: str, state: object) -> None:
    """Raise ConfigError unless `state` has the keys of an outer loop's state dict."""
    if not isinstance(state, Mapping):
        raise wrong_type(where, state, "what OuterLoop.state_dict() returned")
    missing = [name for name in _STATE if name not in state]
    if missing:
        raise ConfigError(
            f"{where}: {shown(list(state)) if state else '{}'} is not the state of an outer loop: {', '.join(missing)} "
            "is missing. Give it what OuterLoop.state_dict() returned."
        )
