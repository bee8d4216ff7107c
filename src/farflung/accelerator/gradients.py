# SPDX-License-Identifier: Apache-2.0
"""Gradients of an accumulation window that is not complete, as a checkpoint keeps them.

A rank's own gradients of whole parameters can be gone on from in any layout: those of a plain model, and those of a
sharded one that FSDP has not reduced yet. Shards of gradients that it has reduced fit the same layout alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from farflung.accelerator import states
from farflung.accelerator.run import Run
from farflung.base.torch_internals import set_unreduced_gradient, sharded_parameters, unreduced_gradient
from farflung.comm.shards import is_sharded, local, sharded_parts, with_local
from farflung.loop.optimizer import AcceleratedOptimizer

Gradients = list[Tensor | None]


def state_of(run: Run) -> dict[str, list[Gradients | None]]:
    """Return the gradients that a later step will use, for each optimizer; None where it has none.

    Returns:
        `gradients`, of whole parameters, and `reduced`, local parts of shards.
    """
    optimizers = run.registry.optimizers
    slots = _slots(run)

    def whole(parameter: Tensor) -> Tensor | None:
        if not is_sharded(parameter):
            return parameter.grad
        return unreduced_gradient(slots[id(parameter)]) if id(parameter) in slots else None

    def part(parameter: Tensor) -> Tensor | None:
        gradient = parameter.grad
        return None if gradient is None or not is_sharded(parameter) else local(gradient)

    def each(get: Callable[[Tensor], Tensor | None]) -> list[Gradients | None]:
        return [list(map(get, states.parameters(one))) if one.is_unfinished else None for one in optimizers]

    return {"gradients": each(whole), "reduced": each(part)}


def put(run: Run, optimizer: AcceleratedOptimizer, whole: Gradients | None, reduced: Gradients | None) -> None:
    """Give the parameters of an optimizer the gradients that `state_of` returned, and those alone."""
    slots = _slots(run)
    for number, parameter in enumerate(states.parameters(optimizer)):
        gradient = None if whole is None else whole[number]
        if not is_sharded(parameter):
            parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype)
            continue
        part = None if reduced is None else reduced[number]
        parameter.grad = None if part is None else with_local(part, parameter)
        if id(parameter) in slots:
            gradient = None if gradient is None else gradient.to(local(parameter).device)
            set_unreduced_gradient(slots[id(parameter)], gradient)


def kept(run: Run, optimizer: AcceleratedOptimizer) -> Callable[[], None]:
    """Return what makes the gradients of an optimizer those that they are now."""
    slots = _slots(run)
    mine = states.parameters(optimizer)
    before = [parameter.grad for parameter in mine]
    unreduced = {id(p): unreduced_gradient(slots[id(p)]) for p in mine if id(p) in slots}

    def undo() -> None:
        for parameter, gradient in zip(mine, before, strict=True):
            parameter.grad = gradient
            if id(parameter) in slots:
                set_unreduced_gradient(slots[id(parameter)], unreduced[id(parameter)])

    return undo


def _slots(run: Run) -> dict[int, Any]:
    """Return where FSDP keeps gradients, by the parameter's identity."""
    parts = [part for model in run.bare_models for part in sharded_parts(model.modules())]
    return {id(slot.sharded_param): slot for part in parts for slot in sharded_parameters(part)}
