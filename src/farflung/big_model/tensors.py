# SPDX-License-Identifier: Apache-2.0
"""The tensors of a module by name: walking over them, putting one of them elsewhere, and which names share one."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from farflung.base.errors import ConfigError, Unsupported, WrongType
from farflung.base.torch_internals import own_buffers, own_parameters, passing_buffers
from farflung.config import environ
from farflung.tools.memory import clear_device_cache

Device: TypeAlias = "int | str | torch.device"

_QUANTIZED = ("Int8Params", "FP4Params", "Params4bit")  # bitsandbytes' parameters quantize what they are given
_log = logging.getLogger("farflung.utils.modeling")


def as_device(device: Device) -> torch.device:
    """Return `device` as torch's own, with an index: a bare `cuda` is the first GPU."""
    known = torch.device(device)
    is_indexed = known.index is not None or known.type in ("cpu", "meta")
    return known if is_indexed else torch.device(known.type, 0)


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Return whether two devices are one, where `cuda` is `cuda:0`."""
    return as_device(first_device) == as_device(second_device)


def as_dtype(dtype: Any) -> Any:
    """Return the dtype that a text such as `float16` or `torch.float16` names; anything else is returned as it is."""
    return getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype


# ---- walking


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a module, then its buffers, by name.

    With `recurse` those of all submodules too; `remove_non_persistent` leaves out buffers that a state dict has not,
    `remove_duplicate` all names of a shared one but the first.
    """
    yield from module.named_parameters(recurse=recurse, remove_duplicate=remove_duplicate)
    if include_buffers:
        left_out = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set()
        for name, buffer in module.named_buffers(recurse=recurse, remove_duplicate=remove_duplicate):
            if name not in left_out:
                yield name, buffer


all_tensors = partial(named_module_tensors, remove_duplicate=False)  # a shared one under each of its names


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of the buffers that are not part of the state dict; with `fqns`, full names from `module` on."""
    owners = dict(module.named_modules(remove_duplicate=False)) if recurse else {"": module}
    return {
        f"{path}.{name}" if fqns and path else name for path, one in owners.items() for name in passing_buffers(one)
    }


def owner_of(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    """Return the submodule that holds the parameter or buffer `tensor_name`, and its name there."""
    path, _, name = tensor_name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError as error:
        raise ConfigError(f"{type(module).__name__} has no tensor {tensor_name!r}: {error}.") from None
    if own_parameters(owner).get(name) is None and own_buffers(owner).get(name) is None:
        raise ConfigError(f"{type(module).__name__} has no parameter and no buffer named {tensor_name!r}.")
    return owner, name


def get_tensor(module: nn.Module, tensor_name: str) -> Tensor:
    """Return the parameter or buffer of this name."""
    owner, name = owner_of(module, tensor_name)
    tensor: Tensor = getattr(owner, name)
    return tensor


# ---- sharing


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the names of the parameters that are one and the same, a sorted list for each of them.

    Keyword arguments are accepted and have no meaning.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make the names of each group stand for one parameter again: the first of them that has values, or the first."""
    for group in tied_params:
        tensors = sorted((get_tensor(model, name) for name in group), key=lambda tensor: tensor.is_meta)
        for name in group:
            owner, own_name = owner_of(model, name)
            setattr(owner, own_name, tensors[0])


class TiedWeights:
    """The parameters that several names of a model share, and the copies of them that exist now, by device.

    A copy that another module has on a device is used again, so a shared weight takes its memory once, and names that
    share a parameter share its stand-in on the meta device too. Nothing here keeps a tensor alive.
    """

    def __init__(self, model: nn.Module) -> None:
        self._copies: Any = WeakIdKeyDictionary()
        for names in find_tied_parameters(model):
            self.note(get_tensor(model, names[0]), get_tensor(model, names[0]))

    def copy_on(self, tensor: Tensor, device: torch.device) -> Tensor | None:
        """Return the copy on `device` of a shared parameter, or None."""
        copies = self._copies.get(tensor)
        copy: Tensor | None = None if copies is None else copies.get(str(device))
        return copy

    def note(self, tensor: Tensor, copy: Tensor) -> None:
        """Remember that `copy` is `tensor` on another device."""
        copies = self._copies.setdefault(tensor, WeakValueDictionary())
        copies[str(as_device(copy.device))] = copy
        self._copies[copy] = copies

    def is_shared(self, tensor: Tensor) -> bool:
        return tensor in self._copies

    def groups(self, model: nn.Module) -> list[list[str]]:
        """Return the names of `model` that share a parameter, also if they hold copies on several devices now."""
        names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names[id(self._copies.get(parameter, parameter))].append(name)
        return [group for group in names.values() if len(group) > 1]


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether a model of transformers is configured to share weights, such as input and output embeddings."""
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return False
    config: Any = getattr(model, "config", None)
    decoder = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    if getattr(decoder, "tie_word_embeddings", False) and model.get_output_embeddings() is not None:  # type: ignore[operator]
        return True
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False):
        return True
    return any(hasattr(module, "_tie_weights") for module in model.modules())


def warn_if_untied(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Warn of a model whose configuration says that weights are shared, and whose weights are not."""
    if not tied_params and check_tied_parameters_in_config(model):
        name = type(model).__name__
        _log.warning("%s is configured to share weights and does not: call its tie_weights() first.", name)


def check_tied_parameters_on_same_device(
    tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Device]
) -> None:
    """Warn of parameters that are one and the same and that a device map sends to different devices."""
    for group in tied_params:
        devices = {name: device_for(name, device_map) for name in group}
        if len(set(devices.values())) > 1:
            _log.warning("Parameters that share memory go to different devices: %s. Send them to one.", devices)


