# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a run are arranged, in Accelerate's words: rows of shards, one row per replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farflung.base.checks import check_whole, check_word
from farflung.base.errors import ConfigError, Unsupported
from farflung.config import environ

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
_OTHERS = {"tp_size": "tensor", "cp_size": "context", "sp_size": "sequence"}
_BACKENDS = {"cp_backend": "torch", "sp_backend": "deepspeed"}
_VARIABLE = "PARALLELISM_CONFIG_"


@dataclass
class ParallelismConfig:
    """Ranks as a grid of `dp_replicate_size` rows and `dp_shard_size` columns. Not frozen: trainers set sizes later.

    FSDP shards a model over the ranks of a row, and each row holds a copy: a pure replica where it is one rank (DDP).
    Without an outer loop the rows average gradients in every step (HSDP); with one, they synchronize by its recipe.

    What is None is read from `PARALLELISM_CONFIG_DP_REPLICATE_SIZE` and so on; 1 where those are not set.

    Raises:
        ConfigError: a size is no whole number, or a backend is unknown.
        Unsupported: `tp_size`, `cp_size` or `sp_size` is above 1, or there is a handler for one.
    """

    dp_replicate_size: int = None  # type: ignore[assignment]  # an int once it is set; see `__setattr__`
    dp_shard_size: int = None  # type: ignore[assignment]
    tp_size: int = None  # type: ignore[assignment]
    cp_size: int = None  # type: ignore[assignment]
    cp_backend: str = None  # type: ignore[assignment]
    sp_size: int = None  # type: ignore[assignment]
    sp_backend: str = None  # type: ignore[assignment]
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None

    device_mesh = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SIZES:
            value = (environ.integer(_VARIABLE + name.upper()) or 1) if value is None else value
            check_whole(f"ParallelismConfig: {name}", value, least=1)
            if name in _OTHERS and value > 1:
                raise Unsupported(
                    f"ParallelismConfig({name}={value}): {_OTHERS[name]} parallelism is not supported yet. Leave it "
                    "out, and shard the model over more ranks with dp_shard_size."
                )
        elif name in _BACKENDS:
            value = environ.text(_VARIABLE + name.upper(), _BACKENDS[name]) if value is None else value
            check_word(f"ParallelismConfig: {name}", value, [_BACKENDS[name]])
        elif name.endswith("_handler") and value is not None:
            raise Unsupported(f"ParallelismConfig({name}=...) is not supported yet. Leave it out.")
        object.__setattr__(self, name, value)

    def check(self, world_size: int) -> None:
        """Check that the grid has one place for each of `world_size` processes.

        A grid of one place, which is what a configuration without sizes is, becomes one of replicas.

        Raises:
            ConfigError: it has more, or fewer.
        """
        if self.total_size == 1:
            self.dp_replicate_size = world_size
        if self.total_size != world_size:
            raise ConfigError(
                f"ParallelismConfig: dp_replicate_size ({self.dp_replicate_size}) times dp_shard_size "
                f"({self.dp_shard_size}) is {self.total_size}, but there are {world_size} processes. The product must "
                "be the number of processes."
            )

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return dict(vars(self))

    @property
    def total_size(self) -> int:
        """The number of ranks in the grid."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks with data of their own: all of them."""
        return self.total_size

    @property
    def non_data_parallel_size(self) -> int:
        """The number of ranks that share the data of one: 1."""
        return 1

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several rows."""
        return self.dp_replicate_size > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether there are several columns."""
        return self.dp_shard_size > 1

    tp_enabled = cp_enabled = sp_enabled = False

    @property
    def dp_dim_names(self) -> list[str]:
        """The axes with several ranks along which ranks have different data."""
        return [*(["dp_replicate"] if self.dp_replicate_enabled else []), *self.dp_shard_cp_dim_names]

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The axes along which ranks have the same data: none."""
        return []

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The axes along which a model is sharded."""
        return ["dp_shard"] if self.dp_shard_enabled else []

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The axes along which a loss is averaged."""
        return self.dp_dim_names

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axes of FSDP's mesh: of each, the mesh has its own name, not one joint with context parallelism."""
        return self.dp_dim_names

    @property
    def active_mesh_dims(self) -> list[str]:
        """The axes with several ranks."""
        return self.dp_dim_names

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Make the mesh of the axes that have several ranks, in the default process group; None where none has.

        Its names are `dp_replicate` and `dp_shard`. A collective: all ranks call it.
        """
        names = self.active_mesh_dims
        if not names:
            return None
        from torch.distributed.device_mesh import init_device_mesh

        sizes = tuple(getattr(self, f"{name}_size") for name in names)
        return init_device_mesh(device_type, sizes, mesh_dim_names=tuple(names))

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return the mesh, which the first call makes.

        Raises:
            ConfigError: there is none and no device is given, or there is one of another device.
        """
        if self.device_mesh is None:
            if device_type is None:
                raise ConfigError("get_device_mesh: there is no mesh yet. Give a device type, such as 'cpu' or 'cuda'.")
            self.device_mesh = self.build_device_mesh(device_type)
        elif device_type not in (None, self.device_mesh.device_type):
            there = self.device_mesh.device_type
            raise ConfigError(f"get_device_mesh: device_type is {device_type!r}, but the mesh is one of {there}.")
        return self.device_mesh


def parallelism_from_environment() -> ParallelismConfig | None:
    """Return the grid that `ACCELERATE_USE_PARALLELISM_CONFIG` and `PARALLELISM_CONFIG_*` ask for, None if they do not.

    Raises:
        ConfigError: a size is no whole number.
        Unsupported: a size other than the two of the data is above 1.
    """
    return ParallelismConfig() if environ.flag("ACCELERATE_USE_PARALLELISM_CONFIG") else None
