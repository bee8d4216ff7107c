# SPDX-License-Identifier: Apache-2.0
"""The accumulation window that is not complete: how far it is, its gradients, and what optimizers know of it.

A rank's own gradients of whole parameters are a start in any layout: those of a plain model, and those of a
sharded one that FSDP has not reduced yet. Shards of gradients that it has reduced fit the same layout alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from farflung.base.errors import CheckpointError
from farflung.base.torch_internals import set_unreduced_gradient, sharded_parameters, unreduced_gradient
from farflung.base.words import counted
from farflung.checkpoint import paths
from farflung.comm.shards import is_sharded, local, sharded_parts, with_local
from farflung.loop.optimizer import AcceleratedOptimizer, parameters_of
from farflung.resume.part import Loading, Part, Saving
from farflung.resume.run import Run

Gradients = list[Tensor | None]
_OTHER_SHARDS = "the unfinished accumulation window had reduced gradients of other shards: it starts over"
_FRESH = {"size": 0, "complete": True, "items": 0.0, "scale": None}


class AccumulationWindow(Part):
    """The loop's windows and their gradients: each rank's own. Another number of ranks continues from the mean."""

    def per_rank(self, saving: Saving) -> Mapping[str, dict[str, Any]]:
        run, optimizers = self.run, self.run.optimizers
        state = {
            "rank": run.world.rank,
            "world_size": run.world.size,
            "spread": run.spread,
            "loop": run.loop.state_dict(run.modules),
            "optimizers": [
                {"is_own": optimizer.is_own, "was_skipped": optimizer.step_was_skipped} for optimizer in optimizers
            ],
            **_gradients_of(run),
        }
        return {paths.loop_state(run.world.rank): state}

    def read(self, source: Loading) -> None:
        own = _redistributed(source.owns, source.notes) if source.is_other else source.own
        if own is not None and own.get("spread") != self.run.spread and _has_reduced([own]):
            own = _without_gradients(own)
            source.notes.append(_OTHER_SHARDS)
        self._own = own
        if own is None:
            return
        folder, written, here = source.checkpoint.folder, len(own["gradients"]), len(self.run.optimizers)
        if written != here:
            raise CheckpointError(
                f"{folder} was written with {counted(written, 'prepared optimizer')}, but here there are {here}. "
                "Prepare the same objects in the same order before load_state."
            )
        for optimizer, whole, reduced in self._rows():
            mine = parameters_of(optimizer)
            wanted = [*(p.shape for p in mine if whole), *(local(p).shape for p in mine if reduced)]
            for gradient, shape in zip([*(whole or []), *(reduced or [])], wanted, strict=True):
                if gradient is not None and gradient.shape != shape:
                    raise CheckpointError(f"{folder} has gradients of another model: {list(gradient.shape)}.")

    def load(self, undo: ExitStack) -> None:
        if self._own is None:
            return
        loop, modules = self.run.loop, self.run.modules
        undo.callback(loop.load_state_dict, loop.state_dict(modules), modules)
        loop.load_state_dict(self._own["loop"], modules)
        for (optimizer, whole, reduced), kept in zip(self._rows(), self._own["optimizers"], strict=True):
            _keep(self.run, optimizer, undo)
            optimizer.is_own = kept["is_own"]
            optimizer.step_was_skipped = kept["was_skipped"]
            optimizer.finished = loop.backwards - (whole is not None)  # else they would be forgotten by the next save
            _put(self.run, optimizer, whole, reduced)

    def _rows(self) -> Iterable[tuple[AcceleratedOptimizer, Any, Any]]:
        """Return each optimizer with its gradients: whole ones, and reduced shards."""
        assert self._own is not None
        optimizers = self.run.optimizers
        reduced = self._own.get("reduced") or [None] * len(optimizers)
        return zip(optimizers, self._own["gradients"], reduced, strict=True)


def _redistributed(owns: Sequence[dict[str, Any]], notes: list[str]) -> dict[str, Any]:
    """Return the state from which each of another number of ranks continues."""
    if any(one["is_own"] for one in owns[0]["optimizers"]):
        weights = "rank 0's weights" if len(owns) == 1 else "the mean of their weights"
        notes.append(f"replicas had trained independently: all take {weights}, and rank 0's optimizer state")
    optimizers = [{**one, "is_own": False} for one in owns[0]["optimizers"]]
    own = {**owns[0], "optimizers": optimizers, "gradients": _mean_gradients(owns, notes), "reduced": None}
    return own if own["gradients"] is not None else _without_gradients(own)


def _has_reduced(owns: Iterable[dict[str, Any]]) -> bool:
    """Return whether there are gradients that were reduced, and are in shards on each rank."""
    return any(part is not None for own in owns for parts in own.get("reduced") or () for part in parts or ())


def _without_gradients(own: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's own state with its accumulation windows at their beginning."""
    nothing = [None] * len(own["optimizers"])
    loop = {"windows": [{**one, **_FRESH} for one in own["loop"]["windows"]]}
    return {**own, "gradients": nothing, "reduced": nothing, "loop": loop}


