# SPDX-License-Identifier: Apache-2.0
"""The settings of FSDP, of the grid of ranks and of islands: each way from a flag or a file to what a rank makes."""

import dataclasses
from typing import Any

import pytest

from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.config.files import write_file
from farflung.config.grid import LayoutSettings
from farflung.config.launch import FIELDS, LaunchSettings, rank_variables
from farflung.config.parallelism import ParallelismConfig
from farflung.config.resolve import resolve
from farflung.config.sharding import FullyShardedDataParallelPlugin

# flag -> what it is given, which attribute of the plugin tells it, and what that is then
FSDP = {
    "fsdp_version": ("2", "fsdp_version", 2),
    "fsdp_reshard_after_forward": ("false", "reshard_after_forward", False),
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "auto_wrap_policy", "transformer_based_wrap"),
    "fsdp_transformer_layer_cls_to_wrap": ("Block,B", "transformer_cls_names_to_wrap", ["Block", "B"]),
    "fsdp_min_num_params": ("2000", "min_num_params", 2000),
    "fsdp_offload_params": ("True", "cpu_offload", True),
    "fsdp_activation_checkpointing": ("true", "activation_checkpointing", True),
    "fsdp_activation_checkpointing_offload": ("true", "activation_checkpointing_offload", True),
    "fsdp_cpu_ram_efficient_loading": ("true", "cpu_ram_efficient_loading", True),
    "fsdp_state_dict_type": ("FULL_STATE_DICT", "state_dict_type", "FULL_STATE_DICT"),
    "fsdp_ignored_modules": (r"lm_head\..*", "ignored_modules", r"lm_head\..*"),
    "fsdp_sharding_strategy": ("SHARD_GRAD_OP", "reshard_after_forward", False),
    "fsdp_backward_prefetch": ("BACKWARD_PRE", "backward_prefetch", None),
    "fsdp_forward_prefetch": ("false", "forward_prefetch", None),
    "fsdp_limit_all_gathers": ("true", "limit_all_gathers", True),
    "fsdp_use_orig_params": ("true", "use_orig_params", None),
    "fsdp_sync_module_states": ("false", "sync_module_states", None),
}
# what has to be said beside it
BESIDE = {
    "fsdp_transformer_layer_cls_to_wrap": {"fsdp_auto_wrap_policy": "transformer_based_wrap"},
    "fsdp_min_num_params": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"},
    "fsdp_activation_checkpointing_offload": {"fsdp_activation_checkpointing": "true"},
}
GRID = {
    "use_parallelism_config": True,
    "parallelism_config_dp_replicate_size": "2",
    "parallelism_config_dp_shard_size": "4",
    "parallelism_config_tp_size": "1",
    "parallelism_config_cp_size": "1",
    "parallelism_config_cp_backend": "torch",
    "parallelism_config_cp_comm_strategy": "alltoall",
    "parallelism_config_sp_size": "1",
}


def as_a_rank_sees_it(settings: LaunchSettings) -> tuple[Any, Any]:
    """What a rank makes of the variables that it gets."""
    with environ.patched(rank_variables(settings)):
        assert environ.flag("ACCELERATE_USE_FSDP")
        has_grid = environ.flag("ACCELERATE_USE_PARALLELISM_CONFIG")
        return FullyShardedDataParallelPlugin(), ParallelismConfig() if has_grid else None


def test_every_setting_of_fsdp_has_a_row_here():
    names = {field.name for field in dataclasses.fields(LayoutSettings)}
    assert names == {*FSDP, *GRID, "use_fsdp", "island_size"}


@pytest.mark.parametrize("name", sorted(FSDP))
def test_a_flag_a_variable_and_a_line_of_a_file_reach_the_plugin(name, home):
    text, attribute, expected = FSDP[name]
    said = {name: text, **BESIDE.get(name, {})}

    def seen(flags):
        plugin, grid = as_a_rank_sees_it(resolve(flags).settings)
        assert grid is None
        return getattr(plugin, attribute)

    assert seen({"use_fsdp": True, **said}) == expected
    variables = {entry.variable: str(said[entry.name]) for entry in FIELDS if entry.name in said}
    with environ.patched({"ACCELERATE_USE_FSDP": "true", **variables}):
        assert seen({}) == expected
        assert getattr(FullyShardedDataParallelPlugin(), attribute) == expected
    lines = "".join(f"  {key}: {value}\n" for key, value in said.items())
    (home / "farflung.yaml").write_text(f"distributed_type: FSDP\nfsdp_config:\n{lines}")
    assert seen({}) == expected
    own = {field.name: getattr(resolve({}).settings, field.name) for field in dataclasses.fields(LayoutSettings)}
    path = write_file(home / "own.yaml", own)
    assert seen({"config_file": str(path)}) == expected


def test_the_grid_reaches_the_ranks_by_flags_and_by_accelerates_file(home):
    for sizes in (GRID, {}):
        if not sizes:
            keys = "".join(f"  {name}: {said}\n" for name, said in GRID.items() if name != "use_parallelism_config")
            (home / "farflung.yaml").write_text(f"distributed_type: FSDP\nparallelism_config:\n{keys}")
        settings = resolve({"use_fsdp": True, "num_processes": "8", **sizes}).settings
        _, grid = as_a_rank_sees_it(settings)
        assert grid == ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)


def test_nothing_said_tells_the_ranks_nothing_and_a_no_is_told():
    told = rank_variables(LaunchSettings())
    assert not [name for name in told if "FSDP" in name or "PARALLELISM" in name or "ISLAND" in name]
    told = rank_variables(LaunchSettings(use_fsdp=True))
    # Accelerate's own default is version 1, and its launcher's is to load transformers' weights on rank 0 alone.
    assert {name: value for name, value in told.items() if name.startswith("FSDP_")} == {"FSDP_VERSION": "2"}
    assert rank_variables(LaunchSettings(use_fsdp=False))["ACCELERATE_USE_FSDP"] == "false"


def test_variables_of_a_scripts_own_plugin_need_no_switch_and_a_no_silences_a_file(home):
    with environ.patched({"FSDP_OFFLOAD_PARAMS": "true"}):
        assert resolve({}).settings.use_fsdp is None
    (home / "farflung.yaml").write_text("use_fsdp: true\nfsdp_version: 2\n")
    assert resolve({"use_fsdp": False}).settings.use_fsdp is False
    (home / "farflung.yaml").write_text("fsdp_version: 2\n")
    with pytest.raises(ConfigError, match=r"farflung.yaml:1 \(fsdp_version\) is read only with --use_fsdp"):
        resolve({})


ISLANDS = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}


@pytest.mark.parametrize(
    "said",
    [
        {"use_fsdp": True, "outer_recipe": "diloco", "num_processes": 1},
        {"use_parallelism_config": True, "num_processes": 4},
        {"use_parallelism_config": True, "parallelism_config_dp_replicate_size": 4, "num_processes": 4},
        {"outer_recipe": "diloco", "island_size": "2", "num_processes": 4},
        {"outer_recipe": "diloco", "island_size": "host", "num_machines": 2, "main_process_ip": "a"},
        {"use_fsdp": True, "outer_recipe": "diloco", "use_parallelism_config": True, **ISLANDS},
    ],
)
def test_layouts_that_work_together_are_settings(said):
    assert LaunchSettings(**said)
