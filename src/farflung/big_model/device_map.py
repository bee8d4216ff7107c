# SPDX-License-Identifier: Apache-2.0
"""Device maps: which module goes to which GPU, to the CPU or to the disk."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from farflung.base.errors import ConfigError
from farflung.base.torch_internals import passing_buffers
from farflung.big_model.sizes import (
    CustomDtype,
    Part,
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_max_layer_size,
    get_max_memory,
    names_of,
    parts_of,
)
from farflung.big_model.tensors import Device, all_tensors, find_tied_parameters, warn_if_untied

_log = logging.getLogger(__name__)


def infer_auto_device_map(
    model: nn.Module,
    max_memory: dict[Any, Any] | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    dtype: str | torch.dtype | CustomDtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype | CustomDtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Any]:
    """Return a device map for a model: GPUs are filled in turn, then the CPU, and the disk takes the rest.

    Modules are placed in their order and split where they don't fit. The first GPU (the CPU where there is none) and
    the CPU keep room for the largest layer that remains, because what is offloaded later is computed there. The model
    may be on the meta device.

    Args:
        max_memory: bytes for each device; see `get_max_memory`.
        no_split_module_classes: names of classes whose modules stay in one piece.
        dtype: which the weights will be loaded in.
        special_dtypes: dtypes of single weights, by name.
        verbose: print each decision.
        clean_result: name a module once instead of all its parts where they go to one device.
        offload_buffers: whether buffers of offloaded modules will be offloaded too.
        fallback_allocation: where a device would stay empty, look for a later module that fits there.

    Returns:
        a device for each module: a number of a GPU, `mps`, `cpu` or `disk`.
    """
    memory = get_max_memory(max_memory)
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    ties = find_tied_parameters(model)
    warn_if_untied(model, ties)
    placement = _Placement(memory, sizes, ties, names_of(no_split_module_classes), parts_of(model), verbose)
    placement.run(fallback_allocation)
    if not offload_buffers:
        _check_buffers(model, placement, dtype, special_dtypes)
    return clean_device_map(placement.found) if clean_result else placement.found


class _Placement:
    """One run over the parts of a model, from the first device to the disk."""

    def __init__(
        self,
        memory: Mapping[Any, int],
        sizes: Mapping[str, float],
        ties: list[list[str]],
        no_split: list[str],
        parts: list[Part],
        verbose: bool,
    ) -> None:
        self.memory = memory
        self.gpus = [device for device in memory if device not in ("cpu", "disk")]
        self.found: dict[str, Any] = {}
        self.used: dict[Any, float] = dict.fromkeys((*memory, "disk"), 0)
        self._devices = list(self.used)
        self._reserving = ["mps"] if "mps" in self.gpus else [*self.gpus[:1], "cpu"]
        self._sizes, self._ties, self._no_split = sizes, ties, no_split
        self._waiting = parts
        self._verbose = verbose
        self._largest, self._largest_names = get_max_layer_size(parts, sizes, no_split)

    def run(self, fallback: bool) -> None:
        while self._waiting:
            name, module = self._waiting.pop(0)
            self._look_for_largest(name)
            tied = self._tied_outside(name, self._waiting)
            whole = self._sizes[name] + sum(self._sizes[other] for other, _ in tied)
            room = self._room()
            if whole <= room:
                self._put([name, *(other for other, _ in tied)], whole)
            elif not self._split_one(name, module, tied, room) and not (
                fallback and self._take_what_fits(name, module, whole)
            ):
                self._go_on(name, module, whole)

    def _split_one(self, name: str, module: nn.Module | Tensor, tied: list[Part], room: float) -> bool:
        """Split what shares weights with a module that would fit alone, or the module. False: nothing can be split."""
        size = self._sizes[name]
        if tied and size <= room and any(self._split(other, inner, (name, module)) for other, inner in tied):
            return True
        return size >= room and self._split(name, module)

    @property
    def _device(self) -> Any:
        return self._devices[0]

    @property
    def _reserved(self) -> float:
        return self._largest if self._device in self._reserving else 0

    def _room(self) -> float:
        if self._device == "disk":
            return float("inf")
        return self.memory[self._device] - self._reserved - self.used[self._device]

    def _say(self, text: str) -> None:
        if self._verbose:
            print(text)

    def _put(self, names: list[str], size: float) -> None:
        self._say(f"{', '.join(names)} ({size} bytes) -> {self._device}, which has {self._room()} left")
        self.used[self._device] += size
        self.found.update(dict.fromkeys(names, self._device))
        self._waiting = [(name, module) for name, module in self._waiting if name not in names]

    def _split(self, name: str, module: nn.Module | Tensor, before: Part | None = None) -> bool:
        """Replace a module by its parts, with `before` in front of all that waits. False: it can't be split."""
        parts = [] if type(module).__name__ in self._no_split else _children(name, module)
        if not parts:
            return False
        self._say(f"{name} is split: {self._device} has {self._room()} bytes left and it needs {self._sizes[name]}")
        if before is None:
            self._waiting = parts + self._waiting
        else:
            index = [other for other, _ in self._waiting].index(name)
            self._waiting = [before, *self._waiting[:index], *parts, *self._waiting[index + 1 :]]
        self._measure_largest()
        return True

    def _take_what_fits(self, name: str, module: nn.Module | Tensor, whole: float) -> bool:
        """Move the first part that fits on a device which is still empty to the front. False: there is none."""
        if self.used[self._device] or self._device == "disk":
            return False
        limit = self.memory[self._device] - max(self._largest, whole)
        searched = list(self._waiting)
        while searched:
            other, inner = searched.pop(0)
            tied = self._tied_outside(other, [(name, module), *searched])
            if self._sizes[other] + sum(self._sizes[one] for one, _ in tied) <= limit:
                self._waiting = [(other, inner), (name, module), *_without(self._waiting, other)]
                return True
            if type(inner).__name__ not in self._no_split:
                searched = _children(other, inner) + searched
        return False

    def _go_on(self, name: str, module: nn.Module | Tensor, whole: float) -> None:
        """Turn to the next device."""
        if not self.used[self._device]:
            needed = whole + self._reserved
            _log.info("No module fits on %s: insufficient memory, it would take %s bytes.", self._device, needed)
        self._say(f"{name} does not fit on {self._device}")
        self.used[self._device] += self._reserved
        self._devices.pop(0)
        self._waiting.insert(0, (name, module))

    def _look_for_largest(self, name: str) -> None:
        """Measure the layers that remain once the largest ones have been taken."""
        self._largest_names = [other for other in self._largest_names if not _is_within(other, name)]
        if not self._largest_names:
            self._measure_largest()

    def _measure_largest(self) -> None:
        modules: list[Part] = [(name, part) for name, part in self._waiting if isinstance(part, nn.Module)]
        self._largest, self._largest_names = get_max_layer_size(modules, self._sizes, self._no_split)

    def _tied_outside(self, name: str, parts: list[Part]) -> list[Part]:
        """Return the parts that hold a parameter which is also in `name`."""
        found: dict[str, nn.Module | Tensor] = {}
        for group in self._ties:
            outside = [other for other in group if not _is_within(other, name)]
            for other in outside if len(outside) < len(group) else ():
                found.update(next(([part] for part in parts if _is_within(other, part[0])), ()))
        return list(found.items())


