# SPDX-License-Identifier: Apache-2.0
"""Accelerate's free functions that few scripts call: files, copies of one rank's tensor, blocks of mixed precision,
nested tensors, questions about a module, and plain values.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from farflung.accelerator.operations import extract_model_from_parallel
from farflung.accelerator.session import flushed, opened_session
from farflung.base.checks import check_path, check_whole, wrong_type
from farflung.base.enums import DistributedType
from farflung.base.errors import CollectiveMismatch, ConfigError, ShapeMismatch, WrongType
from farflung.base.sizes import num_bytes
from farflung.base.tree import (
    convert_to_fp32,
    flatten,
    is_container,
    leaves_of,
    not_a_tensor,
    recursively_apply,
    unflatten,
)
from farflung.checkpoint.writer import save_object, without_aliases
from farflung.comm import collectives
from farflung.compat import defined_in
from farflung.config.handlers import AutocastKwargs
from farflung.process.bootstrap import join_world

_HALVES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Give every process the tensor of the one that has it; the others bring None and need not know its shape.

    Raises CollectiveMismatch, on every process, unless exactly one has a tensor.
    """
    world = join_world()
    exchange, name = flushed(world.exchange), "copy_tensor_to_devices"
    forms = collectives.gather_object(exchange, [get_data_structure(tensor)], name=name)
    owners = [rank for rank, form in enumerate(forms) if form is not None]
    if len(owners) != 1:
        raise CollectiveMismatch(
            f"copy_tensor_to_devices: ranks {owners} of {world.size} brought a tensor; exactly one rank must."
        )
    here = initialize_tensors(forms[owners[0]]) if tensor is None else tensor
    result: torch.Tensor = collectives.broadcast(exchange, here.to(world.device), owners[0], name)
    return result


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write `obj` to `f` on the first process (of each machine with `save_on_each_node`). Talks to no one.

    With `safe_serialization` a dictionary of tensors is written as safetensors instead of with `torch.save`.
    """
    if not hasattr(f, "write"):
        f = check_path("save: f", f)
    world = join_world()
    if world.is_local_main if save_on_each_node else world.is_main:
        save_object(obj, f, safe_serialization)


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items that safetensors can hold: contiguous tensors, and of those that are one tensor the first.

    What is no tensor is kept as it is.
    """
    kept = without_aliases({name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)})
    return {
        name: kept[name].contiguous().resolve_conj().resolve_neg() if name in kept else value
        for name, value in state_dict.items()
        if name in kept or not isinstance(value, torch.Tensor)
    }


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return a block in which the mixed precision that the `Accelerator` was made with computes, if `native_amp`."""
    if not native_amp:
        return nullcontext()
    session = opened_session()
    handler = autocast_kwargs or AutocastKwargs()
    handler.check()
    arguments = handler.to_kwargs()
    arguments.pop("outputs_to_fp32", None)
    return torch.autocast(session.world.device.type, dtype=_HALVES.get(session.mixed_precision), **arguments)


class ConvertOutputsToFp32:
    """A function whose half-precision outputs are converted to fp32."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> tuple[Callable[..., Any], Any]:
        # A method is pickled by its name, which stands for this object once a model has it as its forward.
        forward = self.model_forward
        return (forward.__func__, forward.__self__) if isinstance(forward, MethodType) else (forward, None)

    def __setstate__(self, state: tuple[Callable[..., Any], Any]) -> None:
        function, owner = state
        self.__init__(function if owner is None else MethodType(function, owner))  # type: ignore[misc]


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does what `model_forward` does, and converts half-precision outputs to fp32."""
    return ConvertOutputsToFp32(model_forward)


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a `torch.amp.GradScaler` for this machine's kind of device (`distributed_type` is unused)."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return torch.amp.GradScaler("cpu" if device is None else device.type, **kwargs)


@contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Open a block that changes nothing: without DeepSpeed's ZeRO-3, each parameter is whole on its rank."""
    yield


def is_peft_model(model: Any) -> bool:
    """Return whether `model`, or what is inside it, is a PeftModel."""
    kinds = type(extract_model_from_parallel(model)).__mro__
    return any(kind.__module__.split(".")[0] == "peft" and kind.__name__ == "PeftModel" for kind in kinds)


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a `tqdm.auto.tqdm` bar, silent on all but each machine's first process unless told otherwise."""
    from tqdm.auto import tqdm as bar  # type: ignore[import-untyped]

    if main_process_only and not kwargs.get("disable"):
        kwargs["disable"] = not join_world().is_local_main
    return bar(*args, **kwargs)


# ---- nested tensors: their batch size, shapes and structure, and how they are cut and joined