def device_for(name: str, device_map: Mapping[str, Device]) -> Device:
    """Return the device of the entry that covers `name` most closely; raise ConfigError if none does."""
    path = name
    while path and path not in device_map:
        path = path.rpartition(".")[0]
    if path not in device_map:
        raise ConfigError(f"The device map has no device for {name}. Add it, a module that holds it, or '' for all.")
    return device_map[path]


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Return what identifies the memory of a tensor while it lives: device, address, bytes."""
    storage = tensor.untyped_storage()
    return tensor.device, 0 if tensor.is_meta else storage.data_ptr(), storage.nbytes()


# ---- moving


def like_parameter(old: nn.Parameter, data: Tensor) -> nn.Parameter:
    """Return a parameter of `data` with the class, the attributes and `requires_grad` of `old`."""
    requires_grad = old.requires_grad and (data.is_floating_point() or data.is_complex())
    if isinstance(data, nn.Parameter) and type(data) is type(old) is not nn.Parameter:
        new = data  # a class of its own that takes its state along when it moves
    elif issubclass(type(old), nn.Parameter):
        new = type(old)(data, requires_grad=requires_grad)  # type: ignore[call-arg, unused-ignore]
    else:  # a tensor subclass that is marked as a parameter
        new = nn.Parameter(data.detach(), requires_grad=requires_grad)
    for name, value in vars(old).items():
        new.__dict__.setdefault(name, value)
    return new


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: TiedWeights | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put a parameter or buffer of a module on a device, with another value if one is given.

    A parameter that moves or gets a value is replaced by a new one; make optimizers that hold the old one again.

    Args:
        tensor_name: its name from `module` on.
        value: of the same shape. Needed if the tensor is on the meta device.
        dtype: which the tensor is converted to; the tensor's present one by default. Integers are never converted.
        tied_params_map: the weights that the model shares: if a copy of one is on the device, it is used again.
        clear_cache: give memory that torch keeps on a GPU back to it.

    Raises:
        ConfigError: there is no such tensor, its shape is another one, or there is no value.
        Unsupported: bitsandbytes' 8-bit statistics or parameters.
    """
    if fp16_statistics is not None:
        raise _no_bitsandbytes()
    if tied_params_map is not None and not isinstance(tied_params_map, TiedWeights):
        raise WrongType("tied_params_map must be TiedWeights(model): addresses of memory are used again by others.")
    owner, name = owner_of(module, tensor_name)
    old: Tensor = getattr(owner, name)
    target = as_device(device)
    ties = tied_params_map if tied_params_map is not None and tied_params_map.is_shared(old) else None
    present = None if ties is None else ties.copy_on(old, target)
    if present is not None and present is not old:
        own_parameters(owner)[name] = present
        return
    if value is None and old.is_meta and target.type != "meta":
        raise ConfigError(f"{tensor_name} is on the meta device, so it needs a value to be put on {target}.")
    with torch.no_grad():
        new = converted(tensor_name, old, value, as_dtype(dtype)).to(target, non_blocking=non_blocking)
    if name in own_buffers(owner):
        own_buffers(owner)[name] = new
    elif new is not old:
        made = like_parameter(old, new)  # type: ignore[arg-type]
        own_parameters(owner)[name] = made
        if ties is not None:
            ties.note(old, made)
    if clear_cache and target.type not in ("cpu", "meta"):
        clear_device_cache()


def converted(name: str, old: Tensor, value: Any, dtype: torch.dtype | None) -> Tensor:
    """Return what is to be stored, in its dtype, where it lies now."""
    if value is None:
        return old if dtype is None or not _is_real(old) else old.to(dtype)
    if type(old).__name__ in _QUANTIZED:
        raise _no_bitsandbytes()
    tensor = value if isinstance(value, Tensor) else torch.tensor(value)
    if tensor.shape != old.shape:
        raise ConfigError(f"{name} has shape {list(old.shape)}, and the value for it {list(tensor.shape)}.")
    if dtype is None:
        return tensor.to(old.dtype)
    return tensor.to(dtype) if _is_real(tensor) else tensor


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _no_bitsandbytes() -> Unsupported:
    return Unsupported(
        "Weights that bitsandbytes quantizes are not set one by one. Load the model with transformers and "
        "BitsAndBytesConfig, or quantize it with torchao."
    )


# ---- making


def init_empty_weights(include_buffers: bool | None = None) -> AbstractContextManager[None]:
    """Make modules in this block with parameters on the meta device: shapes without memory.

    Whether buffers are put there too, the variable `ACCELERATE_INIT_INCLUDE_BUFFERS` decides by default.
    """
    return init_on_device(torch.device("meta"), include_buffers)


@contextmanager
def init_on_device(device: torch.device, include_buffers: bool | None = None) -> Iterator[None]:
    """Make modules in this block with parameters on `device`. What is shared stays shared.

    `include_buffers` makes all tensors there, buffers too; see `init_empty_weights`.
    """
    target = torch.device(device)
    if include_buffers is None:
        include_buffers = environ.flag("ACCELERATE_INIT_INCLUDE_BUFFERS")
    if include_buffers:
        with target:
            yield
        return
    register = nn.Module.register_parameter
    moved: Any = WeakIdKeyDictionary()  # by parameter, which may be registered under several names

    def register_there(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device != target:
            if param not in moved:
                moved[param] = like_parameter(param, param.to(target))
            param = moved[param]
        register(module, name, param)

    nn.Module.register_parameter = register_there  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
