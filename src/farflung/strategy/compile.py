# SPDX-License-Identifier: Apache-2.0
"""torch.compile inside `prepare`: in place, before any wrapper, so that names and classes stay those of the model.

Compiling what DDP holds, and not DDP itself, keeps DDP's switches (`no_sync`, which buffers travel) out of the compiled
code, which would be compiled anew whenever one of them changes. Its buckets still cut the graph, so gradients travel
while the backward pass goes on: torch looks for them while the first forward pass compiles, inside DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import CodeType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from farflung.base.errors import ConfigError
from farflung.config.compile import TorchDynamoPlugin

_INSIDE = "_orig_mod"  # where torch's OptimizedModule keeps its module, and our twins the model that they stand for


def is_compiled_module(module: nn.Module) -> bool:
    """Say whether calls of `module`, or of what DDP holds in it, run compiled code."""
    module = _held(module)
    return is_optimized(module) or module._compiled_call_impl is not None


def is_optimized(module: nn.Module) -> bool:
    """Say whether `module` is the wrapper that `torch.compile(model)` returns."""
    return _INSIDE in module._modules


def has_compiled_regions(module: nn.Module) -> bool:
    """Say whether `module` or a module in it was compiled."""
    return any(map(is_compiled_module, module.modules()))


def compile_in_place(model: nn.Module, plugin: TorchDynamoPlugin) -> None:
    """Compile the calls of `model`, or of its regions, unless something of it is compiled already or none is to be."""
    model = _held(model)
    if plugin.compiles and not has_compiled_regions(model):
        _compile(_regions(model) if plugin.use_regional_compilation else [[model]], plugin.to_kwargs())


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Return a twin of `module` whose repeated blocks, and the other parts around them, are compiled one by one.

    A block is repeated when it is in a `ModuleList` of modules of one class. Equal blocks share their compiled code, so
    that a deep model compiles about as fast as one block. `module` itself stays as it is, and so do all names.

    Args:
        compile_kwargs: those of `torch.compile`.

    Raises:
        ConfigError: something of `module` is compiled already.
    """
    if has_compiled_regions(module):
        raise ConfigError(f"compile_regions: this {type(module).__name__} is already compiled, as a whole or in part.")
    other = _twin(module, {id(inner) for region in _regions(module) for inner in region}, remember=True)
    _compile(_regions(other), compile_kwargs)
    return other


def without_compile(module: nn.Module) -> nn.Module:
    """Return `module` as it computes without `torch.compile`: itself when it does, else a twin of the same tensors.

    Plain attributes of a twin, such as `training`, are those of this moment and do not follow the module's.
    """
    if is_optimized(module):
        return without_compile(module._modules[_INSIDE])  # type: ignore[arg-type]
    if _INSIDE in module.__dict__:
        return without_compile(module.__dict__[_INSIDE])
    compiled = {id(inner) for inner in module.modules() if is_compiled_module(inner)}
    return _twin(module, compiled) if compiled else module


def _held(module: nn.Module) -> nn.Module:
    while isinstance(module, DistributedDataParallel):
        module = module.module
    return module


def _regions(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield what regional compilation compiles: each list of repeated blocks, and the largest parts that have none."""
    if _is_repeated(module):
        yield list(module.children())
    elif isinstance(module, (nn.ModuleList, nn.ModuleDict)) or any(map(_is_repeated, module.modules())):
        for child in module.children():  # lists and dictionaries of modules are never called themselves
            yield from _regions(child)
    else:
        yield [module]


def _is_repeated(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList) or len(module) == 0:
        return False
    kind = type(module[0])
    return kind not in (nn.ModuleList, nn.ModuleDict) and all(isinstance(block, kind) for block in module)


def _compile(regions: Iterable[list[nn.Module]], compile_kwargs: dict[str, Any]) -> None:
    """Compile the calls of modules; those of one region share their compiled code where they are equal.

    Not `Module.compile`, which in silence compiles nothing for torch's own classes, such as `Sequential` (torch 2.13).
    """
    for region in regions:
        # torch gives a code object up that it had to compile a few times, so each region has one of its own.
        code: CodeType | None = None
        for module in region:
            call = _call_of(module)
            code = code or call.__code__.replace(co_name=type(module).__name__)
            call.__code__ = code
            module._compiled_call_impl = torch.compile(call, **compile_kwargs)


def _call_of(module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    return call


def _twin(module: nn.Module, chosen: set[int], remember: bool = False) -> nn.Module:
    """Return a copy of `module` in which the `chosen` modules, given by their ids, are not compiled.

    Those and what holds them are copied; all other modules, and all tensors, are the same objects.

    Args:
        remember: let each copy know what it was made of.
    """
    twins: dict[int, nn.Module] = {}

    def twin_of(old: nn.Module) -> nn.Module:
        if is_optimized(old):
            return twin_of(old._modules[_INSIDE])  # type: ignore[arg-type]
        if id(old) in twins:
            return twins[id(old)]
        if not any(id(inner) in chosen for inner in old.modules()):
            return old
        new = twins[id(old)] = old.__class__.__new__(old.__class__)
        new.__dict__.update(old.__dict__)
        for name, value in old.__dict__.items():
            if isinstance(value, MethodType) and value.__self__ is old:
                new.__dict__[name] = MethodType(value.__func__, new)
        children = {name: None if child is None else twin_of(child) for name, child in old._modules.items()}
        new.__dict__.update(_modules=children, _compiled_call_impl=None, **({_INSIDE: old} if remember else {}))
        return new

    return twin_of(module)
