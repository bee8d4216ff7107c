# SPDX-License-Identifier: Apache-2.0
"""Checks on what `Accelerator` is given, made before any process group starts."""

from __future__ import annotations

import warnings
from typing import Any

from farflung.accelerator.recipes import recipe_of
from farflung.base.enums import DynamoBackend
from farflung.base.errors import ConfigError, Unsupported
from farflung.config import environ
from farflung.config.compile import TorchDynamoPlugin
from farflung.config.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    WatchdogKwargs,
)
from farflung.config.launch import launched_outer
from farflung.config.outer import OuterConfig

_HANDLERS = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    WatchdogKwargs,
)

_INSTEAD = {
    "deepspeed_plugin": "DeepSpeed is not done; use DDP, or an outer loop over it",
    "deepspeed_plugins": "DeepSpeed is not done; use DDP, or an outer loop over it",
    "megatron_lm_plugin": "Megatron-LM is not done; use DDP, or an outer loop over it",
    "fsdp_plugin": "FSDP is not done yet; use DDP, or an outer loop over it",
    "torch_tp_plugin": "tensor parallelism is not done; use DDP",
    "parallelism_config": "parallelism configurations are not done yet; use DDP",
    "log_with": "trackers are not done yet; call yours on the main process (`accelerator.is_main_process`)",
}


def refuse_engines(**given: Any) -> None:
    """Refuse what Farflung does not do.

    Raises:
        Unsupported: one of the arguments asks for something.
    """
    for name, value in given.items():
        if value is not None:
            raise Unsupported(f"{name}={value!r}: {_INSTEAD[name]}.")


def settled_compile(backend: DynamoBackend | str | None, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """Return how to compile models: as the plugin, the backend, or the environment says.

    Raises:
        ConfigError: both a plugin and a backend, or a backend that there is not.
    """
    if plugin is not None and backend is not None:
        raise ConfigError(f"dynamo_backend={str(backend)!r} and a dynamo_plugin were both given. Give one of them.")
    return plugin or TorchDynamoPlugin(backend=backend)


def settled_outer(outer: OuterConfig | None) -> OuterConfig | None:
    """Return the outer loop that the script or the launcher asks for, None where neither does.

    Raises:
        ConfigError: both ask, for different ones; or one that can't be is asked for.
    """
    launched = launched_outer()
    if outer is not None and launched is not None and outer != launched:
        raise ConfigError(
            f"The script asks for {outer.recipe} with {outer.given()} (Accelerator(outer=)), the launcher for "
            f"{launched.recipe} with {launched.given()} (--outer, FARFLUNG_OUTER_*). Leave one of them out."
        )
    found = outer or launched
    if found is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is said when the recipe is used
            recipe_of(found, local_size=2)
    return found


def handlers_by_kind(handlers: list[KwargsHandler]) -> dict[type, Any]:
    """Return the handlers by their class.

    Raises:
        ConfigError: something that is no handler, or two of one class.
    """
    found: dict[type, Any] = {}
    for handler in handlers:
        if not isinstance(handler, _HANDLERS):
            names = ", ".join(kind.__name__ for kind in _HANDLERS)
            raise ConfigError(f"kwargs_handlers has {handler!r}; it takes {names}.")
        if type(handler) in found:
            raise ConfigError(f"kwargs_handlers has two {type(handler).__name__}; give one.")
        found[type(handler)] = handler
    return found


def settled_accumulation(
    steps: int | None, plugin: GradientAccumulationPlugin | None
) -> GradientAccumulationPlugin | None:
    """Return how to accumulate gradients: as the plugin, the argument, or the launcher says; None when none does.

    The launcher counts before an argument of 1, which is what many scripts pass on when nobody has told them anything.

    Raises:
        ConfigError: both a plugin and a number of steps, or a number that can't be.
    """
    if plugin is not None:
        if steps not in (None, 1):
            raise ConfigError(
                f"gradient_accumulation_steps={steps} and a GradientAccumulationPlugin with num_steps="
                f"{plugin.num_steps} were both given. Give one of them."
            )
        return plugin
    if steps in (None, 1):
        steps = environ.integer("ACCELERATE_GRADIENT_ACCUMULATION_STEPS") or steps
    return None if steps is None else GradientAccumulationPlugin(num_steps=steps)
