# SPDX-License-Identifier: Apache-2.0
"""An outer loop that counts the steps of inner optimizers by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from farflung.base.checks import check_type
from farflung.base.errors import ConfigError
from farflung.outer.recipe import Recipe


def check_attached(optimizers: Sequence[Optimizer], model: nn.Module, recipe: Recipe) -> None:
    """Raise ConfigError unless steps of `optimizers` can be counted as those of an outer loop over `model`."""
    mine = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        check_type("attach: optimizer", optimizer, Optimizer, "the torch optimizer that trains the model")
        if not any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            raise ConfigError("attach: this optimizer has no parameter of the outer loop's model.")
    if len(set(map(id, optimizers))) < len(optimizers):
        raise ConfigError("attach: the same optimizer was given twice; each of them once is enough.")
    if recipe.weighs_items:
        raise ConfigError(
            "attach: the recipe weights replicas by items, which an optimizer doesn't count. Call step(items=n)."
        )
    if len(optimizers) > 1 and recipe.inner.needs_optimizer:
        raise ConfigError(
            f"attach: {recipe.inner} synchronizes the state of one optimizer, and {len(optimizers)} are given. Use "
            "KeepState, or one optimizer for all parameters."
        )


def hooks_of(
    optimizers: Sequence[Optimizer],
    before: Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None],
    after: Callable[[], None],
) -> list[RemovableHandle]:
    """Call `before` before each step of each optimizer, and `after` once all of them have stepped."""
    stepped: set[int] = set()

    def count(one: Optimizer, *_: Any) -> None:
        stepped.add(id(one))
        if len(stepped) == len(optimizers):
            stepped.clear()
            after()

    hooks = [one.register_step_pre_hook(before) for one in optimizers]
    return hooks + [one.register_step_post_hook(count) for one in optimizers]
