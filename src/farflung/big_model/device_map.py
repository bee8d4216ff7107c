# SPDX-License-Identifier: Apache-2.0
"""Device maps: how many bytes a model's parts take, and which of them goes to which GPU, to the CPU or to the disk."""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn

from farflung.base.errors import ConfigError
from farflung.base.sizes import num_bytes
from farflung.base.torch_internals import passing_buffers
from farflung.big_model.tensors import (
    Device,
    all_tensors,
    as_dtype,
    find_tied_parameters,
    named_module_tensors,
    warn_if_untied,
)

_log = logging.getLogger("farflung.utils.modeling")

Part: TypeAlias = "tuple[str, nn.Module | Tensor]"  # a module, parameter or buffer, with its name


class CustomDtype(Enum):
    """A kind of numbers that has no torch dtype."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


_CUSTOM_BYTES = {CustomDtype.FP8: 1, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> float:
    """Return how many bytes one value of `dtype` takes."""
    if isinstance(dtype, CustomDtype):
        return _CUSTOM_BYTES[dtype]
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype_byte_size: {dtype!r} is no dtype.")
    return dtype.itemsize


def compute_module_sizes(
    model: nn.Module,
    dtype: str | torch.dtype | CustomDtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype | CustomDtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, float]:
    """Return the bytes of each module, parameter and buffer by name; `''` is the whole model, unknown names are 0.

    Args:
        dtype: which floating-point tensors will be converted to, if it is smaller than theirs.
        special_dtypes: dtypes of single tensors, by name.
    """
    special = {name: dtype_byte_size(as_dtype(kind)) for name, kind in (special_dtypes or {}).items()}
    largest = float("inf") if dtype is None else dtype_byte_size(as_dtype(dtype))
    sizes: dict[str, float] = defaultdict(int)
    for name, tensor in model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True):
        size = dtype_byte_size(tensor.dtype)
        if name in special:
            size = special[name]
        elif tensor.is_floating_point() or tensor.is_complex():
            size = min(size, largest)
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            sizes[".".join(parts[:depth])] += tensor.numel() * size
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: str | torch.dtype | CustomDtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype | CustomDtype] | None = None,
) -> float:
    """Return the bytes of all buffers of a model; see `compute_module_sizes`."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_max_layer_size(
    modules: list[Part], module_sizes: Mapping[str, float], no_split_module_classes: Iterable[str]
) -> tuple[float, list[str]]:
    """Return the size of the largest layer, and the names of those that are so large.

    A layer is a module without children or of a class that is not to be split.
    """
    largest: float = 0
    names: list[str] = []
    waiting = list(modules)
    while waiting:
        name, module = waiting.pop(0)
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if children and type(module).__name__ not in no_split_module_classes:
            waiting = [(f"{name}.{child}", inner) for child, inner in children] + waiting
        elif module_sizes[name] > largest:
            largest, names = module_sizes[name], [name]
        elif module_sizes[name] == largest:
            names.append(name)
    return largest, names


def parts_of(model: nn.Module) -> list[Part]:
    """Return what a model consists of at its top: its own parameters, its children, its own buffers."""
    return [*model.named_parameters(recurse=False), *model.named_children(), *model.named_buffers(recurse=False)]


def calculate_maximum_sizes(model: nn.Module) -> tuple[float, tuple[float, list[str]]]:
    """Return the bytes of a model, and its largest layer as `get_max_layer_size` does."""
    sizes = compute_module_sizes(model)
    no_split = getattr(model, "_no_split_modules", None) or []
    return sizes[""], get_max_layer_size(parts_of(model), sizes, no_split)


def get_module_leaves(module_sizes: Mapping[str, float]) -> list[str]:
    """Return the names that are no part of another name's path."""
    parents = {name.rpartition(".")[0] for name in module_sizes if "." in name}
    return [name for name in module_sizes if name and name not in parents]


# ---- memory


def get_max_memory(max_memory: dict[Any, Any] | None = None) -> dict[Any, Any]:
    """Return how many bytes each device has for a model: GPUs by number, then `mps`, `cpu` and `disk`.

    `max_memory` says what is allowed (by default, what is free now), as bytes or as texts with a unit, which are
    replaced by bytes in this very dictionary, as callers of Accelerate expect.
    """
    if max_memory is None:
        return _free_memory()
    for device, size in max_memory.items():
        if isinstance(size, str):
            max_memory[device] = num_bytes(size, f"max_memory of {device}", least=0)
    gpus = sorted(device for device in max_memory if isinstance(device, int))
    for gpu in gpus:
        if not 0 <= gpu < torch.cuda.device_count():
            _log.warning("max_memory names GPU %s, and there are %s here.", gpu, torch.cuda.device_count())
    known = [*gpus, *(device for device in ("mps", "cpu", "disk") if device in max_memory)]
    for device in max_memory:
        if device not in known:
            raise ConfigError(f"max_memory: {device!r} is no device. Use numbers of GPUs, 'mps', 'cpu' and 'disk'.")
    return {device: max_memory[device] for device in known}


