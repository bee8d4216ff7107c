# SPDX-License-Identifier: Apache-2.0
"""The launch settings that say how ranks share models: FSDP, the grid of ranks, and islands; and what goes together.

Names, values and variables are Accelerate's, but for `island_size`, which is Farflung's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from farflung.base.errors import ConfigError, FarflungError, Unsupported
from farflung.base.words import counted
from farflung.config.problems import renamed
from farflung.config.setting import Value, accelerates, setting
from farflung.config.sharding import STATE_DICT_TYPES, WRAP_POLICIES, FullyShardedDataParallelPlugin

HOST = "host"
_PLUGIN = FullyShardedDataParallelPlugin.__name__
# The plugin's arguments that the launch settings call otherwise.
_ARGUMENTS = {"offload_params": "cpu_offload", "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap"}
GRID = "parallelism_config_"


def _several(answers: Mapping[str, Value]) -> bool:
    count = answers["num_processes"]
    return int(answers["num_machines"] or 1) > 1 or (not answers["use_cpu"] if count is None else int(count) > 1)


def _sharded(answers: Mapping[str, Value]) -> bool:
    return bool(answers["use_fsdp"])


def _told(help: str, **more: Any) -> Any:
    return setting(None, help, told=True, **more)


@dataclass(frozen=True)
class LayoutSettings:
    """How ranks share models; `check_layout` says what goes together."""

    use_fsdp: bool | None = accelerates(
        None,
        "Shard models over the processes (FSDP2). The --fsdp flags set how. [the script's plugin, if any]",
        question="Shard each model over the processes (FSDP), for models that are too large for one?",
        asked_when=_several,
    )
    fsdp_version: int | None = _told("2; with 1, the settings of FSDP version 1 are translated. [2]")
    fsdp_reshard_after_forward: str | None = _told(
        "Free gathered parameters between forward and backward: true, false, or over how many ranks to keep them "
        "sharded. [true]"
    )
    fsdp_auto_wrap_policy: str | None = _told(
        "Which modules are gathered one by one. [no_wrap]",
        choices=WRAP_POLICIES,
        checked_later=True,
        question="Which modules are gathered one by one?",
        asked_when=_sharded,
    )
    fsdp_transformer_layer_cls_to_wrap: str | None = _told(
        "Class names for transformer_based_wrap, separated by commas. [those that the model names]",
        variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
        question="Class names of the model's layers, separated by commas (empty: those that the model names)?",
        asked_when=lambda answers: _sharded(answers) and answers["fsdp_auto_wrap_policy"] == "transformer_based_wrap",
    )
    fsdp_min_num_params: int | None = _told(
        "Number of parameters from which size_based_wrap takes a module. [100000000]",
        question="From how many parameters on is a module gathered by itself (empty: 100 million)?",
        asked_when=lambda answers: _sharded(answers) and answers["fsdp_auto_wrap_policy"] == "size_based_wrap",
    )
    fsdp_offload_params: bool | None = _told(
        "Keep parameters, gradients and optimizer states in host memory. [false]",
        question="Keep parameters, gradients and optimizer states in host memory (slow)?",
        asked_when=_sharded,
    )
    fsdp_activation_checkpointing: bool | None = _told(
        "Recompute activations in the backward pass. [false]",
        question="Recompute activations in the backward pass, to save memory?",
        asked_when=_sharded,
    )
    fsdp_activation_checkpointing_offload: bool | None = _told(
        "Keep what activations are recomputed from in host memory. [false]"
    )
    fsdp_cpu_ram_efficient_loading: bool | None = _told(
        "Make transformers leave out values on other ranks, and hand out those of rank 0. [false]"
    )
    fsdp_state_dict_type: str | None = _told(
        "What save_state writes: each rank its shards, or rank 0 the whole. [sharded_state_dict]",
        choices=tuple(word.lower() for word in STATE_DICT_TYPES),
        checked_later=True,
    )
    fsdp_ignored_modules: str | None = _told("Regular expression of the names of modules that stay whole.")
    fsdp_sharding_strategy: str | None = _told(
        "Version 1's fsdp_reshard_after_forward: FULL_SHARD is true, SHARD_GRAD_OP false."
    )
    fsdp_backward_prefetch: str | None = _told("Version 1's. It changes nothing: FSDP2 always does BACKWARD_PRE.")
    fsdp_forward_prefetch: bool | None = _told("Version 1's. It changes nothing: FSDP2 has no such setting.")
    fsdp_limit_all_gathers: bool | None = _told("Version 1's. It changes nothing: FSDP2 always limits them.")
    fsdp_use_orig_params: bool | None = _told(
        "Version 1's. It changes nothing: FSDP2 always has the original parameters."
    )
    fsdp_sync_module_states: bool | None = _told(
        "Version 1's. It changes nothing: all ranks always start from the values of rank 0."
    )
    use_parallelism_config: bool | None = accelerates(
        None, "Arrange the processes as a grid, whose sizes the --parallelism_config flags set. [the script's, if any]"
    )
    parallelism_config_dp_replicate_size: int | None = _told(
        "How many copies of a model there are: rows of the grid. [1]"
    )
    parallelism_config_dp_shard_size: int | None = _told(
        "Over how many processes one copy is sharded: columns of the grid. [1]"
    )
    parallelism_config_tp_size: int | None = _told("Over how many processes the script cuts each layer. [1]")
    parallelism_config_cp_size: int | None = _told("Over how many processes the script cuts sequences. [1]")
    parallelism_config_cp_backend: str | None = _told("What cuts them.", choices=("torch",))
    parallelism_config_cp_comm_strategy: str | None = _told(
        "How these processes exchange keys and values. [allgather]", choices=("allgather", "alltoall")
    )
    parallelism_config_sp_size: int | None = _told("Sequence parallelism; only 1 is supported.")
    island_size: str | None = _told(
        "With --outer: how many neighbouring processes average gradients in every step; `host` for those of one "
        "machine. [1]"
    )


def check_layout(
    settings: LayoutSettings, num_processes: int | None, num_machines: int, outer_recipe: str | None
) -> None:
    """Check the settings against each other and the number of processes on all machines, if that is known.

    Raises ConfigError if they can't work together, Unsupported for other axes than those of the data, and for settings
    of FSDP version 1 without equal in version 2.
    """
    _check_grid(settings, num_processes)
    if settings.use_fsdp:
        _check_plugin(settings)
    rows, columns = settings.parallelism_config_dp_replicate_size or 1, settings.parallelism_config_dp_shard_size or 1
    if not settings.use_parallelism_config:
        rows = columns = 1
    is_sharded = bool(settings.use_fsdp) or columns > 1
    if is_sharded and outer_recipe is not None and rows == 1 and num_processes != 1:
        half = "N" if num_processes is None else max(1, num_processes // 2)
        raise ConfigError(
            f"--outer {outer_recipe} averages replicas, but with FSDP over all processes there is one copy of the "
            "model. Make several: --use_parallelism_config --parallelism_config_dp_replicate_size 2 "
            f"--parallelism_config_dp_shard_size {half}."
        )
    if settings.island_size is not None:
        _check_islands(settings.island_size, is_sharded, num_processes, num_machines, outer_recipe)


def _check_grid(settings: LayoutSettings, num_processes: int | None) -> None:
    if (settings.parallelism_config_sp_size or 1) > 1:
        raise Unsupported(
            f"is {settings.parallelism_config_sp_size}: sequence parallelism is not supported yet. Leave "
            f"it out, and cut sequences with {GRID}cp_size.",
            f"{GRID}sp_size",
        )
    if not settings.use_parallelism_config:
        return
    sizes = {axis: getattr(settings, f"{GRID}{axis}_size") or 1 for axis in ("dp_replicate", "dp_shard", "cp", "tp")}
    product = math.prod(sizes.values())
    if num_processes == 1 == product:
        return
    if settings.use_fsdp and sizes["dp_shard"] == sizes["cp"] == 1:
        raise ConfigError(
            "is 1, so FSDP has nothing to shard over. Set it above 1, or leave out use_fsdp.", f"{GRID}dp_shard_size"
        )
    if num_processes is not None and product not in (1, num_processes):
        first, *others = [(f"{GRID}{axis}_size", n) for axis, n in sizes.items() if axis.startswith("dp_") or n > 1]
        raise ConfigError(
            f"({first[1]}){''.join(f' times {name} ({n})' for name, n in others)} is {product}, but there "
            f"{'is' if num_processes == 1 else 'are'} {counted(num_processes, 'process')}. The product must be the "
            "number of processes on all machines.",
            first[0],
        )


def _check_plugin(said: LayoutSettings) -> None:
    """Make the plugin that the ranks will make, so that what it refuses is refused here, in the launcher's words."""
    names = [name for name in LayoutSettings.__dataclass_fields__ if name.startswith("fsdp_")]
    arguments = {name: _ARGUMENTS.get(short := name.removeprefix("fsdp_"), short) for name in names}
    arguments["fsdp_version"] = "fsdp_version"
    try:
        FullyShardedDataParallelPlugin(
            **{argument: getattr(said, name) for name, argument in arguments.items() if getattr(said, name) is not None}
        )
    except FarflungError as error:
        raise renamed(error, {f"{_PLUGIN}: {argument}": name for name, argument in arguments.items()}) from None


