# SPDX-License-Identifier: Apache-2.0
"""Questions about a module that need no run: its children in order, and how it was sharded before it came here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return `model` and all modules in it, or with `return_fqns` pairs of name and module, inner ones first."""
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    found: list[tuple[str, nn.Module]] = []
    while waiting:
        name, module = waiting.pop()
        found.append((name, module))
        prefix = f"{name}." if name else ""
        waiting += [(prefix + child, inner) for child, inner in module.named_children()]
    found.reverse()
    return [*found] if return_fqns else [module for _, module in found]


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class called `name` of a module in `module`, or None where there is no such module."""
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
    """Return among how many ranks transformers has cut each layer of `model`, or None where it has not."""
    size = getattr(model, "tp_size", None)  # transformers 4
    if size is None:
        config: Any = getattr(getattr(model, "config", None), "distributed_config", None)  # transformers 5
        size = config.get("tp_size") if isinstance(config, dict) else getattr(config, "tp_size", None)
    return size
