# SPDX-License-Identifier: Apache-2.0
"""Which submodules of a model get which hooks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from farflung.big_model.hooks import AlignDevicesHook, LayerwiseCastingHook, SkipKeys, add_hook_to_module
from farflung.big_model.offload import PrefixedDataset
from farflung.big_model.tensors import Device, TiedWeights, all_tensors

CAST_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)


@dataclass(frozen=True)
class _Attacher:
    """What all hooks of one model share."""

    weights_map: Mapping[str, Tensor] | None
    offload_buffers: bool
    skip_keys: SkipKeys
    preload: Sequence[str]
    ties: TiedWeights | None

    def hook(
        self, module: nn.Module, device: Device | None, path: str | None = None, append: bool = False, **more: Any
    ) -> None:
        """Attach one hook; with a `path`, it knows the weights below it. `more` are arguments of `AlignDevicesHook`."""
        if path is not None and self.weights_map is not None:
            more["weights_map"] = PrefixedDataset(self.weights_map, f"{path}." if path else "")
        hook = AlignDevicesHook(
            device, offload_buffers=self.offload_buffers, skip_keys=self.skip_keys, tied_params_map=self.ties, **more
        )
        add_hook_to_module(module, hook, append)

    def is_preloaded(self, module: nn.Module) -> bool:
        return type(module).__name__ in self.preload

    def execute(self, module: nn.Module, device: Device) -> None:
        """Make a module and its submodules run on a device, except those that have hooks."""
        if not hasattr(module, "_hf_hook") and next(all_tensors(module, recurse=True), None) is not None:
            self.hook(module, device)
        for child in () if self.is_preloaded(module) else module.children():
            self.execute(child, device)

    def align(self, module: nn.Module, device: Device | None, offload: bool, path: str) -> None:
        """Attach a hook to each submodule that has tensors of its own."""
        whole = offload and self.is_preloaded(module)
        if whole or next(all_tensors(module), None) is not None:
            self.hook(module, device, path, append=True, offload=offload, place_submodules=whole)
        for name, child in () if whole else module.named_children():
            self.align(child, device, offload, _joined(path, name))

    def blocks(self, module: nn.Module, devices: Mapping[str, Any], offload: Mapping[str, bool], path: str) -> None:
        """Attach hooks to the modules that two maps name, and to those whose own tensors they name."""
        is_root = path == ""
        if path in devices and path in offload and not offload[path]:
            self.hook(module, devices[path], path, io_same_device=is_root, place_submodules=True)
            self.execute(module, devices[path])
        elif path in devices and path in offload:
            self.align(module, devices[path], True, path)
            if not hasattr(module, "_hf_hook"):
                self.hook(module, devices[path], io_same_device=is_root)
            self.execute(module, devices[path])
        else:
            own = [name for name in (_joined(path, name) for name, _ in all_tensors(module)) if name in offload]
            if is_root or own:
                device = devices.get("") if is_root else devices[own[0]]
                self.hook(module, device, path, io_same_device=is_root, offload=any(offload[name] for name in own))
        for name, child in module.named_children():
            self.blocks(child, devices, offload, _joined(path, name))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: SkipKeys = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedWeights | None = None,
) -> None:
    """Make a module and its submodules bring their inputs and weights to a device, except those that have hooks.

    Submodules of `preload_module_classes` get no hooks; the other arguments are those of `AlignDevicesHook`.
    """
    attacher = _Attacher(None, False, skip_keys, preload_module_classes or (), tied_params_map)
    attacher.execute(module, execution_device)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: SkipKeys = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedWeights | None = None,
) -> None:
    """Attach an `AlignDevicesHook` to each submodule that has tensors of its own.

    Args:
        execution_device, offload, offload_buffers, skip_keys, tied_params_map: see `AlignDevicesHook`.
        weights_map: the weights by their names in the model.
        module_name: the name of `module` in the model.
        preload_module_classes: names of classes that get the weights of all their submodules at once, because they use
            weights of submodules that they don't call.
    """
    ties = TiedWeights(module) if tied_params_map is None else tied_params_map
    attacher = _Attacher(weights_map, offload_buffers, skip_keys, preload_module_classes or (), ties)
    attacher.align(module, execution_device, offload, module_name)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: SkipKeys = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedWeights | None = None,
) -> None:
    """Attach an `AlignDevicesHook` to each block of a model. Arguments are those of `attach_align_device_hook`.

    There is one `execution_device` and one `offload` for all, or one for each name of a module or tensor.
    """
    ties = TiedWeights(module) if tied_params_map is None else tied_params_map
    attacher = _Attacher(weights_map, offload_buffers, skip_keys, preload_module_classes or (), ties)
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            attacher.align(module, execution_device, True, module_name)
        else:
            attacher.hook(module, execution_device, io_same_device=True, place_submodules=True)
        return
    names = list(execution_device if isinstance(execution_device, Mapping) else offload)  # type: ignore[arg-type]
    devices = execution_device if isinstance(execution_device, Mapping) else dict.fromkeys(names, execution_device)
    asked = offload if isinstance(offload, Mapping) else dict.fromkeys(names, offload)
    attacher.blocks(module, devices, asked, module_name)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Keep the weights of linear and convolutional layers in one dtype, and compute in another one.

    Args:
        skip_modules_pattern: regular expressions; what is below a module whose name has one of them is left as it is.
        skip_modules_classes: classes of modules that are left as they are, with what is below them.
        non_blocking: do not wait for the conversions.
    """
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()

    def attach(inner: nn.Module, path: str) -> None:
        if isinstance(inner, skip_modules_classes or ()) or any(re.search(pattern, path) for pattern in patterns):
            return
        if isinstance(inner, CAST_LAYERS):
            add_hook_to_module(inner, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
            return
        for name, child in inner.named_children():
            attach(child, _joined(path, name))

    attach(module, "")