def _children(name: str, module: nn.Module | Tensor) -> list[Part]:
    """Return the parts of a module that has children. Buffers that are not saved go where the module is run."""
    if not isinstance(module, nn.Module) or next(module.children(), None) is None:
        return []
    parts = [part for part in parts_of(module) if part[0] not in passing_buffers(module)]
    return [(f"{name}.{own}", part) for own, part in parts]


def _without(parts: list[Part], name: str) -> list[Part]:
    """Return `parts` without `name`, where the modules that hold it are replaced by their parts."""
    found: list[Part] = []
    for own, part in parts:
        if own != name:
            found += _without(_children(own, part), name) if _is_within(name, own) else [(own, part)]
    return found


def _is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _check_buffers(model: nn.Module, placement: _Placement, dtype: Any, special_dtypes: Any) -> None:
    """Warn where the buffers of offloaded modules, which stay on a GPU, may have no room there."""
    needed: float = 0
    for name, device in placement.found.items():
        module = model.get_submodule(name) if name in dict(model.named_modules()) else None
        if device in ("cpu", "disk") and module is not None:
            needed += compute_module_total_buffer_size(module, dtype, special_dtypes)
    left = [placement.memory[gpu] - placement.used[gpu] for gpu in placement.gpus]
    if needed and left and max(left) < needed:
        warnings.warn(
            f"The buffers of offloaded modules take {needed} bytes, and no GPU has so many left. If memory runs out, "
            "use offload_buffers=True.",
            stacklevel=3,
        )


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Name a module (`module_name`, or each) once instead of all its parts where they go to one device, in place."""
    prefix = f"{module_name}." if module_name else ""
    parts = [name for name in device_map if name.startswith(prefix)]
    if len(parts) > 1 and len({device_map[name] for name in parts}) == 1:
        device = device_map[parts[0]]
        for name in parts:
            del device_map[name]
        device_map[module_name] = device
    depth = module_name.count(".") + 2 if module_name else 1
    children = [name for name in device_map if name.startswith(prefix) and len(name) > len(module_name)]
    for child in dict.fromkeys(".".join(name.split(".")[:depth]) for name in children):
        clean_device_map(device_map, child)
    return device_map


def check_device_map(model: nn.Module, device_map: Mapping[str, Device]) -> None:
    """Raise ConfigError if a device map lacks a parameter or saved buffer of a model; warn of other names in it."""
    known = {"", *(name for name, _ in model.named_modules(remove_duplicate=False))}
    known.update(name for name, _ in all_tensors(model, recurse=True))
    unknown = [name for name in device_map if name not in known]
    if unknown:
        warnings.warn(
            f"device_map keys do not match any submodules of {type(model).__name__}: {unknown}.", stacklevel=2
        )
    if "" in device_map:
        return
    left = [name for name in model.state_dict() if not any(_is_within(name, module) for module in device_map)]
    if left:
        raise ConfigError(f"The device map has no device for {', '.join(left)}.")
