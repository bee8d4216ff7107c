# SPDX-License-Identifier: Apache-2.0
"""Names of the outer loop and other rooms that this room seldom uses: loaded on first use, not with the Accelerator.

Python collects all garbage, torch's too, when an import makes some ten thousand objects: 0.08 s in mid-import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farflung.accelerator.join import join_uneven_inputs as join_uneven_inputs
    from farflung.accelerator.outer import AttachedLoop as AttachedLoop, driving as driving
    from farflung.big_model.load import get_state_dict_offloaded_model as get_state_dict_offloaded_model
    from farflung.checkpoint.export import save_sharded as save_sharded
    from farflung.checkpoint.manager import CheckpointGroup as CheckpointGroup
    from farflung.checkpoint.writer import save_object as save_object
    from farflung.config.launch import launched_outer as launched_outer
    from farflung.config.parallelism import (
        ParallelismConfig as ParallelismConfig,
        parallelism_from_environment as parallelism_from_environment,
    )
    from farflung.config.sharding import (
        FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
        enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
        fsdp_from_environment as fsdp_from_environment,
    )
    from farflung.data.slots import Slots as Slots
    from farflung.integrations.elastic import slots_of as slots_of
    from farflung.outer.arguments import (
        OuterConfig as OuterConfig,
        check_model as check_model,
        chosen_recipe as chosen_recipe,
        named_outer as named_outer,
        recipe_of as recipe_of,
    )
    from farflung.outer.driver import EpochTracker as EpochTracker
    from farflung.outer.recipes import local_sgd as local_sgd
    from farflung.precision.fp8 import Float8 as Float8
    from farflung.resume.models import gathered_model as gathered_model
    from farflung.tools.memory import release_memory as release_memory
    from farflung.tracking.base import GeneralTracker as GeneralTracker
    from farflung.tracking.tracking import Tracking as Tracking

_WHERE = {
    name: f"farflung.{module}"
    for module, names in {
        "accelerator.checkpointer": "Checkpointer",  # not among the types above: it uses the session, which uses this
        "accelerator.join": "join_uneven_inputs",
        "accelerator.outer": "AttachedLoop driving",
        "big_model.load": "get_state_dict_offloaded_model",
        "checkpoint.export": "save_sharded",
        "checkpoint.manager": "CheckpointGroup",
        "checkpoint.writer": "save_object",
        "config.launch": "launched_outer",
        "config.parallelism": "ParallelismConfig parallelism_from_environment",
        "config.sharding": "FullyShardedDataParallelPlugin enable_fsdp_ram_efficient_loading fsdp_from_environment",
        "data.slots": "Slots",
        "integrations.elastic": "slots_of",
        "outer.driver": "EpochTracker",
        "outer.arguments": "OuterConfig check_model chosen_recipe named_outer recipe_of",
        "outer.recipes": "local_sgd",
        "precision.fp8": "Float8",
        "resume.models": "gathered_model",
        "tools.memory": "release_memory",
        "tracking.base": "GeneralTracker",
        "tracking.tracking": "Tracking",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
