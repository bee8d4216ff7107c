# SPDX-License-Identifier: Apache-2.0
"""The ranks as a grid: neighbours form a row, an island, whose ranks average their gradients in every step.

A column holds the ranks that have the same values in all islands. If replicas train independently, they meet along
the columns; if they train in step, gradients are averaged along them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from farflung.base.checks import check_whole
from farflung.base.errors import ConfigError
from farflung.base.torch_internals import taken
from farflung.comm.group import Group, SoloGroup
from farflung.comm.torch_group import TorchGroup, mesh_along
from farflung.config import environ
from farflung.process.place import FIXED, Place

IslandSize = int | Literal["host"]
AXES = ("dp_replicate", "dp_shard")
_ROW = ("dp_shard", "cp")  # ranks with different tokens, which average gradients in every step


@dataclass(frozen=True)
class Mesh:
    """This rank's row (`island`) and column (`replicas`) among all ranks.

    `device_mesh` is torch's mesh of both axes, named `dp_replicate` and `dp_shard`; if one row has all ranks, its one
    axis may have no name. It is None if each row is one rank. There is an axis `tp` too if ranks hold parts of layers,
    and `cp` if they take parts of sequences. Both read the same batches; those of `readers`, this rank among them,
    differ: they share out the data.
    """

    everyone: Group
    island: Group
    replicas: Group
    readers: Group
    device_mesh: DeviceMesh | None = None

    @cached_property
    def row(self) -> DeviceMesh:
        """torch's mesh of this rank's row: of the ranks in it that hold the same layers."""
        assert self.device_mesh is not None, "each row is one rank"
        names = self.device_mesh.mesh_dim_names
        return self.device_mesh if names is None else mesh_along(self.device_mesh, _among(_ROW, self.device_mesh))

    @property
    def cuts_layers(self) -> bool:
        """Whether the script cuts models by tensor parallelism."""
        return self.device_mesh is not None and bool(_among(("tp",), self.device_mesh))


def stated_island_size(
    local_size: int, asked: IslandSize | None = None, everyone: Group | None = None, place: Place = FIXED
) -> int | None:
    """Return how many ranks average their gradients in every step; None if neither script nor launcher says.

    Args:
        local_size: number of ranks on this machine.
        asked: what the script says; None: what the launcher says counts.
        everyone: all ranks. With them the number is checked against theirs: for `host`, a collective.
        place: the replica that `everyone` trains, if replicas come and go.
    """
    if place.member is not None and asked is None and everyone is not None:
        return everyone.size  # a replica is a world of its own
    size: Any = environ.text("FARFLUNG_ISLAND_SIZE") if asked is None else asked
    if size is None or size == "":
        return None
    if size == "host":
        if everyone is not None:
            sizes = everyone.all_gather_small(torch.tensor([float(local_size)])).flatten().tolist()
            if len(set(sizes)) > 1:
                raise ConfigError(
                    "island_size='host', but the machines have different numbers of processes: "
                    f"{sorted(set(map(int, sizes)))}. Start equally many on each, or give a number."
                )
        return local_size
    size = int(size) if isinstance(size, str) and size.isdecimal() else size
    check_whole("island_size", size, least=1)
    if everyone is not None and everyone.size % size:
        raise ConfigError(
            f"island_size={size} does not divide the {everyone.size} processes. Use a divisor, so that islands are of "
            "equal size."
        )
    return int(size)


def replicas_here(local_size: int, island_size: int) -> int:
    """Return how many replicas a machine with so many ranks has; 1 if a replica takes several machines."""
    return max(1, local_size // island_size)


def make_mesh(everyone: Group, island_size: int, device_type: str, device_mesh: DeviceMesh | None = None) -> Mesh:
    """Arrange the ranks in rows of `island_size` neighbours: a collective, if that is more than one.

    `device_mesh` is the script's own of these sizes, whose groups are used; it may lack an axis of one rank.
    """
    if island_size == 1:
        return Mesh(everyone, SoloGroup(), everyone, everyone)
    assert isinstance(everyone, TorchGroup), "there are several ranks"
    rows = everyone.size // island_size
    if device_mesh is None and rows == 1:  # as fully_shard makes it, which a trainer may call for another model
        device_mesh = init_device_mesh(device_type, (island_size,))
    device_mesh = device_mesh or init_device_mesh(device_type, (rows, island_size), mesh_dim_names=AXES)
    island = everyone.within(device_mesh.get_group(AXES[1] if device_mesh.mesh_dim_names else 0))
    replicas = everyone.within(device_mesh.get_group(AXES[0])) if rows > 1 else SoloGroup()
    return Mesh(everyone, island if rows > 1 else everyone, replicas, everyone, device_mesh)


def make_parallel_mesh(everyone: TorchGroup, device_mesh: DeviceMesh) -> Mesh:
    """Take in the script's mesh with an axis `cp`, `tp` or both: a collective."""

    def along(*axes: str) -> Group:
        found = _among(axes, device_mesh)
        return everyone.within(mesh_along(device_mesh, found).get_group()) if found else SoloGroup()

    replicas = along(AXES[0])
    island = along(*_ROW, "tp") if replicas.size > 1 else everyone
    return Mesh(everyone, island, replicas, along(*AXES), device_mesh)


def _among(axes: Sequence[str], mesh: DeviceMesh) -> list[str]:
    return [axis for axis in axes if axis in (mesh.mesh_dim_names or ())]


def cut_sequences(
    mesh: Any, strategy: str, buffers: list[Tensor], dims: list[int], stay_cut: set[Tensor] | None
) -> AbstractContextManager[None]:
    """Return torch's context of context parallelism over `mesh`, which exchanges keys and values by `strategy`."""
    from torch.distributed.tensor import experimental  # here, as it is slow to import

    use = "exchange keys and values in context parallelism"
    taken(taken(experimental, "_attention", use), "set_rotate_method", use)(strategy)
    made: Any = experimental.context_parallel
    context: AbstractContextManager[None] = made(
        mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=stay_cut or set()
    )
    return context


def require_replicas(mesh: Mesh, place: Place) -> None:
    """Raise ConfigError unless there are several islands to average in this run, or one in an elastic replica."""
    if place.member is not None and mesh.replicas.size > 1:
        raise ConfigError(
            f"A replica of --elastic is one island, but the {mesh.everyone.size} processes of this one form "
            f"{mesh.replicas.size}, which would train a model each. Leave island_size and dp_replicate_size out, and "
            f"give --ranks_per_replica {mesh.island.size} for islands of that size."
        )
    if place.member is None and mesh.replicas.size == 1 and mesh.island.size > 1:
        raise ConfigError(
            f"An outer loop averages replicas, but all {mesh.island.size} processes share one. Make several: "
            f"ParallelismConfig(dp_replicate_size=2, dp_shard_size={max(1, mesh.island.size // 2)}), or a smaller "
            "island_size."
        )
