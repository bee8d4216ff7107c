# SPDX-License-Identifier: Apache-2.0
"""Checks on what `Accelerator` is given, made before any process group starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from farflung.accelerator import lazy
from farflung.base.checks import (
    check_flag,
    check_number,
    check_optional,
    check_place,
    check_type,
    check_whole,
    check_word,
    shown,
    wrong_type,
)
from farflung.base.enums import DynamoBackend, RNGType
from farflung.base.errors import ConfigError, Unsupported
from farflung.config import environ
from farflung.config.compile import TorchDynamoPlugin, check_backend
from farflung.config.handlers import (
    AORecipeKwargs,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    WatchdogKwargs,
)
from farflung.precision.amp import choose_precision
from farflung.precision.base import Precision
from farflung.precision.fp8 import Float8

if TYPE_CHECKING:
    from farflung.methods.arguments import OuterConfig

_HANDLERS = (
    AORecipeKwargs,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    WatchdogKwargs,
)

_INSTEAD = {
    "deepspeed_plugin": "DeepSpeed is not supported; use DDP, or an outer loop over it",
    "deepspeed_plugins": "DeepSpeed is not supported; use DDP, or an outer loop over it",
    "megatron_lm_plugin": "Megatron-LM is not supported; use DDP, or an outer loop over it",
    "torch_tp_plugin": "tensor parallelism is not supported; use DDP",
}


def check_arguments(
    device_placement: Any,
    cpu: Any,
    step_scheduler_with_optimizer: Any,
    scheduler_ticks: Any,
    project_dir: Any,
    project_config: Any,
) -> None:
    """Check the types of the arguments of `Accelerator` that say how it trains and where files go."""
    check_flag("device_placement", device_placement)
    check_flag("cpu", cpu)
    check_flag("step_scheduler_with_optimizer", step_scheduler_with_optimizer)
    check_word("scheduler_ticks", scheduler_ticks, ("per_process", "per_update"))
    if project_dir is not None:
        check_place("project_dir", project_dir)
    check_optional("project_config", project_config, ProjectConfiguration, "a ProjectConfiguration(project_dir=...)")


def resolve_rng_types(rng_types: Any) -> list[str]:
    """Return which kinds of random numbers ranks share at the start of an iteration."""
    if rng_types is None:
        return ["generator"]
    check_type("rng_types", rng_types, (list, tuple), "a list, such as ['generator']")
    for kind in rng_types:
        check_word("Each of rng_types", kind, RNGType.list())
    return [str(kind) for kind in rng_types]


def resolve_data(config: DataLoaderConfiguration | None, split_batches: bool | None) -> DataLoaderConfiguration:
    """Return how loaders are prepared: as a configuration or `split_batches` says, but not both."""
    check_optional(
        "dataloader_config", config, DataLoaderConfiguration, "a DataLoaderConfiguration(split_batches=..., ...)"
    )
    if split_batches is not None:
        check_flag("split_batches", split_batches)
    if config is not None and split_batches is not None:
        raise ConfigError(
            f"split_batches={split_batches} and a dataloader_config were both given. Give split_batches in the "
            "DataLoaderConfiguration alone."
        )
    return config or DataLoaderConfiguration(split_batches=bool(split_batches))


def check_init(init: InitProcessGroupKwargs | None) -> InitProcessGroupKwargs | None:
    """Return `init`, whose backends torch must know."""
    for backend in (init.backend or "").split(",") if init is not None else ():
        if backend:
            check_word("backend", backend.rpartition(":")[2].lower(), dist.Backend.backend_list[1:])
    return init


def refuse_engines(**given: Any) -> None:
    """Raise Unsupported if one of the arguments asks for something."""
    for name, value in given.items():
        if value is not None:
            raise Unsupported(f"{name}={shown(value)}: {_INSTEAD[name]}.")


def resolve_compile(backend: DynamoBackend | str | None, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """Return how to compile models: as the plugin or the backend says (not both), or the environment."""
    check_optional("dynamo_plugin", plugin, TorchDynamoPlugin, "a TorchDynamoPlugin(backend=...)")
    if backend is not None:
        check_backend("dynamo_backend", backend)
    if plugin is not None and backend is not None:
        raise ConfigError(f"dynamo_backend={str(backend)!r} and a dynamo_plugin were both given. Give one of them.")
    return plugin or TorchDynamoPlugin(backend=backend)


def resolve_outer(outer: OuterConfig | str | None) -> OuterConfig | None:
    """Return the outer loop that the script or the launcher asks for; None if neither does.

    If both ask, they must ask for the same; then a report that only one of them names is used.
    """
    launched = lazy.launch.launched_outer(lambda **said: lazy.arguments.OuterConfig(**said))
    if outer is not None:
        outer = lazy.arguments.named_outer("outer", outer)
    if outer is None or launched is None:
        return outer or launched
    ours, theirs = outer.given(), launched.given()
    outputs = {name: value for name, value in (theirs | ours).items() if name == "report"}
    if (outer.recipe, outputs | ours) != (launched.recipe, outputs | theirs):
        raise ConfigError(
            f"The script asks for {outer.recipe} with {ours} (Accelerator(outer=)), the launcher for "
            f"{launched.recipe} with {theirs} (--outer, FARFLUNG_OUTER_*). Leave one of them out."
        )
    return lazy.arguments.OuterConfig(outer.recipe, **outputs | ours)


def resolve_ema(ema: float | None, every: int, has_outer: bool) -> tuple[float, int] | None:
    """Return the decay or the number of snapshots of a running mean, and the steps between two; None: there is none."""
    check_whole("ema_every", every, least=1)
    if ema is None:
        return None
    check_number("ema", ema, above=0)
    if ema >= 1:
        check_whole("ema", ema, least=2)
    if has_outer:
        raise ConfigError(
            f"is {ema}, but an outer loop trains the replicas. Use its average= (--outer-average), in rounds.", "ema"
        )
    return ema, every


def resolve_project(folder: str | os.PathLike[str] | None, given: ProjectConfiguration | None) -> ProjectConfiguration:
    """Return the configuration of a project, whose folder may be given apart from it; ConfigError if these differ."""
    project = given or ProjectConfiguration()
    if folder is not None and project.project_dir is None:
        project.set_directories(os.fspath(folder))
    elif folder is not None and str(project.project_dir) != os.fspath(folder):
        raise ConfigError(f"is {folder}, and that of project_config is {project.project_dir}: set one.", "project_dir")
    return project


def resolve_precision(name: str, device: torch.device, handlers: Mapping[type, Any], fsdp_plugin: Any) -> Precision:
    """Return the precision of this name, with the arguments that `handlers` has for it, and no others.

    Under FSDP a recipe for fp8 asks for that by itself, as in Accelerate.
    """
    autocast, scaler = handlers.get(AutocastKwargs), handlers.get(GradScalerKwargs)
    if name in ("no", "bf16") and AORecipeKwargs in handlers and fsdp_plugin is not None:
        name = "fp8"
    if name == "fp8" and scaler is None:
        return Float8(device, autocast, handlers.get(AORecipeKwargs))
    if AORecipeKwargs in handlers:
        raise ConfigError(f"An AORecipeKwargs was given, but mixed_precision is {name!r}. Give mixed_precision='fp8'.")
    return choose_precision(name, device, autocast, scaler)


def handlers_by_kind(handlers: Sequence[KwargsHandler] | None) -> dict[type, Any]:
    """Return the handlers by which of `_HANDLERS` they are; raise ConfigError for others, and for two of one kind."""
    found: dict[type, Any] = {}
    names = " or ".join(f"{kind.__name__}()" for kind in _HANDLERS)
    if handlers is not None and not isinstance(handlers, (list, tuple)):
        wanted = f"a list, such as [{type(handlers).__name__}(...)]" if isinstance(handlers, _HANDLERS) else "a list"
        raise wrong_type("kwargs_handlers", handlers, wanted)
    for handler in handlers or ():
        check_type("Each of kwargs_handlers", handler, _HANDLERS, f"one of {names}")
        kind = next(kind for kind in _HANDLERS if isinstance(handler, kind))
        if kind in found:
            raise ConfigError(f"kwargs_handlers has two {kind.__name__}; give one.")
        handler.check()
        found[kind] = handler
    return found


def resolve_accumulation(
    steps: int | None, plugin: GradientAccumulationPlugin | None
) -> GradientAccumulationPlugin | None:
    """Return how to accumulate gradients: as the plugin, the argument, or the launcher says; None if none does.

    The launcher takes precedence over an argument of 1, which many scripts pass as their own default.
    """
    wanted = "a GradientAccumulationPlugin(num_steps=...)"
    check_optional("gradient_accumulation_plugin", plugin, GradientAccumulationPlugin, wanted)
    if steps is not None:
        check_whole("gradient_accumulation_steps", steps, least=1)
    if plugin is not None:
        if steps not in (None, 1):
            raise ConfigError(
                f"gradient_accumulation_steps={steps} and a GradientAccumulationPlugin with num_steps="
                f"{plugin.num_steps} were both given. Give one of them."
            )
        plugin.check()
        return copy(plugin)  # later ones are compared with it as it is now
    if steps in (None, 1):
        steps = environ.integer("ACCELERATE_GRADIENT_ACCUMULATION_STEPS") or steps
    return None if steps is None else GradientAccumulationPlugin(num_steps=steps)