def _mean_gradients(owns: Sequence[dict[str, Any]], notes: list[str]) -> list[Any] | None:
    """Return the mean over the ranks of each optimizer's unfinished gradients; None if they can't be combined."""
    scales = {window["scale"] for own in owns for window in own["loop"]["windows"]}
    if scales != {None}:
        notes.append("the unfinished accumulation window was weighted by num_items: it starts over")
        return None
    if _has_reduced(owns):
        notes.append(_OTHER_SHARDS)
        return None
    means: list[Gradients | None] = []
    for column in zip(*(own["gradients"] for own in owns), strict=True):
        there = [gradients for gradients in column if gradients is not None]
        some = [[part for part in parts if part is not None] for parts in zip(*there, strict=True)]
        means.append([torch.stack(parts).sum(0) / len(owns) if parts else None for parts in some] if there else None)
    return means


def _gradients_of(run: Run) -> dict[str, list[Gradients | None]]:
    """Return the gradients that a later step will use, for each optimizer: whole ones, and `reduced` local shards."""
    optimizers = run.optimizers
    slots = _slots(run)

    def whole(parameter: Tensor) -> Tensor | None:
        if not is_sharded(parameter):
            return parameter.grad
        return unreduced_gradient(slots[id(parameter)]) if id(parameter) in slots else None

    def part(parameter: Tensor) -> Tensor | None:
        gradient = parameter.grad
        return None if gradient is None or not is_sharded(parameter) else local(gradient)

    def each(get: Callable[[Tensor], Tensor | None]) -> list[Gradients | None]:
        return [
            list(map(get, parameters_of(optimizer))) if optimizer.is_unfinished else None for optimizer in optimizers
        ]

    return {"gradients": each(whole), "reduced": each(part)}


def _put(run: Run, optimizer: AcceleratedOptimizer, whole: Gradients | None, reduced: Gradients | None) -> None:
    """Give the parameters of an optimizer the gradients that `_gradients_of` returned, and those alone."""
    slots = _slots(run)
    for number, parameter in enumerate(parameters_of(optimizer)):
        gradient = None if whole is None else whole[number]
        if not is_sharded(parameter):
            parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype)
            continue
        part = None if reduced is None else reduced[number]
        parameter.grad = None if part is None else with_local(part, parameter)
        if id(parameter) in slots:
            gradient = None if gradient is None else gradient.to(local(parameter).device)
            set_unreduced_gradient(slots[id(parameter)], gradient)


def _keep(run: Run, optimizer: AcceleratedOptimizer, undo: ExitStack) -> None:
    """Add to `undo` what makes the gradients of an optimizer, and its flags, those that they are now."""
    for name in ("is_own", "step_was_skipped", "finished"):
        undo.callback(setattr, optimizer, name, getattr(optimizer, name))
    slots = _slots(run)
    for parameter in parameters_of(optimizer):
        if id(parameter) in slots:
            undo.callback(set_unreduced_gradient, slots[id(parameter)], unreduced_gradient(slots[id(parameter)]))
        undo.callback(setattr, parameter, "grad", parameter.grad)


def _slots(run: Run) -> dict[int, Any]:
    parts = [part for model in run.bare_models for part in sharded_parts(model.modules())]
    return {id(slot.sharded_param): slot for part in parts for slot in sharded_parameters(part)}
