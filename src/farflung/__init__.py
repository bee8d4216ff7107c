# SPDX-License-Identifier: Apache-2.0
"""Trains the loop you already have on far-flung machines, and talks as little as the network allows.

Names and modules (`farflung.utils`) are loaded when they are first used, so that `import farflung` costs nothing.
"""

from __future__ import annotations

import gc
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from farflung.base.oldest_torch import check_torch

if TYPE_CHECKING:
    from farflung.accelerator.accelerator import Accelerator as Accelerator
    from farflung.accelerator.local_sgd import LocalSGD as LocalSGD
    from farflung.accelerator.views import PartialState as PartialState
    from farflung.base.enums import (
        DDPCommunicationHookType as DDPCommunicationHookType,
        DistributedType as DistributedType,
    )
    from farflung.big_model.device_map import infer_auto_device_map as infer_auto_device_map
    from farflung.big_model.dispatch import (
        cpu_offload as cpu_offload,
        cpu_offload_with_hook as cpu_offload_with_hook,
        disk_offload as disk_offload,
        dispatch_model as dispatch_model,
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    )
    from farflung.big_model.load import load_checkpoint_in_model as load_checkpoint_in_model
    from farflung.big_model.tensors import init_empty_weights as init_empty_weights, init_on_device as init_on_device
    from farflung.compat.absent import DeepSpeedPlugin as DeepSpeedPlugin, prepare_pippy as prepare_pippy
    from farflung.compat.variables import is_rich_available as is_rich_available
    from farflung.config.handlers import (
        AutocastKwargs as AutocastKwargs,
        DataLoaderConfiguration as DataLoaderConfiguration,
        DistributedDataParallelKwargs as DistributedDataParallelKwargs,
        GradScalerKwargs as GradScalerKwargs,
        InitProcessGroupKwargs as InitProcessGroupKwargs,
        ProfileKwargs as ProfileKwargs,
        WatchdogKwargs as WatchdogKwargs,
    )
    from farflung.config.parallelism import ParallelismConfig as ParallelismConfig
    from farflung.config.sharding import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from farflung.data.prepare import skip_first_batches as skip_first_batches
    from farflung.integrations.as_accelerate import install_as_accelerate as install_as_accelerate
    from farflung.launch.notebook import debug_launcher as debug_launcher, notebook_launcher as notebook_launcher
    from farflung.methods.arguments import OuterConfig as OuterConfig
    from farflung.process.seed import synchronize_rng_states as synchronize_rng_states
    from farflung.tools.memory import find_executable_batch_size as find_executable_batch_size

__version__ = "0.1.0"

check_torch()

_WHERE = {
    name: f"farflung.{module}"
    for module, names in {
        "accelerator.accelerator": "Accelerator",
        "accelerator.local_sgd": "LocalSGD",
        "accelerator.views": "PartialState",
        "compat.absent": "DeepSpeedPlugin prepare_pippy",
        "base.enums": "DDPCommunicationHookType DistributedType",
        "big_model.device_map": "infer_auto_device_map",
        "big_model.dispatch": "cpu_offload cpu_offload_with_hook disk_offload dispatch_model "
        "load_checkpoint_and_dispatch",
        "big_model.load": "load_checkpoint_in_model",
        "big_model.tensors": "init_empty_weights init_on_device",
        "config.handlers": "AutocastKwargs DataLoaderConfiguration DistributedDataParallelKwargs GradScalerKwargs "
        "InitProcessGroupKwargs ProfileKwargs WatchdogKwargs",
        "config.parallelism": "ParallelismConfig",
        "config.sharding": "FullyShardedDataParallelPlugin",
        "compat.variables": "is_rich_available",
        "data.prepare": "skip_first_batches",
        "integrations.as_accelerate": "install_as_accelerate",
        "launch.notebook": "debug_launcher notebook_launcher",
        "methods.arguments": "OuterConfig",
        "process.seed": "synchronize_rng_states",
        "tools.memory": "find_executable_batch_size",
    }.items()
    for name in names.split()
}

__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(_loaded(_WHERE[name]), name)
    if name.startswith("_") or find_spec(f"farflung.{name}") is None:
        raise AttributeError(f"module 'farflung' has no attribute {name!r}")
    return _loaded(f"farflung.{name}")


def _loaded(module: str) -> Any:
    """Import a module. What is loaded stays, so the garbage collector would look through all of torch for nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return import_module(module)
    finally:
        if was_on:
            gc.enable()


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
