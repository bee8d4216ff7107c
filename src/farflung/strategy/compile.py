# SPDX-License-Identifier: Apache-2.0
"""torch.compile inside `prepare`: in place, before any wrapper, so that names and classes stay those of the model.

Compiling what DDP holds, and not DDP itself, keeps DDP's switches (`no_sync`, which buffers travel) out of the compiled
code, which would be compiled again whenever one of them changes. Its buckets still cut the graph, so gradients travel
during the backward pass: torch looks for them while the first forward pass compiles, inside DDP.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from farflung.base.errors import ConfigError
from farflung.base.torch_internals import (
    COMPILED_FROM,
    calls_compiled,
    child_slots,
    compiled_from,
    copied_module,
    plain_call,
    set_compiled_call,
)
from farflung.config.compile import TorchDynamoPlugin

# Regions share the code object of one function of ours, and torch compiles eight forms of a code object before it gives
# up. If torch can count for each region apart (2.13), it does: a model of 12 blocks and 10 heads is compiled whole.
_APART = {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether calls of `module`, or of what DDP holds in it, run compiled code."""
    module = _held(module)
    return compiled_from(module) is not None or calls_compiled(module)


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether `module` or a module in it was compiled."""
    return any(map(is_compiled_module, module.modules()))


def has_repeated_blocks(module: nn.Module) -> bool:
    """Return whether `module` or a module in it is a list of repeated blocks."""
    return any(map(is_repeated_blocks, module.modules()))


def compile_in_place(model: nn.Module, plugin: TorchDynamoPlugin) -> None:
    """Compile the calls of `model`, or of its regions, unless something of it is compiled already or none is to be."""
    model = _held(model)
    plugin.check()
    if plugin.compiles and not has_compiled_regions(model):
        _compile(_regions(model) if plugin.use_regional_compilation else [[model]], plugin.to_kwargs())


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Return a duplicate of `module` whose repeated blocks, and the other parts around them, are compiled one by one.

    A block is repeated when it is in a `ModuleList` of modules of one class. Equal blocks share their compiled code, so
    that a deep model compiles about as fast as one block. `module` itself stays as it is, and so do all names.
    `compile_kwargs` are those of `torch.compile`.
    """
    if has_compiled_regions(module):
        raise ConfigError(f"compile_regions: this {type(module).__name__} is already compiled, as a whole or in part.")
    other = _duplicate(module, {id(inner) for region in _regions(module) for inner in region}, remember=True)
    _compile(_regions(other), compile_kwargs)
    return other


def without_compile(module: nn.Module) -> nn.Module:
    """Return `module` as it computes without `torch.compile`: itself if it does, else a duplicate with its tensors.

    Plain attributes of a duplicate, such as `training`, are those of this moment and do not follow the module's.
    """
    inside = compiled_from(module) or module.__dict__.get(COMPILED_FROM)
    if inside is not None:
        return without_compile(inside)
    compiled = {id(inner) for inner in module.modules() if is_compiled_module(inner)}
    return _duplicate(module, compiled) if compiled else module


def _held(module: nn.Module) -> nn.Module:
    while isinstance(module, DistributedDataParallel):
        module = module.module
    return module


def _regions(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield what regional compilation compiles: each list of repeated blocks, and the largest parts that have none."""
    if is_repeated_blocks(module):
        yield list(module.children())
    elif isinstance(module, (nn.ModuleList, nn.ModuleDict)) or has_repeated_blocks(module):
        for child in module.children():  # lists and dictionaries of modules are never called themselves
            yield from _regions(child)
    else:
        yield [module]


def is_repeated_blocks(module: nn.Module) -> bool:
    """Return whether `module` is a `ModuleList` of modules of one class, which are compiled as one region."""
    if not isinstance(module, nn.ModuleList) or len(module) == 0:
        return False
    kind = type(module[0])
    return kind not in (nn.ModuleList, nn.ModuleDict) and all(isinstance(block, kind) for block in module)


def _compile(regions: Iterable[list[nn.Module]], compile_kwargs: dict[str, Any]) -> None:
    """Compile the calls of modules; those of one region share their compiled code if they are equal."""
    for region in regions:
        compiled = torch.compile(plain_call, **{**_APART, **compile_kwargs})
        for module in region:
            set_compiled_call(module, partial(compiled, module))


def _duplicate(module: nn.Module, chosen: set[int], remember: bool = False) -> nn.Module:
    """Return a copy of `module` in which the `chosen` modules, given by their ids, are not compiled.

    Those and what holds them are copied, and `remember` what they were made of if that is asked for; all other modules,
    and all tensors, are the same objects.
    """
    made: dict[int, nn.Module] = {}

    def duplicate_of(old: nn.Module) -> nn.Module:
        inside = compiled_from(old)
        if inside is not None:
            return duplicate_of(inside)
        if id(old) in made:
            return made[id(old)]
        if not any(id(inner) in chosen for inner in old.modules()):
            return old
        children = {name: None if child is None else duplicate_of(child) for name, child in child_slots(old).items()}
        new = made[id(old)] = copied_module(old, children)
        if remember:
            new.__dict__[COMPILED_FROM] = old
        return new

    return duplicate_of(module)
