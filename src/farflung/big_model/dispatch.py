# SPDX-License-Identifier: Apache-2.0
"""Spreading a model over devices, the CPU and the disk, so that it runs as if it were on one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from farflung.base.checks import check_word
from farflung.base.errors import ConfigError, StateError
from farflung.big_model.attach import attach_align_device_hook, attach_align_device_hook_on_blocks
from farflung.big_model.device_map import check_device_map, get_balanced_memory, infer_auto_device_map, parts_of
from farflung.big_model.hooks import (
    GUARDED,
    AlignDevicesHook,
    CpuOffload,
    SkipKeys,
    UserCpuOffloadHook,
    add_hook_to_module,
    weights_of,
)
from farflung.big_model.load import load_checkpoint_in_model
from farflung.big_model.offload import (
    Folder,
    OffloadedWeightsLoader,
    extract_submodules_state_dict,
    offload_state_dict,
    read_offload_index,
    with_shared_names,
)
from farflung.big_model.tensors import Device, TiedWeights, find_tied_parameters, retie_parameters
from farflung.process import world

_log = logging.getLogger("farflung.big_modeling")

_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Device],
    main_device: Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: Folder | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: SkipKeys = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Put the parts of a model where a device map wants them, with hooks that bring weights and inputs together.

    If all goes to one device, the model is moved there and gets no hooks. Next to a GPU, what is for the CPU waits
    there and is computed on the GPU.

    Args:
        device_map: a device for each module: a GPU's number, `cpu`, `disk` or one of torch's devices.
        main_device: where the model's inputs and offloaded modules go; by default the first GPU of the map.
        state_dict: the weights that wait on the CPU; by default the model's.
        offload_dir: the folder for what is on the disk. Weights that the model has are written there; those on the
            meta device must be there.
        offload_index: where weights on the disk are, instead; see `OffloadedWeightsLoader`.
        offload_buffers: offload buffers too.
        skip_keys: keyword arguments that are not moved.
        preload_module_classes: names of classes that get the weights of all their submodules at once.
        force_hooks: attach hooks also if all goes to one device.

    Returns:
        the model, with the map as `hf_device_map`.

    Raises:
        ConfigError: a weight has no device or no values, or there is no folder for the disk.
    """
    _check_map(model, device_map)
    devices = {name: _plain(device) for name, device in _without_overlap(model, device_map).items()}
    if len(set(devices.values())) > 1 or "disk" in devices.values() or force_hooks:
        if main_device is None:
            main_device = next((device for device in devices.values() if device not in ("cpu", "disk")), "cpu")
        main_device = _plain(main_device)
        away = ("disk",) if main_device in ("cpu", "mps") else ("cpu", "disk")
        offloadable = _offloadable(model, offload_buffers)
        on_cpu = [name for name, device in devices.items() if device == "cpu" and "cpu" in away]
        if state_dict is None and on_cpu:
            state_dict = extract_submodules_state_dict(offloadable, on_cpu)
        on_disk = extract_submodules_state_dict(
            offloadable, [name for name, device in devices.items() if device == "disk"]
        )
        ties = find_tied_parameters(model)
        index = offload_index
        if on_disk and index is None:
            if offload_dir is None:
                raise ConfigError(f"{list(on_disk)} are for the disk, and no offload_dir says where.")
            index = _written(model, on_disk, offload_dir, ties)
        weights = None
        if state_dict is not None or index is not None:
            known = with_shared_names(index or {}, ties)
            waiting = {name: value for name, value in (state_dict or {}).items() if isinstance(value, Tensor)}
            empty = [name for name, value in waiting.items() if value.is_meta and name not in known]
            if empty:
                raise ConfigError(
                    f"{empty} are for the CPU and on the meta device, so they have no values. Load them first."
                )
            waiting = {name: value for name, value in waiting.items() if not value.is_meta}
            direct = None if offload_index is None else main_device
            weights = OffloadedWeightsLoader(waiting, offload_dir, known, device=direct)
            world.add_reader(weights)  # so that no other model replaces their files
        attach_align_device_hook_on_blocks(
            model,
            execution_device={
                **{name: main_device if device in ("cpu", "disk") else device for name, device in devices.items()},
                "": main_device,
            },
            offload={name: device in away for name, device in devices.items()},
            offload_buffers=offload_buffers,
            weights_map=weights,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            tied_params_map=TiedWeights(model),
        )
        retie_parameters(model, ties)
        _guard(model)
    else:
        model.to(next(iter(devices.values())))
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def _without_overlap(model: nn.Module, device_map: Mapping[str, Device]) -> dict[str, Device]:
    """Return the same map, each module with entries for its parts replaced by its other parts."""
    device_of: dict[str, Device] = {}
    waiting = list(device_map.items())
    while waiting:
        name, device = waiting.pop(0)
        prefix = f"{name}." if name else ""
        if any(other.startswith(prefix) for other in device_map if other != name):
            parts = [f"{prefix}{part_name}" for part_name, _ in parts_of(model.get_submodule(name))]
            waiting += [(part, device) for part in parts if part not in device_map]
        else:
            device_of[name] = device
    return device_of


