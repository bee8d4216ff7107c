# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a session share models: settled by the first `Accelerator`, from its arguments or the launcher's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farflung.accelerator import lazy
from farflung.accelerator.session import Layout, Session
from farflung.base.checks import check_type, check_whole, shown
from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.process.mesh import IslandSize, make_mesh, require_replicas, stated_island_size
from farflung.process.world import World

if TYPE_CHECKING:
    from farflung.config.parallelism import ParallelismConfig
    from farflung.config.sharding import FullyShardedDataParallelPlugin


def check_layout(fsdp_plugin: Any, parallelism_config: Any, island_size: Any) -> None:
    """Check the types of the arguments of `Accelerator` that say how ranks share models."""
    if fsdp_plugin is not None:
        wanted = "a FullyShardedDataParallelPlugin(...)"
        check_type("fsdp_plugin", fsdp_plugin, lazy.FullyShardedDataParallelPlugin, wanted)
    if parallelism_config is not None:
        wanted = "a ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)"
        check_type("parallelism_config", parallelism_config, lazy.ParallelismConfig, wanted)
    if island_size is not None and island_size != "host":
        check_whole("island_size", island_size, least=1)


def resolve_layout(
    session: Session,
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
    parallelism_config: ParallelismConfig | None = None,
    island_size: IslandSize | None = None,
    has_outer: bool = False,
) -> Layout:
    """Return the session's layout; where it has none yet, settle it: a collective if rows are of several ranks.

    Raises ConfigError for sizes that don't fit the processes, each other or the session's layout, and for one island
    where an outer loop (`has_outer`) would have nothing to average.
    """
    layout = session.layout or _resolved(session, fsdp_plugin, parallelism_config, island_size)
    _check_same(layout, session.world, fsdp_plugin, parallelism_config, island_size)
    if has_outer:
        require_replicas(layout.mesh)
    if session.layout is None and layout.fsdp is not None and layout.fsdp.cpu_ram_efficient_loading:
        session.announced = _announce_loading()
    session.layout = layout
    return layout


def _announce_loading() -> tuple[str, ...]:
    """Let transformers load weights on rank 0 alone; return the variables that say so and were not set before."""
    unset = [name for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING") if environ.text(name) is None]
    lazy.enable_fsdp_ram_efficient_loading()
    return tuple(unset)


def _resolved(
    session: Session,
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    parallelism_config: ParallelismConfig | None,
    island_size: IslandSize | None,
) -> Layout:
    world = session.world
    if fsdp_plugin is None and environ.flag("ACCELERATE_USE_FSDP"):
        fsdp_plugin = lazy.fsdp_from_environment()
    if parallelism_config is None and environ.flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        parallelism_config = lazy.parallelism_from_environment()
    if fsdp_plugin is None and parallelism_config is not None and parallelism_config.dp_shard_size > 1:
        fsdp_plugin = lazy.FullyShardedDataParallelPlugin()
    islands = stated_island_size(world.local_size, island_size, world.group)
    device_mesh = None
    if parallelism_config is not None:
        parallelism_config.check(world.size)
        device_mesh = parallelism_config.get_device_mesh(world.device.type)
    if fsdp_plugin is None:
        return Layout(make_mesh(world.group, islands or 1, world.device.type), None, parallelism_config)
    if islands is not None and not environ.is_elastic():
        raise ConfigError(
            f"island_size={shown(island_size)} and FSDP were both asked for. The ranks that share one sharded model "
            "are an island: give its size as ParallelismConfig(dp_shard_size=)."
        )
    if parallelism_config is None:
        shards = world.size
    else:
        shards = parallelism_config.dp_shard_size
        if shards == 1 and world.size > 1:
            raise ConfigError(
                f"FSDP was asked for, and ParallelismConfig(dp_replicate_size={parallelism_config.dp_replicate_size}, "
                "dp_shard_size=1), which cuts nothing. Give a dp_shard_size above 1, or leave the plugin out for DDP."
            )
    return Layout(make_mesh(world.group, shards, world.device.type, device_mesh), fsdp_plugin, parallelism_config)


def _check_same(
    settled: Layout,
    world: World,
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    parallelism_config: ParallelismConfig | None,
    island_size: IslandSize | None,
) -> None:
    if parallelism_config is not None:
        parallelism_config.check(world.size)
    pairs = (
        ("fsdp_plugin", fsdp_plugin, settled.fsdp),
        ("parallelism_config", parallelism_config, settled.parallelism),
        ("island_size", island_size, settled.mesh.island.size),
    )
    for name, given, first in pairs:
        if given is not None and given != first and given != "host":
            raise ConfigError(
                f"{name}={shown(given)}, but this process's first Accelerator has {shown(first)}. Make them equal, or "
                "call `AcceleratorState._reset_state()` between two runs."
            )
