# SPDX-License-Identifier: Apache-2.0
"""Which modules of a model are gathered and freed one by one, as FSDP's wrapping policies say."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from farflung.base.errors import ConfigError

if TYPE_CHECKING:
    from farflung.config.sharding import FullyShardedDataParallelPlugin

Policy = Callable[..., bool]


def policy_for(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> Policy | None:
    """Return which modules of `model` a plugin asks for, as a function of torch's kind; None: no module inside."""
    if plugin.auto_wrap_policy == "size_based_wrap":
        return functools.partial(size_based_auto_wrap_policy, min_num_params=plugin.min_num_params)
    if plugin.auto_wrap_policy != "transformer_based_wrap":
        return plugin.auto_wrap_policy or None
    wanted = plugin.transformer_cls_names_to_wrap
    if wanted is None:  # transformers' models say which modules not to split
        declared = [getattr(module, "_no_split_modules", None) or () for module in model.modules()]
        wanted = list(dict.fromkeys(name for names in declared for name in names))
    if not wanted:
        raise ConfigError(
            f"auto_wrap_policy is transformer_based_wrap, but {type(model).__name__} has no _no_split_modules. Name "
            "its layers' class in transformer_cls_names_to_wrap, or use size_based_wrap."
        )
    classes = {type(module) for module in model.modules() if type(module).__name__ in wanted}
    if not classes:
        raise ConfigError(
            f"No module of this {type(model).__name__} is of a class to wrap: {wanted}. It has modules of "
            f"{sorted({type(module).__name__ for module in model.modules()})}."
        )
    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)


def modules_to_wrap(model: nn.Module, policy: Policy | None, ignored: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """Return the modules inside `model` to shard by themselves, inner ones before those that they are in.

    Two modules that share a parameter, such as an embedding and the output layer that is tied to it, are left to what
    is around both: torch takes each parameter once. `ignored` modules stay whole.
    """
    left_out = {id(inner) for module in ignored for inner in module.modules()}
    chosen: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        """Return how many parameters of `module` are wrapped, once it has been asked for."""
        assert policy is not None
        if id(module) in left_out:
            return 0
        numel = sum(parameter.numel() for parameter in module.parameters())
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        wrapped = sum(map(visit, module.children()))
        if module is model or not policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
            return wrapped
        chosen.append(module)
        return numel

    if policy is not None:
        visit(model)
    return _without_ties(model, list(dict.fromkeys(chosen)))


def _without_ties(model: nn.Module, chosen: Sequence[nn.Module]) -> list[nn.Module]:
    """Leave out the modules that share a parameter with something outside of them."""

    def uses(root: nn.Module) -> Counter[int]:
        return Counter(id(parameter) for module in root.modules() for parameter in module.parameters(recurse=False))

    everywhere = uses(model)
    return [module for module in chosen if all(everywhere[key] == count for key, count in uses(module).items())]
