# SPDX-License-Identifier: Apache-2.0
"""The ranks as a grid: neighbours form a row, an island, whose ranks average their gradients in every step.

A column holds the ranks that have the same values in all islands. Where replicas train independently, they meet along
the columns; where they train in step, gradients are averaged along them too.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from farflung.comm.group import Group, SoloGroup, TorchGroup
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
    rows = world.size // island_size
    device_mesh = device_mesh or init_device_mesh(world.device.type, (rows, island_size), mesh_dim_names=AXES)
    replicas = TorchGroup(device_mesh.get_group(AXES[0])) if rows > 1 else SoloGroup()
    island = TorchGroup(device_mesh.get_group(AXES[1])) if rows > 1 else world.group
    return Mesh(world.group, island, replicas, device_mesh)
