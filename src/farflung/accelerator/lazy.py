# SPDX-License-Identifier: Apache-2.0
"""What this room seldom uses of the outer loop and other rooms, loaded at its first use, not with the Accelerator.

Python collects all garbage, torch's too, when an import makes some ten thousand objects: 0.08 s in mid-import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farflung.accelerator.join import join_uneven_inputs as join_uneven_inputs
    from farflung.big_model.load import get_state_dict_offloaded_model as get_state_dict_offloaded_model
    from farflung.checkpoint.export import save_sharded as save_sharded
    from farflung.checkpoint.manager import CheckpointGroup as CheckpointGroup
    from farflung.checkpoint.save import save_object as save_object
    from farflung.checkpoint.sharded import (
        ShardPlanner as ShardPlanner,
        ShardReader as ShardReader,
        merge_shards as merge_shards,
    )
    from farflung.config.fp8 import AORecipeKwargs as AORecipeKwargs
    from farflung.config.launch import launched_outer as launched_outer, outer_variables as outer_variables
    from farflung.config.outer import renamed as renamed
    from farflung.config.parallelism import (
        ParallelismConfig as ParallelismConfig,
        parallelism_from_environment as parallelism_from_environment,
    )
    from farflung.config.sharding import (
        FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
        enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
        fsdp_from_environment as fsdp_from_environment,
    )
    from farflung.outer.asked import check_model as check_model
    from farflung.outer.engine import OuterLoop as OuterLoop
    from farflung.outer.named import (
        OuterConfig as OuterConfig,
        chosen_recipe as chosen_recipe,
        named_outer as named_outer,
        recipe_of as recipe_of,
    )
    from farflung.outer.recipes import local_sgd as local_sgd
    from farflung.precision.fp8 import Float8 as Float8
    from farflung.tools.memory import release_memory as release_memory
    from farflung.tools.profile import profile as profile
    from farflung.tracking.base import GeneralTracker as GeneralTracker
    from farflung.tracking.tracking import Tracking as Tracking

_WHERE = {
    "CheckpointGroup": "farflung.checkpoint.manager",
    "ShardPlanner": "farflung.checkpoint.sharded",
    "ShardReader": "farflung.checkpoint.sharded",
    "merge_shards": "farflung.checkpoint.sharded",
    "get_state_dict_offloaded_model": "farflung.big_model.load",
    "AORecipeKwargs": "farflung.config.fp8",
    "FullyShardedDataParallelPlugin": "farflung.config.sharding",
    "ParallelismConfig": "farflung.config.parallelism",
    "enable_fsdp_ram_efficient_loading": "farflung.config.sharding",
    "fsdp_from_environment": "farflung.config.sharding",
    "parallelism_from_environment": "farflung.config.parallelism",
    "Float8": "farflung.precision.fp8",
    "GeneralTracker": "farflung.tracking.base",
    "OuterLoop": "farflung.outer.engine",
    "Tracking": "farflung.tracking.tracking",
    "check_model": "farflung.outer.asked",
    "chosen_recipe": "farflung.outer.named",
    "OuterConfig": "farflung.outer.named",
    "join_uneven_inputs": "farflung.accelerator.join",
    "launched_outer": "farflung.config.launch",
    "local_sgd": "farflung.outer.recipes",
    "named_outer": "farflung.outer.named",
    "outer_variables": "farflung.config.launch",
    "profile": "farflung.tools.profile",
    "recipe_of": "farflung.outer.named",
    "release_memory": "farflung.tools.memory",
    "save_object": "farflung.checkpoint.save",
    "save_sharded": "farflung.checkpoint.export",
    "renamed": "farflung.config.outer",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
