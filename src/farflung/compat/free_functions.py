# SPDX-License-Identifier: Apache-2.0
"""Accelerate's free functions that few scripts call: files, copies of one rank's tensor, blocks of mixed precision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch

from farflung.accelerator import session as slot
from farflung.accelerator.operations import broadcast, extract_model_from_parallel, gather_object
from farflung.base.checks import check_path
from farflung.base.devices import current_accelerator
from farflung.base.enums import DistributedType
from farflung.base.errors import CollectiveMismatch
from farflung.base.optional import is_available
from farflung.base.tree import convert_to_fp32
from farflung.checkpoint.writer import save_object, without_aliases
from farflung.compat.nested_tensors import get_data_structure, initialize_tensors
from farflung.config.handlers import AutocastKwargs
from farflung.process.bootstrap import join_world

_HALVES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Give every process the tensor of the one that has it; the others bring None and need not know its shape.

    Raises CollectiveMismatch, on every process, unless exactly one has a tensor.
    """
    world = join_world()
    forms = gather_object([get_data_structure(tensor)])
    owners = [rank for rank, form in enumerate(forms) if form is not None]
    if len(owners) != 1:
        raise CollectiveMismatch(
            f"copy_tensor_to_devices: ranks {owners} of {world.size} brought a tensor; exactly one rank must."
        )
    here = initialize_tensors(forms[owners[0]]) if tensor is None else tensor
    result: torch.Tensor = broadcast(here.to(world.device), owners[0])
    return result


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write `obj` to `f` on the first process (of each machine with `save_on_each_node`). Talks to no one.

    With `safe_serialization` a dictionary of tensors is written as safetensors instead of with `torch.save`.
    """
    if not hasattr(f, "write"):
        check_path("save: f", f)
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
    session = slot.opened()
    arguments = (autocast_kwargs or AutocastKwargs()).to_kwargs()
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
    device = current_accelerator()
    return torch.amp.GradScaler("cpu" if device is None else device.type, **kwargs)


@contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Open a block that changes nothing: without DeepSpeed's ZeRO-3, each parameter is whole on its rank."""
    yield


def is_peft_model(model: Any) -> bool:
    """Say whether `model`, or what is inside it, is a PeftModel."""
    if not is_available("peft"):
        return False
    kinds = type(extract_model_from_parallel(model)).__mro__
    return any(kind.__module__.split(".")[0] == "peft" and kind.__name__ == "PeftModel" for kind in kinds)


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a `tqdm.auto.tqdm` bar, silent on all but each machine's first process unless told otherwise."""
    from tqdm.auto import tqdm as bar  # type: ignore[import-untyped]

    if main_process_only and not kwargs.get("disable"):
        kwargs["disable"] = not join_world().is_local_main
    return bar(*args, **kwargs)
