# SPDX-License-Identifier: Apache-2.0
"""The process-wide state: one frozen `World` (rank, size, device, group), and weak references to readers of files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

from farflung.base.enums import DistributedType
from farflung.base.errors import StateError
from farflung.comm.exchange import Exchange
from farflung.comm.group import Group
from farflung.comm.torch_group import TorchGroup
from farflung.config.handlers import InitProcessGroupKwargs
from farflung.process.place import Place
from farflung.process.watchdog import Watchdog


@dataclass(frozen=True)
class RankInfo:
    """What the launcher said about this process."""

    rank: int
    size: int
    local_rank: int
    local_size: int


@dataclass(frozen=True)
class World(RankInfo):
    """One process among those of a run."""

    device: torch.device  # where its models and batches go
    group: Group  # all processes
    exchange: Exchange  # what gather, reduce and the like over `group` work with
    place: Place  # the replica that these processes train, where several come and go
    backend: str | None = None  # how the processes talk (`gloo`, `cpu:gloo,cuda:nccl` ...), None when there is one
    owns_group: bool = False  # Farflung initialized torch.distributed, so Farflung destroys it
    init: InitProcessGroupKwargs | None = None  # with which Farflung did so
    watchdog: Watchdog | None = None  # finds ranks that do not come, once it is started; None: there is one process

    def __reduce__(self) -> tuple[Callable[[], World], tuple[()]]:
        return joined_world, ()

    @property
    def kind(self) -> DistributedType:
        """How the processes work together, by the kind of their device."""
        if self.size == 1:
            return DistributedType.NO
        return DistributedType.__members__.get(f"MULTI_{self.device.type.upper()}", DistributedType.MULTI_GPU)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


_world: World | None = None
_last: RankInfo | None = None  # of the world that this process has left
_num_left = 0
_has_accelerator = False
_stores: dict[Any, Any] = {}  # the one that this process meets others in, by its address and more
_readers: WeakValueDictionary[int, Any] = WeakValueDictionary()


def current_world() -> World | None:
    """Return the world that this process has joined, or None."""
    return _world


def joined_world() -> World:
    """Return the world that this process has joined, or raise StateError."""
    if _world is None:
        raise StateError(
            "The rank of this process is not known yet. Create an `Accelerator()` or a `PartialState()` first."
        )
    return _world


def known_rank() -> RankInfo:
    """Return the rank of this process in its world, or in the one that it has left; StateError without either."""
    return joined_world() if _last is None else _world or _last


def _joined_group() -> Any:
    return joined_world().group


def _joined_exchange() -> Exchange:
    return joined_world().exchange


def set_world(world: World) -> World:
    """Make `world` that of this process, which must have none."""
    global _world
    if _world is not None:
        raise StateError(f"This process is already rank {_world.rank} of {_world.size}.")
    _world = world
    if isinstance(world.group, TorchGroup):
        world.group.pickled_as, world.exchange.pickled_as = _joined_group, _joined_exchange
    return world


def clear_world() -> World | None:
    """Forget the world of this process, and return it."""
    global _last, _num_left, _world, _has_accelerator
    world, _world, _has_accelerator = _world, None, False
    if world is not None:
        _last = RankInfo(world.rank, world.size, world.local_rank, world.local_size)
        _num_left += world.owns_group
    return world


def note_accelerator() -> None:
    """Record that an Accelerator has settled how the ranks of this world share models."""
    global _has_accelerator
    _has_accelerator = True


def has_accelerator() -> bool:
    """Return whether an Accelerator has settled how ranks share models: it opens their outer loops then."""
    return _has_accelerator


def forget_rank() -> None:
    """Forget the rank that this process had in the world that it has left."""
    global _last
    _last = None


def num_worlds_left() -> int:
    """Return how many worlds of several processes this one has made and left, as all ranks of a run do together."""
    return _num_left


def kept_store(key: tuple[Any, ...], connect: Callable[[], Any]) -> Any:
    """Return the store of `key`; connect to it on the first call, and when the key has changed.

    The process keeps it until it exits: a rank that reaches its next world early would find a store about to close.
    """
    if key not in _stores:
        store = connect()
        _stores.clear()
        _stores[key] = store
    return _stores[key]


def add_reader(reader: Any) -> None:
    """Record that an object reads files as long as it lives, so that nothing else in this process replaces them."""
    _readers[id(reader)] = reader


def readers() -> list[Any]:
    """Return the objects that read files and are alive."""
    return list(_readers.values())