def find_batch_size(data: Any) -> int:
    """Return the first dimension of the first leaf of a tree, which must be a tensor that has one."""
    leaf = data
    while is_container(leaf):
        children = leaves_of(leaf)
        if not children:
            raise ConfigError(f"find_batch_size: this {type(leaf).__name__} is empty. Bring one that holds tensors.")
        leaf = children[0]
    if not isinstance(leaf, Tensor):
        raise not_a_tensor("find_batch_size", leaf)
    if leaf.dim() == 0:
        raise ConfigError("find_batch_size: a tensor without dimensions has no batch size. Bring one of one sample.")
    return leaf.shape[0]


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return what `find_batch_size` does, None if it raises."""
    try:
        return find_batch_size(data)
    except ConfigError:
        return None


@dataclass
class TensorInformation:
    """A tensor's shape and dtype: what is needed to make room for it."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: Any) -> bool:
    """Return whether `tensor_info` is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def get_data_structure(data: Any) -> Any:
    """Replace every tensor of a tree by its `TensorInformation`."""
    return recursively_apply(lambda x: TensorInformation(x.shape, x.dtype), data)


def get_shape(data: Any) -> Any:
    """Replace every tensor of a tree by the list of its sizes."""
    return recursively_apply(lambda x: list(x.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Replace every `TensorInformation` of a tree by a tensor of that form on the CPU, without values yet."""
    return recursively_apply(
        lambda form: torch.empty(form.shape, dtype=form.dtype), data_structure, test_type=is_tensor_information
    )


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Take `tensor_slice` of the first dimension of every tensor of a tree (the last two arguments are unused)."""
    if not isinstance(tensor_slice, (slice, tuple)):
        raise wrong_type("slice_tensors: tensor_slice", tensor_slice, "a slice, such as slice(0, 2)")
    return recursively_apply(lambda x: x[tensor_slice], data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate trees of one structure, tensor by tensor.

    Raises WrongType for trees of other structures or leaves, ShapeMismatch for shapes that differ beyond `dim`.
    """
    if not isinstance(data, (list, tuple)) or not data:
        raise wrong_type("concatenate: data", data, "a list of nested tensors of one structure")
    flat = [flatten(tree) for tree in data]
    if any(spec != flat[0][1] for _, spec in flat[1:]):
        specs = ", ".join(str(spec) for _, spec in flat)
        raise WrongType(f"concatenate: the structures differ: {specs}. Bring nested tensors of one structure.")
    if len(data) == 1:
        return data[0]
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    for leaf in (leaf for column in columns for leaf in column if not isinstance(leaf, Tensor)):
        raise wrong_type("concatenate: something in data", leaf, "a tensor, as nothing else can be concatenated")
    try:
        joined = [torch.cat(column, dim=dim) for column in columns]
    except (RuntimeError, IndexError, TypeError) as error:
        shapes = ", ".join(str([list(x.shape) for x in column]) for column in columns)
        what = f"concatenate: tensors of the shapes {shapes} can't be joined along dim={dim!r}."
        raise ShapeMismatch(what) from error
    return unflatten(flat[0][1], joined)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Repeat the last sample of every tensor of a tree until `num_processes` ranks get equally many.

    Args:
        batch_size: the number of samples along `dim`.
    """
    check_whole("pad_input_tensors: num_processes", num_processes, least=1)
    missing = -batch_size % num_processes

    def padded(x: Tensor) -> Tensor:
        return torch.cat([x, *[x.narrow(dim, x.shape[dim] - 1, 1)] * missing], dim)

    return recursively_apply(padded, tensor, error_on_other_type=True)


# ---- questions about a module, which need no run


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return `model` and all modules in it, or with `return_fqns` pairs of name and module, inner ones first."""
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    modules: list[tuple[str, nn.Module]] = []
    while waiting:
        name, module = waiting.pop()
        modules.append((name, module))
        prefix = f"{name}." if name else ""
        waiting += [(prefix + child, inner) for child, inner in module.named_children()]
    modules.reverse()
    return [*modules] if return_fqns else [module for _, module in modules]


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class called `name` of a module in `module`, or None if there is no such module."""
    return next((type(inner) for inner in module.modules() if type(inner).__name__ == name), None)


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device | str
) -> set[nn.Parameter]:
    """Return the parameters of some modules of `model`; None stands for none of them.

    Instead of modules, a regular expression can be given that their names match; they are moved to `device` then.
    """
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [module.to(device) for name, module in model.named_modules() if pattern.fullmatch(name)]
    return {parameter for module in modules or () for parameter in module.parameters()}


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return among how many ranks transformers has cut each layer of `model`, or None if it has not."""
    size = getattr(model, "tp_size", None)  # transformers 4
    if size is None:
        config: Any = getattr(getattr(model, "config", None), "distributed_config", None)  # transformers 5
        size = config.get("tp_size") if isinstance(config, dict) else getattr(config, "tp_size", None)
    return size


# ---- plain values


def convert_bytes(size: float) -> str:
    """Return a number of bytes with the largest unit that fits, of 1024 each: `1.5 MB`."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def convert_file_size_to_int(size: int | str) -> int:
    """Return a size in bytes; see `num_bytes`."""
    return num_bytes(size, "size", least=0)


def merge_dicts(source: Mapping[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Put the items of `source` into `destination`, those of inner dictionaries one by one, and return it."""
    for key, value in source.items():
        destination[key] = merge_dicts(value, destination.get(key, {})) if isinstance(value, dict) else value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return an attribute of an attribute, by a name with dots: `layer.weight.dtype`."""
    return functools.reduce(getattr, attr.split("."), obj)


def get_pretty_name(obj: Any) -> str:
    """Return the name of a function or a class, or that of the class of anything else."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


__all__ = defined_in(globals())
