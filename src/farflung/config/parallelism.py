# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a run are arranged, in Accelerate's words: rows of shards, one row per replica."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farflung.base.checks import check_optional, check_whole, check_word
from farflung.base.errors import ConfigError, Unsupported
from farflung.base.forward import Forward
from farflung.base.torch_internals import add_joint_axis
from farflung.config import environ

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")  # in the order of a mesh
_BACKENDS = {"cp_backend": "torch", "sp_backend": "deepspeed"}
_VARIABLE = "PARALLELISM_CONFIG_"


@dataclass
class TorchContextParallelConfig:
    """How context parallelism exchanges keys and values: `allgather` or `alltoall`.

    None is read from `PARALLELISM_CONFIG_CP_COMM_STRATEGY`, and is `allgather` if that is not set.
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        if self.cp_comm_strategy is None:
            self.cp_comm_strategy = environ.text(_VARIABLE + "CP_COMM_STRATEGY", "allgather")
        if self.cp_comm_strategy not in ("allgather", "alltoall"):
            raise ConfigError(f"Invalid cp_comm_strategy: {self.cp_comm_strategy}. Use allgather or alltoall.")


@dataclass
class TorchTensorParallelConfig:
    """How tensor parallelism is made; it has nothing to choose."""

    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            warnings.warn("enable_async_tp is not supported, and has no effect.", stacklevel=3)


def _enabled(axis: str, doc: str) -> Forward[bool]:
    return Forward(lambda config: bool(getattr(config, f"{axis}_size") > 1), doc)


def _several(doc: str, *axes: str) -> Forward[list[str]]:
    return Forward(lambda config: [axis for axis in axes if getattr(config, f"{axis}_size") > 1], doc)


@dataclass
class ParallelismConfig:
    """Ranks as a grid of `dp_replicate_size` rows and `dp_shard_size` columns. Not frozen: trainers set sizes later.

    FSDP shards a model over the ranks of a row, and each row holds a copy: a pure replica if it is one rank (DDP).
    Without an outer loop the rows average gradients in every step (HSDP); with one, they synchronize by its recipe.

    The `tp_size` ranks of tensor parallelism see the same data, and train models that the script has cut over the axis
    `tp` of the mesh. So do the `cp_size` ranks of context parallelism, each with its part of the sequences, which
    `Accelerator.maybe_context_parallel` cuts; gradients are averaged over them. Sequence parallelism can be described
    and laid out; an `Accelerator` refuses it.

    What is None is read from `PARALLELISM_CONFIG_DP_REPLICATE_SIZE` and so on; 1 if those are not set.

    Raises:
        ConfigError: a size is no whole number, a backend is unknown, or the axes can't be combined.
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
        if name.endswith("_size"):
            value = (environ.integer(_VARIABLE + name.upper()) or 1) if value is None else value
            check_whole(f"ParallelismConfig: {name}", value, least=1)
        elif name in _BACKENDS:
            value = environ.text(_VARIABLE + name.upper(), _BACKENDS[name]) if value is None else value
            check_word(f"ParallelismConfig: {name}", value, [_BACKENDS[name]])
        object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        if self.tp_enabled and self.tp_handler is None:
            self.tp_handler = TorchTensorParallelConfig()
        if self.cp_enabled and self.cp_handler is None:
            self.cp_handler = TorchContextParallelConfig()
        wanted = "a TorchContextParallelConfig(...)"
        check_optional("ParallelismConfig: cp_handler", self.cp_handler, TorchContextParallelConfig, wanted)
        if self.cp_enabled and self.sp_enabled:
            raise ConfigError(
                f"ParallelismConfig: cp_size is {self.cp_size} and sp_size is {self.sp_size}; both cut sequences. "
                "Leave one of them out."
            )
        if (self.tp_enabled or self.cp_enabled) and self.dp_replicate_enabled and not self.dp_shard_enabled:
            raise ConfigError(
                f"ParallelismConfig: dp_replicate_size is {self.dp_replicate_size} and dp_shard_size is 1, which can't "
                "be combined with tp_size or cp_size. Give a dp_shard_size above 1."
            )

    def check(self, world_size: int) -> None:
        """Check that the grid has one place for each of `world_size` processes, and no axis `sp`.

        A grid of one place, which is what a configuration without sizes is, becomes one of replicas.
        """
        if self.sp_enabled or self.sp_handler is not None:
            raise Unsupported(
                f"ParallelismConfig(sp_size={self.sp_size}): sequence parallelism is not supported yet. Leave it and "
                "its handler out, and cut sequences with cp_size."
            )
        if self.cp_enabled and self.tp_enabled:
            raise Unsupported("ParallelismConfig: cp_size and tp_size can't be combined yet. Leave one of them out.")
        if self.cp_handler is not None and not self.cp_enabled:
            raise ConfigError("ParallelismConfig: cp_handler is read only with a cp_size above 1, which is missing.")
        if self.total_size == 1:
            self.dp_replicate_size = world_size
        if self.total_size != world_size:
            axes = ("dp_replicate", "dp_shard", *self.non_dp_dim_names)
            sizes = " times ".join(f"{axis}_size ({getattr(self, f'{axis}_size')})" for axis in axes)
            raise ConfigError(
                f"ParallelismConfig: {sizes} is {self.total_size}, but there are {world_size} processes. The product "
                "must be the number of processes."
            )

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    @property
    def total_size(self) -> int:
        """The number of ranks in the grid."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def non_data_parallel_size(self) -> int:
        """The number of ranks that share the data of one place in the grid of data."""
        return self.tp_size * self.cp_size * self.sp_size

    dp_replicate_enabled = _enabled("dp_replicate", "Whether there are several rows.")
    dp_shard_enabled = _enabled("dp_shard", "Whether there are several columns.")
    tp_enabled = _enabled("tp", "Whether tensors are to be cut.")
    cp_enabled = _enabled("cp", "Whether sequences are to be cut inside attention.")
    sp_enabled = _enabled("sp", "Whether sequences are to be cut outside attention.")

    dp_dim_names = _several("The axes with several ranks along which ranks have different data.", *_AXES[:2])
    non_dp_dim_names = _several("The axes with several ranks along which ranks have the same data.", "tp", "cp", "sp")
    dp_shard_cp_dim_names = _several("The axes along which a model is sharded.", "dp_shard", "cp")
    dp_cp_dim_names = _several("The axes along which a loss is averaged.", "dp_replicate", "dp_shard", "cp")
    fsdp_dim_names = Forward[list[str]](
        "dp_cp_dim_names", "The axes of FSDP's mesh, each by its own name; joint axes are not among them."
    )
    active_mesh_dims = _several("The axes with several ranks.", *_AXES[:2], "tp", "cp", "sp")

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        names = [axis for axis in _AXES if getattr(self, f"{axis}_size") > 1]
        return tuple(names), tuple(getattr(self, f"{name}_size") for name in names)

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Make the mesh of the axes that have several ranks, in the default process group; None if none has.

        It has the joint axes `dp`, `dp_shard_cp` and `dp_cp` too; torch warns if a mesh is sliced by one of them.
        There is none for sequence parallelism either, whose backend makes its own groups. A collective: all ranks call
        it.
        """
        names, sizes = self._get_mesh()
        if not names or self.sp_enabled:
            return None
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        for axis in ("dp", "dp_shard_cp", "dp_cp"):
            joined = getattr(self, f"{axis}_dim_names")
            if joined:
                add_joint_axis(mesh, joined, axis)
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return the mesh, which the first call makes; ConfigError without a device for it, or for another one."""
        if self.device_mesh is None:
            if device_type is None:
                raise ConfigError("get_device_mesh: there is no mesh yet. Give a device type, such as 'cpu' or 'cuda'.")
            self.device_mesh = self.build_device_mesh(device_type)
        elif device_type not in (None, self.device_mesh.device_type):
            there = self.device_mesh.device_type
            raise ConfigError(f"get_device_mesh: device_type is {device_type!r}, but the mesh is one of {there}.")
        return self.device_mesh
