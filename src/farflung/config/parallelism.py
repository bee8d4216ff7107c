# SPDX-License-Identifier: Apache-2.0
"""How many ranks share one model, in Accelerate's words. Farflung only replicates: each size is 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from farflung.base.checks import check_whole, check_word
from farflung.base.errors import Unsupported
from farflung.config import environ

_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
_BACKENDS = {"cp_backend": "torch", "sp_backend": "deepspeed"}
_VARIABLE = "PARALLELISM_CONFIG_"


@dataclass
class ParallelismConfig:
    """A description of parallelism that says: none but replicas. Not frozen: trainers set sizes after making it.

    What is None is read from `PARALLELISM_CONFIG_TP_SIZE` and so on; 1 where those are not set.

    Raises:
        ConfigError: a size is no whole number, or a backend is unknown.
        Unsupported: a size is above 1, or there is a handler for one.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SIZES:
            value = (environ.integer(_VARIABLE + name.upper()) or 1) if value is None else value
            check_whole(f"ParallelismConfig: {name}", value, least=1)
            if value > 1:
                raise Unsupported(
                    f"ParallelismConfig({name}={value}) is not supported yet. Leave it out: DDP replicates the model "
                    "on all ranks, or use an outer loop over it."
                )
        elif name in _BACKENDS:
            value = environ.text(_VARIABLE + name.upper(), _BACKENDS[name]) if value is None else value
            check_word(f"ParallelismConfig: {name}", value, [_BACKENDS[name]])
        elif name.endswith("_handler") and value is not None:
            raise Unsupported(f"ParallelismConfig({name}=...) is not supported yet. Leave it out to train with DDP.")
        object.__setattr__(self, name, value)

    total_size = non_data_parallel_size = data_parallel_size = 1
    dp_replicate_enabled = dp_shard_enabled = tp_enabled = cp_enabled = sp_enabled = False
    device_mesh = None

    @property
    def dp_dim_names(self) -> list[str]:
        """The axes along which ranks have different data: none."""
        return []

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The axes along which ranks have the same data: none."""
        return []

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The axes along which a model is cut: none."""
        return []

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The axes along which a loss is averaged: none."""
        return []

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axes of FSDP's mesh, as Accelerate names them even where there is none."""
        return ["dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """The axes with more than one rank: none."""
        return []

    def build_device_mesh(self, device_type: str) -> None:
        """Return None: without axes there is no mesh."""

    def get_device_mesh(self, device_type: str | None = None) -> None:
        """Return None: without axes there is no mesh."""
