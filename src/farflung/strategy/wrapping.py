# SPDX-License-Identifier: Apache-2.0
"""Which modules of a model are gathered and freed one by one, as FSDP's wrapping policies say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from torch import nn

Policy = Callable[..., bool]


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