def _free_memory() -> dict[Any, Any]:
    free: dict[Any, Any] = {}
    shares_memory = False
    for gpu in range(torch.cuda.device_count()):
        free[gpu] = torch.cuda.mem_get_info(gpu)[0]
        shares_memory |= bool(getattr(torch.cuda.get_device_properties(gpu), "is_integrated", False))
    available = psutil.virtual_memory().available
    if not shares_memory:  # otherwise the same memory would be counted twice
        free["cpu"] = available
    return free


def get_balanced_memory(
    model: nn.Module,
    max_memory: dict[Any, Any] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    dtype: str | torch.dtype | CustomDtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype | CustomDtype] | None = None,
    low_zero: bool = False,
) -> dict[Any, Any]:
    """Return limits for `infer_auto_device_map` with which the GPUs get about as much of the model each.

    The arguments are those of that function; `low_zero` leaves GPU 0 as empty as possible.
    """
    memory = get_max_memory(max_memory)
    gpus = [device for device in memory if isinstance(device, int) and memory[device] > 0]
    if not gpus:
        return memory
    low_zero = low_zero and len(gpus) > 1 and 0 in memory
    if len(gpus) == 1 and max_memory is None:
        memory[gpus[0]] = int(memory[gpus[0]] * 0.9)  # activations need some of it
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    share = sizes[""] // (len(gpus) - 1 if low_zero else len(gpus))
    share += _slack(model, sizes, names_of(no_split_module_classes))
    for gpu in gpus[:-1]:  # the last one takes the rest
        memory[gpu] = min(memory[0] if low_zero and gpu == 0 else share, memory[gpu])
    if low_zero:
        elsewhere = sum(memory[gpu] for gpu in gpus if gpu != 0)
        memory[0] = min(max(0, sizes[""] - elsewhere), memory[0])
    return memory


def _slack(model: nn.Module, sizes: Mapping[str, float], no_split: list[str]) -> int:
    """Return how much more than its share a GPU gets: layers are not cut, so each of them ends up with a bit less."""
    first: dict[str, float] = {}
    for name, module in model.named_modules():
        if name and name in sizes and type(module).__name__ in no_split:
            first.setdefault(type(module).__name__, sizes[name])
    tensors = set(get_module_leaves(sizes))
    modules = {name: size for name, size in sizes.items() if name not in tensors}
    leaves = get_module_leaves(modules)
    mean = int(sum(modules[name] for name in leaves) / max(len(leaves), 1))
    return int(1.25 * max(mean, *first.values()) if first else 1.25 * mean)


def names_of(classes: str | Iterable[str] | None) -> list[str]:
    """Return class names as a list: from one, several or none."""
    return [classes] if isinstance(classes, str) else list(classes or ())


def get_module_size_with_ties(
    tied_params: Sequence[str], module_size: float, module_sizes: Mapping[str, float], modules_to_treat: Sequence[Part]
) -> tuple[float, list[str], list[nn.Module | Tensor]]:
    """Return what a module takes together with those that share weights with it, and these by name and as objects.

    `tied_params` are the names of the shared weights in the other modules, `modules_to_treat`.
    """
    tied = [next(part for part in modules_to_treat if weight.startswith(f"{part[0]}.")) for weight in tied_params]
    size = sum(
        (module_sizes[part[0]] - module_sizes[weight] for part, weight in zip(tied, tied_params, strict=True)),
        module_size,
    )
    return size, [name for name, _ in tied], [module for _, module in tied]


# ---- maps


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

    Modules are placed in their order and split if they don't fit. The first GPU (the CPU if there is none) and
    the CPU keep room for the largest layer that remains, because what is offloaded later is computed there. The model
    may be on the meta device.

    Args:
        max_memory: bytes for each device; see `get_max_memory`.
        no_split_module_classes: names of classes whose modules stay in one piece.
        dtype: which the weights will be loaded in.
        special_dtypes: dtypes of single weights, by name.
        verbose: print each decision.
        clean_result: name a module once instead of all its parts if they go to one device.
        offload_buffers: whether buffers of offloaded modules will be offloaded too.
        fallback_allocation: if a device would stay empty, look for a later module that fits there.

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


