# SPDX-License-Identifier: Apache-2.0
"""What happens around a module's forward pass: hooks that see all arguments, and bring weights and inputs together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from farflung.base.errors import ConfigError, StateError
from farflung.base.torch_internals import own_buffers, own_parameters
from farflung.base.tree import find_device, send_to_device
from farflung.big_model.stand_in import made
from farflung.big_model.tensors import (
    Device,
    TiedWeights,
    all_tensors,
    as_device,
    find_tied_parameters,
    owner_of,
    retie_parameters,
    set_module_tensor_to_device,
)
from farflung.tools.memory import clear_device_cache

SkipKeys: TypeAlias = "str | list[str] | None"

GUARDED = ("to", "cuda", "xpu")  # the methods that `dispatch_model` guards on the model that it dispatched
# Moves arguments. Dataclass instances stay the same objects, since layers may keep state in them.
_send = functools.partial(send_to_device, into_dataclasses=False)


class ModelHook:
    """Code around a module's forward pass: before it, after it, and when the hook is attached and removed."""

    no_grad = False  # run the forward pass without gradients

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is attached; returns the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before the forward pass; returns the arguments for it."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after the forward pass; returns what the caller gets."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is removed; returns the module."""
        return module


class SequentialHook(ModelHook):
    """Several hooks, each of which is called in turn."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Attach a hook to a module, in place of the one that it has or (`append`) after it, and return the module."""
    old = getattr(module, "_hf_hook", None)
    if old is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(old, hook) if append else hook
    module._old_forward = module.forward  # type: ignore[assignment]
    module = hook.init_hook(module)
    module._hf_hook = hook  # type: ignore[assignment]
    forward = functools.partial(_hooked_forward, module)
    module.forward = functools.update_wrapper(forward, module._old_forward)  # type: ignore[arg-type]
    return module


def _hooked_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    hook: ModelHook = module._hf_hook
    args, kwargs = _eagerly(hook.pre_forward, module, *args, **kwargs)
    with torch.no_grad() if hook.no_grad else nullcontext():
        output = module._old_forward(*args, **kwargs)
    return _eagerly(hook.post_forward, module, output)


