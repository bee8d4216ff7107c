# SPDX-License-Identifier: Apache-2.0
"""The ranks as a grid: neighbours form a row, an island, whose ranks average their gradients in every step.

A column holds the ranks that have the same values in all islands. Where replicas train independently, they meet along
the columns; where they train in step, gradients are averaged along them too.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from farflung.base.errors import ConfigError
from farflung.comm.group import Group, SoloGroup
from farflung.comm.torch_group import TorchGroup
from farflung.process.world import World

AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class Mesh:
    """This rank's row and column.

    Attributes:
        everyone: all ranks.
        island: this rank's row.
        replicas: this rank's column.
        device_mesh: torch's mesh of both axes, named `dp_replicate` and `dp_shard`; None where each row is one rank.
    """

    everyone: Group
    island: Group
    replicas: Group
    device_mesh: DeviceMesh | None = None

    @property
    def row(self) -> DeviceMesh:
        """torch's mesh of this rank's row."""
        assert self.device_mesh is not None, "each row is one rank"
        return self.device_mesh[AXES[1]]


def make_mesh(world: World, island_size: int, device_mesh: DeviceMesh | None = None) -> Mesh:
    """Arrange the ranks in rows of `island_size` neighbours: a collective, where that is more than one.

    Args:
        island_size: a divisor of the number of ranks.
        device_mesh: the script's own of these sizes, whose groups are used; it may lack an axis of one rank.
    """
    if island_size == 1:
        return Mesh(world.group, SoloGroup(), world.group)
    everyone, rows = world.group, world.size // island_size
    assert isinstance(everyone, TorchGroup), "there are several ranks"
    device_mesh = device_mesh or init_device_mesh(world.device.type, (rows, island_size), mesh_dim_names=AXES)
    island = everyone.within(device_mesh.get_group(AXES[1]))
    replicas = everyone.within(device_mesh.get_group(AXES[0])) if rows > 1 else SoloGroup()
    return Mesh(everyone, island if rows > 1 else everyone, replicas, device_mesh)


def require_replicas(mesh: Mesh) -> None:
    """Refuse an outer loop where there is one island, so that there is nothing to average.

    Raises:
        ConfigError: there is one, of several ranks.
    """
    if mesh.replicas.size == 1 and mesh.island.size > 1:
        raise ConfigError(
            f"An outer loop averages replicas, but all {mesh.island.size} processes share one. Make several: "
            f"ParallelismConfig(dp_replicate_size=2, dp_shard_size={max(1, mesh.island.size // 2)}), or a smaller "
            "island_size."
        )