@dataclass
class _Placement:
    """One run over the parts of a model, from the first device to the disk."""

    memory: Mapping[Any, int]
    sizes: Mapping[str, float]
    ties: list[list[str]]
    no_split: list[str]
    waiting: list[Part]
    verbose: bool

    def __post_init__(self) -> None:
        self.gpus = [device for device in self.memory if device not in ("cpu", "disk")]
        self.found: dict[str, Any] = {}
        self.used: dict[Any, float] = dict.fromkeys((*self.memory, "disk"), 0)
        self._devices = list(self.used)
        self._reserving = ["mps"] if "mps" in self.gpus else [*self.gpus[:1], "cpu"]
        self._largest, self._largest_names = get_max_layer_size(self.waiting, self.sizes, self.no_split)

    def run(self, fallback: bool) -> None:
        while self.waiting:
            name, module = self.waiting.pop(0)
            self._largest_names = [other for other in self._largest_names if not _is_within(other, name)]
            if not self._largest_names:  # the largest ones have been taken: measure the layers that remain
                self._measure_largest()
            tied = self._tied_outside(name, self.waiting)
            whole = self.sizes[name] + sum(self.sizes[other] for other, _ in tied)
            room = self._room()
            if whole <= room:
                self._put([name, *(other for other, _ in tied)], whole)
            elif not self._split_one(name, module, tied, room) and not (
                fallback and self._take_what_fits(name, module, whole)
            ):
                self._go_on(name, module, whole)

    def _split_one(self, name: str, module: nn.Module | Tensor, tied: list[Part], room: float) -> bool:
        """Split what shares weights with a module that would fit alone, or the module. False: nothing can be split."""
        size = self.sizes[name]
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
        if self.verbose:
            print(text)

    def _put(self, names: list[str], size: float) -> None:
        self._say(f"{', '.join(names)} ({size} bytes) -> {self._device}, which has {self._room()} left")
        self.used[self._device] += size
        self.found.update(dict.fromkeys(names, self._device))
        self.waiting = [(name, module) for name, module in self.waiting if name not in names]

    def _split(self, name: str, module: nn.Module | Tensor, before: Part | None = None) -> bool:
        """Replace a module by its parts, with `before` in front of all that waits. False: it can't be split."""
        parts = [] if type(module).__name__ in self.no_split else _children(name, module)
        if not parts:
            return False
        self._say(f"{name} is split: {self._device} has {self._room()} bytes left and it needs {self.sizes[name]}")
        if before is None:
            self.waiting = parts + self.waiting
        else:
            index = [other for other, _ in self.waiting].index(name)
            self.waiting = [before, *self.waiting[:index], *parts, *self.waiting[index + 1 :]]
        self._measure_largest()
        return True

    def _take_what_fits(self, name: str, module: nn.Module | Tensor, whole: float) -> bool:
        """Move the first part that fits on a device which is still empty to the front. False: there is none."""
        if self.used[self._device] or self._device == "disk":
            return False
        limit = self.memory[self._device] - max(self._largest, whole)
        searched = list(self.waiting)
        while searched:
            other, inner = searched.pop(0)
            tied = self._tied_outside(other, [(name, module), *searched])
            if self.sizes[other] + sum(self.sizes[one] for one, _ in tied) <= limit:
                self.waiting = [(other, inner), (name, module), *_without(self.waiting, other)]
                return True
            if type(inner).__name__ not in self.no_split:
                searched = _children(other, inner) + searched
        return False

    def _go_on(self, name: str, module: nn.Module | Tensor, whole: float) -> None:
        if not self.used[self._device]:
            needed = whole + self._reserved
            _log.info("No module fits on %s: insufficient memory, it would take %s bytes.", self._device, needed)
        self._say(f"{name} does not fit on {self._device}")
        self.used[self._device] += self._reserved
        self._devices.pop(0)
        self.waiting.insert(0, (name, module))

    def _measure_largest(self) -> None:
        modules: list[Part] = [(name, part) for name, part in self.waiting if isinstance(part, nn.Module)]
        self._largest, self._largest_names = get_max_layer_size(modules, self.sizes, self.no_split)

    def _tied_outside(self, name: str, parts: list[Part]) -> list[Part]:
        """Return the parts that hold a parameter which is also in `name`."""
        tied: dict[str, nn.Module | Tensor] = {}
        for group in self.ties:
            outside = [other for other in group if not _is_within(other, name)]
            for other in outside if len(outside) < len(group) else ():
                tied.update(next(([part] for part in parts if _is_within(other, part[0])), ()))
        return list(tied.items())


def _children(name: str, module: nn.Module | Tensor) -> list[Part]:
    """Return the parts of a module that has children. Buffers that are not saved go where the module is run."""
    if not isinstance(module, nn.Module) or next(module.children(), None) is None:
        return []
    parts = [part for part in parts_of(module) if part[0] not in passing_buffers(module)]
    return [(f"{name}.{part_name}", part) for part_name, part in parts]


def _without(parts: list[Part], name: str) -> list[Part]:
    """Return `parts` without `name`, the modules that hold it replaced by their parts."""
    rest: list[Part] = []
    for part_name, part in parts:
        if part_name != name:
            rest += _without(_children(part_name, part), name) if _is_within(name, part_name) else [(part_name, part)]
    return rest


def _is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _check_buffers(model: nn.Module, placement: _Placement, dtype: Any, special_dtypes: Any) -> None:
    """Warn if the buffers of offloaded modules, which stay on a GPU, may have no room there."""
    needed: float = 0
    for name, device in placement.found.items():
        module = model.get_submodule(name) if name in dict(model.named_modules()) else None
        if device in ("cpu", "disk") and module is not None:
            needed += compute_module_total_buffer_size(module, dtype, special_dtypes)
    left = [placement.memory[gpu] - placement.used[gpu] for gpu in placement.gpus]
    if needed and left and max(left) < needed:
        warnings.warn(
            f"The buffers of offloaded modules take {needed} bytes, and no GPU has that much left. If memory runs out, "
            "use offload_buffers=True.",
            stacklevel=3,
        )


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Name a module (`module_name`, or each) once instead of all its parts if they go to one device, in place."""
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
