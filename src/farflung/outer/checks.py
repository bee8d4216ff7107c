# SPDX-License-Identifier: Apache-2.0
"""Checks of an outer loop's arguments, before anything is exchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from farflung.base.checks import (
    check_callable,
    check_number,
    check_protocol,
    check_type,
    check_whole,
    shown,
)
from farflung.base.errors import ConfigError, Unsupported
from farflung.base.sizes import bucket_bytes_for
from farflung.base.words import counted, numbered
from farflung.comm.group import Group, SoloGroup
from farflung.comm.shards import is_partial, is_sharded, meshes, num_parts, sharded_parts
from farflung.comm.torch_group import TorchGroup, mesh_along
from farflung.methods.recipe import Recipe, check_model
from farflung.outer.membership import Membership


def check_arguments(
    model: nn.Module,
    group: Group | None,
    inner: Optimizer | None,
    island: Group | None,
    membership: Membership | None,
    bucket_bytes: int | None,
    clock: Callable[[], float],
) -> None:
    """Raise ConfigError unless an `OuterLoop` can work with these arguments; the error names one."""
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


def check_report(recipe: object) -> None:
    """Raise ConfigError for settings that ask for lines about the rounds, which a plain loop doesn't print."""
    report = getattr(recipe, "report", None)  # which neither a recipe nor its name has
    if report not in (None, "off"):
        raise ConfigError(
            f"is {report!r}, but a plain OuterLoop prints no lines. Leave it out: `loop.stats()` has the "
            "figures, and a function in `loop.listeners` is called with each round.",
            "report",
        )


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


def _check_statistics(model: nn.Module, island: Group) -> None:
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


def default_bucket_bytes(model: nn.Module) -> int:
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
