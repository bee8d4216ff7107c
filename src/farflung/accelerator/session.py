# SPDX-License-Identifier: Apache-2.0
"""The settings that the first `Accelerator` fixes for its process: with the world, all of Farflung's global state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from farflung.base.checks import check_optional, check_whole, shown
from farflung.base.enums import DistributedType
from farflung.base.errors import ConfigError, StateError, StateReset, Unsupported
from farflung.comm.exchange import Exchange
from farflung.comm.preemption import PreemptionVote
from farflung.comm.torch_group import TorchGroup
from farflung.config import environ
from farflung.config.compile import TorchDynamoPlugin
from farflung.config.handlers import GradientAccumulationPlugin
from farflung.config.parallelism import ParallelismConfig
from farflung.config.sharding import FullyShardedDataParallelPlugin, enable_fsdp_ram_efficient_loading
from farflung.loop.state import ActiveLoaders, LoopState
from farflung.loop.uneven import UnevenDataCheck
from farflung.process.mesh import IslandSize, Mesh, make_mesh, make_parallel_mesh, require_replicas, stated_island_size
from farflung.process.world import World, note_accelerator

if TYPE_CHECKING:
    from farflung.accelerator.controller import OuterController


@dataclass(frozen=True)
class Layout:
    """How the ranks share models.

    Attributes:
        mesh: which ranks average gradients in every step, and which have the same values.
        fsdp: how models are sharded over a row of it; None: they are not.
        parallelism: the axes that the script or the launcher asked for; None: neither did.
    """

    mesh: Mesh
    fsdp: FullyShardedDataParallelPlugin | None = None
    parallelism: ParallelismConfig | None = None
    asked: FullyShardedDataParallelPlugin | None = field(init=False)  # `fsdp` before a strategy set its policies

    def __post_init__(self) -> None:
        object.__setattr__(self, "asked", copy(self.fsdp))

    @property
    def place(self) -> dict[str, int]:
        """This rank's index within its row along each axis of it."""
        tp_size, cp_size = (self.parallelism.tp_size, self.parallelism.cp_size) if self.parallelism else (1, 1)
        rest, tp = divmod(self.mesh.island.rank, tp_size)
        return {"dp_shard": rest // cp_size, "cp": rest % cp_size, "tp": tp}


@dataclass
class Session:
    """The settings that all Accelerators of a process share.

    Attributes:
        asked_precision, mixed_precision: as given, and as it is: a recipe for fp8 may ask for that by itself.
        plugin, loop: how gradients are accumulated, and where that stands; an Accelerator that asks for another
            accumulation gets a loop of its own, which sees the same loaders. `GradientState` shows the latest.
        first: plugin and loop of the first Accelerator, if the latest has others; it alone keeps that loop.
        compiling: how the latest Accelerator compiles models; None: as by default.
        layout: how ranks share models; None: no Accelerator has settled that.
        named_kind: the value that a script has set `state.distributed_type` to. How ranks train stays the same.
        announced: environment variables that tell transformers of it, to be unset with the session.
        vote: where the first Accelerator saves and ends the run at a scheduler's signal; None: nowhere.
        controllers: of the Accelerators, as long as they exist; `flushed` flushes their outer loops.
    """

    world: World
    asked_precision: str
    mixed_precision: str
    plugin: GradientAccumulationPlugin
    loop: LoopState
    compiling: TorchDynamoPlugin | None = None
    first: tuple[GradientAccumulationPlugin, ReferenceType[LoopState]] | None = None
    layout: Layout | None = None
    named_kind: DistributedType | None = None
    announced: tuple[str, ...] = ()
    vote: PreemptionVote | None = None
    controllers: WeakKeyDictionary[OuterController, None] = field(default_factory=WeakKeyDictionary)

    def accumulate_as_first(self) -> None:
        """Return to the accumulation and the loop of the first Accelerator."""
        if self.first is not None:
            (self.plugin, loop), under_way = self.first, self.loop.under_way
            self.loop, self.first = loop() or new_loop(self.plugin, self.world, under_way), None

    def accumulate(self, plugin: GradientAccumulationPlugin) -> None:
        """Accumulate gradients as `plugin` says from now on, in the loop that is open."""
        plugin.check()
        self.plugin, self.loop.num_steps = copy(plugin), plugin.num_steps or 1
        self.loop.sync_with_dataloader, self.loop.sync_each_batch = plugin.sync_with_dataloader, plugin.sync_each_batch


_session: Session | None = None


def current_session() -> Session | None:
    """Return the open session, or None."""
    return _session


def opened_session() -> Session:
    """Return the open session, or raise StateError."""
    if _session is None:
        raise StateError("No Accelerator has been created in this process yet. Create one first: `Accelerator()`.")
    return _session


def open_session(
    world: World,
    mixed_precision: str | None,
    plugin: GradientAccumulationPlugin | None,
    compiling: TorchDynamoPlugin | None = None,
) -> Session:
    """Open the session with these settings, or return the open one, which must have the same precision (None: any)."""
    global _session
    if _session is None or _session.world is not world:  # a session does not outlive its world
        unset_announced()
        chosen = plugin or GradientAccumulationPlugin(num_steps=1)
        precision = mixed_precision or environ.text("ACCELERATE_MIXED_PRECISION") or "no"
        _session = Session(world, precision, precision, chosen, new_loop(chosen, world), compiling)
        return _session
    if mixed_precision is not None and mixed_precision != _session.asked_precision:
        raise ConfigError(
            f"mixed_precision={mixed_precision!r}, but this process's first Accelerator has "
            f"{_session.asked_precision!r}. Make them equal, or call `AcceleratorState._reset_state()` between two "
            "runs."
        )
    _session.compiling = compiling or _session.compiling
    if plugin is not None and plugin != _session.plugin:
        if _session.layout is not None:  # an Accelerator has the loop that is open
            _session.first = _session.first or (_session.plugin, ref(_session.loop))
        _session.plugin = plugin
        _session.loop = new_loop(plugin, _session.world, _session.loop.under_way)
    return _session


def check_layout(fsdp_plugin: Any, parallelism_config: Any, island_size: Any) -> None:
    """Check the types of the arguments of `Accelerator` that say how ranks share models."""
    wanted = "a FullyShardedDataParallelPlugin(...)"
    check_optional("fsdp_plugin", fsdp_plugin, FullyShardedDataParallelPlugin, wanted)
    wanted = "a ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)"
    check_optional("parallelism_config", parallelism_config, ParallelismConfig, wanted)
    if island_size is not None and island_size != "host":
        check_whole("island_size", island_size, least=1)


def resolve_layout(
    session: Session,
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
    parallelism_config: ParallelismConfig | None = None,
    island_size: IslandSize | None = None,
    has_outer: bool = False,
) -> Layout:
    """Return the session's layout; if it has none yet, settle it: a collective if rows are of several ranks.

    Raises ConfigError for sizes that don't fit the processes, each other or the session's layout, and for one island
    if an outer loop (`has_outer`) would have nothing to average.
    """
    layout = session.layout or _resolved(session, fsdp_plugin, parallelism_config, island_size)
    if parallelism_config is not None:
        parallelism_config.check(session.world.size)
    pairs = (
        ("fsdp_plugin", None if fsdp_plugin is layout.fsdp else fsdp_plugin, layout.asked),
        ("parallelism_config", parallelism_config, layout.parallelism),
        ("island_size", island_size, layout.mesh.island.size),
    )
    for name, given, first in pairs:
        if given is not None and given != first and given != "host":
            raise ConfigError(
                f"{name}={shown(given)}, but this process's first Accelerator has {shown(first)}. Make them equal, or "
                "call `AcceleratorState._reset_state()` between two runs."
            )
    if has_outer:
        require_replicas(layout.mesh, session.world.place)
    if session.layout is None and layout.fsdp is not None and layout.fsdp.cpu_ram_efficient_loading:
        # transformers loads weights on rank 0 alone then; variables that were not set before go with the session.
        names = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
        session.announced = tuple(name for name in names if environ.text(name) is None)
        enable_fsdp_ram_efficient_loading()
    session.layout = layout
    note_accelerator()
    return layout


def _resolved(
    session: Session,
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    parallelism_config: ParallelismConfig | None,
    island_size: IslandSize | None,
) -> Layout:
    world = session.world
    if parallelism_config is None and environ.flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        parallelism_config = ParallelismConfig()
    is_cut = parallelism_config is not None and parallelism_config.dp_shard_size > 1
    if fsdp_plugin is None and (is_cut or environ.flag("ACCELERATE_USE_FSDP")):
        fsdp_plugin = FullyShardedDataParallelPlugin()
    islands = stated_island_size(world.local_size, island_size, world.group, world.place)
    device_mesh = None
    if parallelism_config is not None:
        parallelism_config.check(world.size)
        device_mesh = parallelism_config.get_device_mesh(world.device.type)
    is_parallel = parallelism_config is not None and bool(parallelism_config.non_dp_dim_names)
    if is_parallel and (islands is not None or world.place.member is not None):
        raise Unsupported(
            "ParallelismConfig(tp_size=, cp_size=) goes with neither island_size nor --elastic. If replicas come and "
            "go, use a plain loop, with the membership of farflung.elastic."
        )
    if fsdp_plugin is None and not is_parallel:
        return Layout(make_mesh(world.group, islands or 1, world.device.type), None, parallelism_config)
    if fsdp_plugin is not None and islands is not None and world.place.member is None:
        raise ConfigError(
            f"island_size={shown(island_size)} and FSDP were both asked for. The ranks that share one sharded model "
            "are an island: give its size as ParallelismConfig(dp_shard_size=)."
        )
    if parallelism_config is None:
        shards = world.size
    else:
        shards = parallelism_config.dp_shard_size * parallelism_config.cp_size
        if fsdp_plugin is not None and shards == 1 and world.size > 1:
            raise ConfigError(
                f"FSDP was asked for, and ParallelismConfig(dp_replicate_size={parallelism_config.dp_replicate_size}, "
                "dp_shard_size=1), which cuts nothing. Give a dp_shard_size above 1, or leave the plugin out for DDP."
            )
    if is_parallel and device_mesh is not None:
        assert isinstance(world.group, TorchGroup), "there are several ranks"
        return Layout(make_parallel_mesh(world.group, device_mesh), fsdp_plugin, parallelism_config)
    return Layout(make_mesh(world.group, shards, world.device.type, device_mesh), fsdp_plugin, parallelism_config)


@contextmanager
def settling(session: Session) -> Iterator[None]:
    """Close a session that no Accelerator has settled yet if the block refuses its settings."""
    is_settled = session.layout is not None
    try:
        yield
    except (ConfigError, Unsupported):
        if not is_settled:
            close_session()
        raise


def flushed(exchange: Exchange) -> Exchange:
    """Flush the outer loops that are owed it, before a collective of all ranks over `exchange`; return `exchange`."""
    if exchange.size > 1 and _session is not None and _session.world.exchange is exchange:
        for controller in list(_session.controllers):
            controller.flush_owed()
    return exchange


def new_loop(plugin: GradientAccumulationPlugin, world: World, under_way: ActiveLoaders | None = None) -> LoopState:
    """Return a fresh loop state for `plugin`; in it the loaders `under_way` are seen, which other loops share."""
    if under_way is None:
        under_way = ActiveLoaders()
        under_way.ends = UnevenDataCheck(world.group) if isinstance(world.group, TorchGroup) else None
    syncs = {"sync_with_dataloader": plugin.sync_with_dataloader, "sync_each_batch": plugin.sync_each_batch}
    return LoopState(plugin.num_steps or 1, under_way, **syncs)


def require_open(kind: str, is_open: bool) -> None:
    """Raise StateReset, in the name of the state class `kind`, if its state is not open."""
    if not is_open:
        raise StateReset(
            f"`{kind}` object has no attribute that describes this process, as its state was reset. This happens "
            f"if `{kind}._reset_state()` was called and no {kind} was made since. Make one."
        )


def session_in_use() -> Session:
    """Return the open session for an Accelerator or a view made before; raise StateReset if it was closed since."""
    require_open("AcceleratorState", _session is not None)
    return opened_session()


def unset_announced() -> None:
    """Unset the variables that tell transformers of the session."""
    if _session is not None:
        environ.remove(*_session.announced)
        _session.announced = ()


def close_session() -> None:
    """Close the session. Objects made before lose the attributes that describe this process until the next is open."""
    global _session
    unset_announced()
    _session = None