def _eagerly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a call outside the graphs that `torch.compile` builds: weights that come and go are no part of them."""
    if torch.compiler.is_compiling():
        call = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
    return call(*args, **kwargs)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove a module's hook (with `recurse`, those of all submodules too), give its `forward` back, and return it."""
    if recurse:
        remove_hook_from_submodules(module)
        return module
    hook: Any = vars(module).pop("_hf_hook", None)
    if hook is not None:
        hook.detach_hook(module)
    forward = vars(module).pop("_old_forward", None)
    if getattr(forward, "__func__", None) is type(module).forward:
        del module.forward
    elif forward is not None:  # somebody had replaced it before
        module.forward = forward
    for name in GUARDED:
        vars(module).pop(name, None)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and of all its submodules. Names that shared a weight share it again."""
    hooks = [hook for inner in module.modules() for hook in align_hooks(inner)]
    ties = next((hook.tied_params_map for hook in hooks if hook.tied_params_map is not None), None)
    groups = find_tied_parameters(module) if ties is None else ties.groups(module)
    for inner in module.modules():
        remove_hook_from_module(inner)
    if hooks:
        retie_parameters(module, groups)


@dataclass(eq=False, repr=False)
class AlignDevicesHook(ModelHook):
    """Brings a module's weights and its inputs to one device for the forward pass.

    Args:
        execution_device: where the forward pass runs; by default wherever weights and inputs are.
        offload: take the weights from `weights_map` before each forward pass and drop them afterwards.
        io_same_device: put the output where the input was.
        weights_map: the weights by name. To offload, by default a copy on the CPU; what it lacks stays on
            `execution_device`. Without offloading, it has values for what is on the meta device.
        offload_buffers: offload buffers too.
        place_submodules: see to the weights of all submodules, not only to the module's own.
        skip_keys: keyword arguments, and keys of outputs, that are not moved.
        tied_params_map: the weights that the model shares.
    """

    execution_device: Device | None = None
    offload: bool = False
    io_same_device: bool = False
    weights_map: Mapping[str, Tensor] | None = None
    offload_buffers: bool = False
    place_submodules: bool = False
    skip_keys: SkipKeys = None
    tied_params_map: TiedWeights | None = None

    def __post_init__(self) -> None:
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self._stand_ins: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )

    def init_hook(self, module: nn.Module) -> nn.Module:
        tensors = list(all_tensors(module, recurse=self.place_submodules))
        if self.offload:
            self.original_devices = {name: tensor.device for name, tensor in tensors}
            if self.weights_map is None:
                self.weights_map = {name: tensor.detach().to("cpu") for name, tensor in self._offloaded(module)}
            offloaded = {name for name, _ in self._offloaded(module)}
        for name, tensor in tensors:
            if self.offload and name in offloaded:
                self._stand_ins[name] = self._take_out(module, name)
            elif self.offload and tensor.is_meta:
                raise ConfigError(
                    f"{name} of {type(module).__name__} is on the meta device and its weights_map lacks it, so there "
                    "are no values for it. Load it before it is dispatched."
                )
            elif self.execution_device is not None:
                is_elsewhere = tensor.is_meta and as_device(self.execution_device).type != "meta"
                value = (self.weights_map or {}).get(name) if is_elsewhere else None
                self._set(module, name, self.execution_device, value)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.offload:
            for name, _ in self._offloaded(module):
                self._bring(module, name)
        if self.execution_device is None:
            return args, kwargs
        device = as_device(self.execution_device)
        return _send(args, device), _send(kwargs, device, skip_keys=self.skip_keys)

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self.offload:
            for name, tensor in self._offloaded(module):
                self._drop(module, name, tensor)
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for name, device in self.original_devices.items():
            if device.type != "meta":
                value = self.weights_map[name] if name in self._stand_ins and self.weights_map is not None else None
                set_module_tensor_to_device(module, name, device, value=value)
        self.original_devices, self._stand_ins = {}, {}
        return module

    def _offloaded(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        """Return the tensors that are offloaded: those in `weights_map`, if there is one; of buffers what is saved."""
        tensors_here = all_tensors(module, self.offload_buffers, self.place_submodules, remove_non_persistent=True)
        return [(name, value) for name, value in tensors_here if self.weights_map is None or name in self.weights_map]

    def _set(self, module: nn.Module, name: str, device: Device, value: Tensor | None = None) -> None:
        set_module_tensor_to_device(
            module, name, device, value=value, tied_params_map=self.tied_params_map, clear_cache=False
        )

    def _bring(self, module: nn.Module, name: str) -> None:
        """Put an offloaded tensor in place for a forward pass."""
        assert self.weights_map is not None
        owner, own_name = owner_of(module, name)
        ties, stand_in = self.tied_params_map, getattr(owner, own_name)
        present = None
        if ties is not None and self.execution_device is not None:
            present = ties.copy_on(stand_in, as_device(self.execution_device))
        if present is not None:  # another name of a shared weight is in use: it is not read again
            own_parameters(owner)[own_name] = present
            return
        value = self.weights_map[name]
        device = value.device if self.execution_device is None else self.execution_device
        self._set(module, name, device, value)
        _guard_gradient(getattr(owner, own_name))

    def _drop(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        """Take a tensor out again: its stand-in returns, or a new one if the module was changed meanwhile."""
        stand_in = self._stand_ins.get(name)
        if stand_in is None or (stand_in.shape, stand_in.dtype) != (tensor.shape, tensor.dtype):
            self._take_out(module, name)
            return
        _put(module, name, stand_in)

    def _take_out(self, module: nn.Module, name: str) -> Tensor:
        """Put a stand-in, new unless another name of the weight has one, in the place of a tensor, and return it."""
        self._set(module, name, "meta")
        owner, own_name = owner_of(module, name)
        held: Tensor = getattr(owner, own_name)
        if type(held) in (Tensor, nn.Parameter):  # other classes are kept, since libraries look for theirs
            held = made(held, _Waiting(self, type(module).__name__, name))
            if self.tied_params_map is not None and self.tied_params_map.is_shared(getattr(owner, own_name)):
                self.tied_params_map.note(getattr(owner, own_name), held)
            _put(module, name, held)
        return held


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    owner, own_name = owner_of(module, name)
    held: Any = own_parameters(owner) if own_name in own_parameters(owner) else own_buffers(owner)
    held[own_name] = tensor


@dataclass(frozen=True)
class _Waiting:
    """An offloaded weight where its hook finds it."""

    hook: AlignDevicesHook
    owner: str
    name: str

    def fetch(self, stand_in: Tensor) -> Tensor:
        weights, device, ties = self.hook.weights_map, self.hook.execution_device, self.hook.tied_params_map
        assert weights is not None
        present = None if ties is None or device is None else ties.copy_on(stand_in, as_device(device))
        if present is not None and present is not stand_in:  # it is, if a model runs on the meta device
            return present
        with torch.no_grad():
            value = weights[self.name].detach().to(stand_in.dtype)
            value = value if device is None else value.to(as_device(device))
        return _guard_gradient(value.detach().requires_grad_(stand_in.requires_grad))

    def __str__(self) -> str:
        return f"{getattr(self.hook.weights_map, 'prefix', '')}{self.name} of {self.owner}"


def _guard_gradient(weights: Tensor) -> Tensor:
    if weights.requires_grad and torch.is_grad_enabled():
        weights.register_post_accumulate_grad_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
    return weights


def _refuse_gradient(parameter: Tensor) -> None:
    raise StateError(
        f"Weights of shape {list(parameter.shape)} are offloaded, so the gradient computed for them would "
        "be lost. Freeze them (requires_grad_(False)), or train the model without offloading."
    )


def align_hooks(module: nn.Module) -> list[AlignDevicesHook]:
    """Return the hooks of a module itself that align devices, also those in a sequence of hooks."""

    def within(hook: Any) -> list[AlignDevicesHook]:
        inner = getattr(hook, "hooks", ())  # of a sequence
        return [hook] if isinstance(hook, AlignDevicesHook) else [one for each in inner for one in within(each)]

    return within(getattr(module, "_hf_hook", None))


def weights_of(model: nn.Module) -> list[Any]:
    """Return the weights from which the hooks of a model and of its submodules take what is offloaded."""
    maps = [hook.weights_map for inner in model.modules() for hook in align_hooks(inner)]
    return [getattr(weights, "dataset", weights) for weights in maps]


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether a hook of the module itself offloads its weights."""
    return any(hook.offload for hook in align_hooks(module))


@contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Have the module's own weights on a device, by default where its hook runs it, for the length of a block."""
    hooks = [hook for hook in align_hooks(module) if hook.offload]
    if hooks:
        before = [hook.execution_device for hook in hooks]
        try:
            for hook in hooks:
                hook.execution_device = hook.execution_device if execution_device is None else execution_device
                hook.pre_forward(module)
            yield
        finally:
            for hook, device in zip(hooks, before, strict=True):
                hook.post_forward(module, None)
                hook.execution_device = device
    elif execution_device is not None:
        parameters = dict(module.named_parameters(recurse=False))
        try:
            for name in parameters:
                set_module_tensor_to_device(module, name, execution_device)
            yield
        finally:
            for name, parameter in parameters.items():
                value = parameter if getattr(module, name).is_meta else None
                set_module_tensor_to_device(module, name, parameter.device, value)
    else:
        yield


@dataclass(eq=False)
class UserCpuOffloadHook:
    """A model that runs on a device and goes back to the CPU when its user says so."""

    model: nn.Module
    hook: ModelHook

    def offload(self) -> None:
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        remove_hook_from_module(self.model)


class CpuOffload(ModelHook):
    """Keeps a model on the CPU until it is called; then it stays on the device until `init_hook` is called again.

    Args:
        execution_device: by default the first accelerator, or the CPU if there is none.
        prev_module_hook: of the model before it in a pipeline, which goes back to the CPU when this one is called.
    """

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        if execution_device is None:
            execution_device = as_device(torch.accelerator.current_accelerator(check_available=True) or "cpu")
        self.execution_device = execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
            clear_device_cache()
        device = as_device(self.execution_device)
        module.to(device)
        return _send(args, device), _send(kwargs, device)


@dataclass(eq=False)
class LayerwiseCastingHook(ModelHook):
    """Keeps a module's weights in one dtype, and computes in another one."""

    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    non_blocking: bool

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output
