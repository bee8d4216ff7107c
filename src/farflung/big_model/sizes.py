# SPDX-License-Identifier: Apache-2.0
"""How many bytes the parts of a model take, and how many each device has for them."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn

from farflung.base.errors import ConfigError
from farflung.base.sizes import num_bytes
from farflung.big_model.tensors import as_dtype, named_module_tensors

Part: TypeAlias = "tuple[str, nn.Module | Tensor]"  # a module, parameter or buffer, with its name

_log = logging.getLogger(__name__)


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
        dtype: which floating-point tensors will be converted to, where it is smaller than theirs.
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
    if torch.backends.mps.is_available():
        free["mps"] = available
    elif not shares_memory:  # otherwise the same memory would be counted twice
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
    accelerator = "mps" if torch.backends.mps.is_available() else "cuda"
    usable = [d for d in memory if (isinstance(d, int) or str(d).split(":")[0] == accelerator) and memory[d] > 0]
    gpus = sorted(d for d in usable if isinstance(d, int))
    if not usable:
        return memory
    low_zero = low_zero and len(usable) > 1 and 0 in memory
    if len(usable) == 1 and max_memory is None and gpus:
        memory[gpus[0]] = int(memory[gpus[0]] * 0.9)  # activations need some of it
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    share = sizes[""] // (len(usable) - 1 if low_zero else len(usable))
    share += _slack(model, sizes, names_of(no_split_module_classes))
    for gpu in gpus[:-1]:  # the last one takes what is left
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