def _check_islands(
    size: str, is_sharded: bool, num_processes: int | None, num_machines: int, outer_recipe: str | None
) -> None:
    if size != HOST and not (size.isdecimal() and int(size) > 0):
        raise ConfigError(
            f"is {size!r}; use a number of processes, or `{HOST}` for those of one machine.", "island_size"
        )
    if is_sharded:
        raise ConfigError(
            f"is {size}, but with FSDP the processes that share a sharded model are an island. Set "
            f"{GRID}dp_shard_size to their number instead.",
            "island_size",
        )
    if outer_recipe is None:
        raise ConfigError(
            f"is {size}, which is for an outer loop, but there is no --outer. Set one, or leave out "
            "island_size: all processes then average gradients in every step.",
            "island_size",
        )
    if size == HOST:
        if num_machines == 1 and num_processes != 1:
            raise ConfigError(
                f"is {HOST}, but there is one machine, so --outer {outer_recipe} has nothing to average. "
                "Use a number of processes.",
                "island_size",
            )
        return
    if num_processes is not None and (num_processes % int(size) or num_processes == int(size) > 1):
        raise ConfigError(
            f"is {size}, but there are {counted(num_processes, 'process')}. Islands are of equal "
            "size, and several: use a smaller divisor of the number of processes.",
            "island_size",
        )