def _plain(device: Device) -> Device:
    """Return torch's CPU as `cpu`: a map may have both."""
    return "cpu" if isinstance(device, torch.device) and device.type == "cpu" else device


def _offloadable(model: nn.Module, offload_buffers: bool) -> dict[str, Tensor]:
    staying = set() if offload_buffers else {name for name, _ in model.named_buffers()}
    state = model.state_dict().items()  # with extra state, which may be no tensor
    return {name: value for name, value in state if isinstance(value, Tensor) and name not in staying}


def _written(
    model: nn.Module, state_dict: Mapping[str, Tensor], folder: Folder, ties: list[list[str]]
) -> dict[str, Any]:
    """Write weights into a folder, a shared one once, and return what is where; those without values must be there."""
    again = {name for group in ties for name in [name for name in group if name in state_dict][1:]}
    values = {name: value for name, value in state_dict.items() if not value.is_meta and name not in again}
    offload_state_dict(folder, values, own=weights_of(model))
    index = with_shared_names(read_offload_index(folder), ties)
    missing = [name for name in state_dict if name not in index]
    if missing:
        raise ConfigError(f"{missing} are on the meta device and not in {folder}, so they have no values. Load them.")
    return {name: index[name] for name in state_dict}  # others are of models that were there before


def _guard(model: nn.Module) -> None:
    """Refuse to move a model whose weights wait elsewhere, and warn if moving it makes no sense."""

    def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(parameter.is_meta for parameter in model.parameters()):
                raise StateError(
                    "A model with offloaded weights can't be moved. Remove its hooks, or dispatch it again."
                )
            target = [*args[:1], kwargs.get("device"), kwargs.get("tensor")]
            if method.__name__ != "to" or any(isinstance(one, (str, int, torch.device, Tensor)) for one in target):
                _log.warning("A dispatched model is moved: its hooks still bring its parts to where they were.")
            return method(*args, **kwargs)

        return call

    for name in GUARDED:
        setattr(model, name, guarded(getattr(model, name)))


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep all weights (of `state_dict`, or the model's) on the CPU; a module gets its own for its forward pass.

    By default the model runs where its first parameter is. Other arguments are those of `dispatch_model`.
    """
    if state_dict is None:
        state_dict = {name: value.to("cpu") for name, value in _offloadable(model, True).items()}
    return _offload(model, execution_device, offload_buffers, state_dict, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: Folder,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep all weights on the disk; a module gets its own for its forward pass.

    By default the model runs where its first parameter is. Other arguments are those of `dispatch_model`.
    """
    index = _written(model, _offloadable(model, offload_buffers), offload_dir, find_tied_parameters(model))
    weights = OffloadedWeightsLoader(save_folder=offload_dir, index=index)
    world.add_reader(weights)
    return _offload(model, execution_device, offload_buffers, weights, preload_module_classes)


def _offload(
    model: nn.Module,
    device: Device | None,
    offload_buffers: bool,
    weights: Mapping[str, Tensor],
    preload: list[str] | None,
) -> nn.Module:
    if device is None:
        device = next(model.parameters()).device
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(model, device, True, weights, offload_buffers, preload_module_classes=preload)
    return model


def cpu_offload_with_hook(
    model: nn.Module, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model on the CPU until it is called; then it stays on its device until the hook sends it back.

    Returns the model, and the hook with `offload()` and `remove()`. The arguments are those of `CpuOffload`.
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def _check_map(model: nn.Module, device_map: Mapping[str, Device]) -> None:
    if not getattr(model, "_no_placement_params", None):  # transformers leaves such weights out of its maps
        check_device_map(model, device_map)


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: Folder,
    device_map: str | Mapping[str, Device] | None = None,
    max_memory: dict[Any, Any] | None = None,
    no_split_module_classes: list[str] | None = None,
    offload_folder: Folder | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: SkipKeys = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load weights into a model, each to its device or to the disk, and attach the hooks with which it runs.

    Args:
        device_map: a device for each module, or `auto`, `balanced`, `balanced_low_0`, `sequential` to have one made by
            `infer_auto_device_map`. Without one, weights are loaded and that is all.

    The other arguments, and the errors, are those of `infer_auto_device_map`, `load_checkpoint_in_model` and
    `dispatch_model`.
    """
    if isinstance(device_map, str):
        check_word("device_map", device_map, _STRATEGIES)
        if device_map != "sequential":
            max_memory = get_balanced_memory(
                model, max_memory, no_split_module_classes, dtype, low_zero=device_map == "balanced_low_0"
            )
        device_map = infer_auto_device_map(
            model, max_memory, no_split_module_classes, dtype, offload_buffers=offload_buffers
        )
    if device_map is not None:
        _check_map(model, device_map)
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_state_dict=bool(offload_state_dict),
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )
