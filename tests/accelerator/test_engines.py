# SPDX-License-Identifier: Apache-2.0
"""What an Accelerator answers about the grid of ranks, and about what shards models."""

from __future__ import annotations

import warnings

import pytest
import torch.distributed as dist

import farflung
from farflung.accelerator.session import opened_session
from farflung.base.errors import ConfigError, StateError
from farflung.config import environ
from farflung.config.parallelism import ParallelismConfig
from farflung.config.sharding import FullyShardedDataParallelPlugin
from farflung.state import AcceleratorState
from tests.accelerator.conftest import on_ranks

GRID = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}


def answers(**said):
    """What a new session with these settings says of itself, here and through its state."""
    accelerator = farflung.Accelerator(cpu=True, **said)
    state, mesh = accelerator.state, accelerator.torch_device_mesh
    assert (state.fsdp_plugin, state.parallelism_config) == (accelerator.fsdp_plugin, accelerator.parallelism_config)
    assert state.device_mesh is mesh
    assert (state.is_fsdp2, str(state.distributed_type)) == (accelerator.is_fsdp2, str(accelerator.distributed_type))
    try:
        place = (accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank, accelerator.tensor_parallel_rank)
    except StateError as error:
        place = str(error).split(":")[0]
    shape = None if mesh is None else dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    if mesh is not None:
        assert mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)].size() == 4
    kind = str(accelerator.distributed_type).split(".")[1]
    AcceleratorState._reset_state()
    return kind, shape, place


@on_ranks(4)
def test_each_rank_knows_its_row_and_column_and_what_shards_models():
    rank, none = dist.get_rank(), ("data_parallel_rank",)
    replicas = ("MULTI_CPU", {"dp_replicate": 4}, (rank, 0, 0))
    assert answers() == ("MULTI_CPU", None, *none)
    assert answers(fsdp_plugin=FullyShardedDataParallelPlugin()) == ("FSDP", None, *none)
    with environ.patched({"ACCELERATE_USE_FSDP": "true"}):
        assert answers() == ("FSDP", None, *none)
        with environ.patched({"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **GRID}):
            assert answers() == ("FSDP", {"dp_replicate": 2, "dp_shard": 2}, (rank // 2, rank % 2, 0))
    assert answers(parallelism_config=ParallelismConfig(1, 4)) == ("FSDP", {"dp_shard": 4}, (0, rank, 0))
    for sizes in ((4, 1), (1, 1)):  # the latter says no size, so all are replicas
        assert answers(parallelism_config=ParallelismConfig(*sizes)) == replicas
    grid = ParallelismConfig(2, 2)
    own = grid.get_device_mesh("cpu")  # as a script does that loads its model onto it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that meshes won't be sliced by joint axes one day
        assert [own[axis].size() for axis in ("dp", "dp_cp", "dp_shard_cp")] == [4, 4, 2]
    accelerator = farflung.Accelerator(cpu=True, parallelism_config=grid)
    assert accelerator.torch_device_mesh is own
    assert opened_session().layout.mesh.row.get_group() is own["dp_shard"].get_group()
    AcceleratorState._reset_state()
    for sizes, words in (
        ((2, 1), r"\(2\) times dp_shard_size \(1\) is 2, but there are 4 processes"),
        ((3, 2), "is 6, but there are 4"),
    ):
        with pytest.raises(ConfigError, match=words):
            farflung.Accelerator(cpu=True, parallelism_config=ParallelismConfig(*sizes))
    assert not farflung.state.is_initialized()


def test_transformers_is_told_to_load_on_one_rank_as_long_as_the_session_lasts():
    names = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    farflung.Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True))
    assert [environ.flag(name) for name in names] == [True, True]
    AcceleratorState._reset_state()
    assert [environ.text(name) for name in names] == [None, None]


def test_one_process_shards_nothing():
    accelerator = farflung.Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    assert accelerator.fsdp_plugin is accelerator.state.fsdp_plugin
    assert (accelerator.is_fsdp2, accelerator.is_composable_parallelism_enabled) == (False, False)
    assert str(accelerator.distributed_type) == "DistributedType.NO"
