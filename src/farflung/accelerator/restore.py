# SPDX-License-Identifier: Apache-2.0
"""How the content of a checkpoint is put back into a run: first read and checked, then applied or left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farflung.accelerator import gradients, states
from farflung.accelerator.regroup import OTHER_SHARDS, has_reduced, joined_loops, regrouped, without_gradients
from farflung.accelerator.run import Run
from farflung.base.errors import CheckpointError
from farflung.base.words import counted
from farflung.checkpoint import layout, rng
from farflung.checkpoint.entries import Entry, Staging
from farflung.checkpoint.reader import DAMAGE, read_torch
from farflung.checkpoint.regular import is_file
from farflung.comm.shards import local
from farflung.loop.optimizer import AcceleratedOptimizer

Undo = Callable[[], Any]


@dataclass
class Loaded:
    """What was read from a checkpoint for this rank, and checked against the objects that are here.

    Attributes:
        weights: what stands for the models' weights where ranks had different ones.
        steps: those that each optimizer has completed; None: that is not known.
        notes: what could not be the same, for people.
    """

    optimizers: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    custom: list[Any] = field(default_factory=list)
    scaler: dict[str, Any] | None = None
    random: dict[str, Any] | None = None
    own: dict[str, Any] | None = None
    loops: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    steps: list[int | None] | None = None
    notes: list[str] = field(default_factory=list)


def read(run: Run, folder: Path, size: int | None) -> Loaded:
    """Read everything but the models' weights.

    Args:
        size: how many ranks wrote the checkpoint; None where that is not said.

    Raises:
        CheckpointError: something is missing, damaged, or of other objects. Nothing has been changed.
    """
    rank, found = run.world.rank, Loaded()
    is_other = size is not None and size != run.world.size
    outer = {} if is_other else _read_if_there(folder / layout.outer_state(rank)) or {}
    found.own = None if is_other else _read_if_there(folder / layout.loop_state(rank))
    _check_columns(run, folder, is_other)
    found.loops = outer.get("loops", [])
    for k, optimizer in enumerate(run.registry.optimizers):
        own = _own_state(outer, "optimizers", k)
        if own is None:
            state = states.read_optimizer(run.bare_models, optimizer, folder, k)
        else:
            state = states.from_local(own, optimizer)
        _check_optimizer(state, optimizer, folder / layout.optimizer(k))
        found.optimizers.append(state)
    for k, _ in enumerate(run.registry.schedulers):
        own = _own_state(outer, "schedulers", k)
        found.schedulers.append(read_torch(folder / layout.scheduler(k)) if own is None else own)
    found.custom = _read_custom(run, folder)
    if run.precision.scaler is not None:
        found.scaler = {"scaler": read_torch(folder / layout.SCALER)}
    if is_other and size is not None:
        _regroup(run, found, folder, size)
    else:
        found.random = _read_if_there(folder / layout.random_states(rank))
        if found.own is not None and found.own.get("spread") != run.spread and has_reduced([found.own]):
            found.own = without_gradients(found.own)
            found.notes.append(OTHER_SHARDS)
        if found.own is None and any(folder.glob(layout.TORCHDATA_LOADERS)):
            found.notes.append(
                "what it says of loaders is torchdata's and is not read, so their data start over. Use "
                "skip_first_batches"
            )
    _check_own(run, found, folder)
    return found


def _read_if_there(path: Path) -> Any:
    return read_torch(path) if is_file(path) else None


def _regroup(run: Run, found: Loaded, folder: Path, size: int) -> None:
    try:
        totals = [loader.total_batch_size for loader in run.registry.loaders]
        world = run.world
        found.own, found.random, found.notes = regrouped(folder, size, world.rank, world.size, totals)
        spread = run.spread
        column = 0 if spread is None else spread[0].index(world.rank)
        loops = joined_loops(folder, range(column, size, _columns(spread)))
        found.weights = {name: value for loop in loops for name, value in loop.weights.items()}
        found.loops = [loop.state for loop in loops if loop.state is not None]
        if len(found.loops) < len(loops):
            found.loops = []
            found.notes.append(
                "their outer loop starts over from there, because its anchors included a round that was in flight"
            )
    except DAMAGE as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder} holds something other than the state of a run: {error!r}") from error


def _own_state(outer: dict[str, Any], kind: str, index: int) -> Any:
    """Return the state that this rank wrote by itself, None where it is the one of all ranks."""
    return outer[kind][index] if kind in outer and index < len(outer[kind]) else None


def _check_columns(run: Run, folder: Path, is_other: bool) -> None:
    """Raise CheckpointError where outer loops were over other shards than those that are here."""
    rank = 0 if is_other else run.world.rank
    if not is_file(folder / layout.outer_state(rank)):
        return
    own = _read_if_there(folder / layout.loop_state(rank)) or {}
    before, here = _columns(own.get("spread")), _columns(run.spread)
    if before != here:
        raise CheckpointError(
            f"{folder} has outer loops over models that were sharded over {counted(before, 'rank')}, but here they are "
            f"sharded over {counted(here, 'rank')}. Load it with dp_shard_size={before} and any number of replicas; or "
            "begin new outer loops from the weights of its first island, which farflung.utils.merge_fsdp_weights makes "
            "whole."
        )


def _columns(spread: tuple[list[int], str] | None) -> int:
    return 1 if spread is None else len(spread[0])


def _read_custom(run: Run, folder: Path) -> list[Any]:
    names = [path.name for path in folder.iterdir() if layout.is_custom(path.name)]
    if len(names) != len(run.custom):
        raise CheckpointError(
            f"{folder} has the state of {counted(len(names), 'registered object')}, but here there are "
            f"{len(run.custom)}. Call register_for_checkpointing for the same objects, in the same order, before "
            "load_state."
        )
    return [read_torch(folder / layout.custom(k)) for k in range(len(names))]


def _check_optimizer(state: Any, optimizer: AcceleratedOptimizer, path: Path) -> None:
    try:
        saved = [len(group["params"]) for group in state["param_groups"]]
    except (LookupError, TypeError) as error:
        raise CheckpointError(f"{path} is not the state of an optimizer: {error!r}") from error
    here = [len(group["params"]) for group in optimizer.param_groups]
    if saved != here:
        raise CheckpointError(
            f"{path} is of an optimizer whose groups have {saved} parameters, but those of this one have {here}."
        )


def _check_own(run: Run, found: Loaded, folder: Path) -> None:
    """Look for what a broken or foreign file lacks, before anything is changed."""
    try:
        if found.random is not None:
            rng.check(found.random)
        own, registry = found.own, run.registry
        if own is None:
            return
        written, here = len(own["gradients"]), len(registry.optimizers)
        if written != here:
            raise CheckpointError(
                f"{folder} was written with {counted(written, 'prepared optimizer')}, but here there are {here}. "
                "Prepare the same objects in the same order before load_state."
            )
        _match_loaders(found, own, len(registry.loaders))
        for optimizer, whole, reduced in _by_optimizer(run, own):
            mine = states.parameters(optimizer)
            wanted = [*(p.shape for p in mine if whole), *(local(p).shape for p in mine if reduced)]
            for gradient, shape in zip([*(whole or []), *(reduced or [])], wanted, strict=True):
                if gradient is not None and gradient.shape != shape:
                    raise CheckpointError(f"{folder} has gradients of another model: {list(gradient.shape)}.")
        for name, buffer, saved in _by_buffer(run, own):
            if buffer.shape != saved.shape:
                raise CheckpointError(
                    f"{folder} is of another model: its buffer {name} is {list(saved.shape)} on rank "
                    f"{run.world.rank}, here {list(buffer.shape)}."
                )
        if run.precision.scaler is not None and own["precision"]:
            found.scaler = own["precision"]
    except DAMAGE as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder} holds something other than the state of a run: {error!r}") from error


def _match_loaders(found: Loaded, own: dict[str, Any], here: int) -> None:
    """Let those that were prepared since stay as they are; where some are missing it is not known which."""
    saved = len(own["loaders"])
    if saved < here:
        found.notes.append(f"it was written with {counted(saved, 'prepared loader')}: the later ones stay as they are")
    elif saved > here:
        own["loaders"] = []
        found.notes.append(
            f"it was written with {counted(saved, 'prepared loader')}, but here there are {here}: they stay as they are"
        )


def _by_optimizer(run: Run, own: dict[str, Any]) -> Iterable[tuple[AcceleratedOptimizer, Any, Any]]:
    """Return each optimizer with its gradients: whole ones, and reduced shards."""
    optimizers = run.registry.optimizers
    return zip(optimizers, own["gradients"], own.get("reduced") or [None] * len(optimizers), strict=True)


def apply(run: Run, found: Loaded) -> list[Undo]:
    """Put back everything but weights and outer loops; return what undoes it, the last change first.

    Where something raises, what was changed before has been undone.
    """
    undo: list[Undo] = []
    try:
        _apply(run, found, undo)
    except BaseException:
        for step in undo:
            step()
        raise
    return undo


def _apply(run: Run, found: Loaded, undo: list[Undo]) -> None:
    registry, own = run.registry, found.own

    def change(owner: Any, state: Any) -> None:
        """Load a state into an object that can give its own one back."""
        (before,) = Staging().copied([Entry("", owner.state_dict())])
        try:
            owner.load_state_dict(state)
        except BaseException:
            with suppress(Exception):  # the error that counts is the first one
                owner.load_state_dict(before.content)
            raise
        undo.insert(0, lambda: owner.load_state_dict(before.content))

    unknown = [None] * len(registry.optimizers)
    steps = found.steps if found.steps and len(found.steps) == len(unknown) else unknown
    for optimizer, state, completed in zip(registry.optimizers, found.optimizers, steps, strict=True):
        undo.insert(0, _keep_optimizer(optimizer))
        optimizer.load_state_dict(state)
        optimizer.completed_steps = completed
    for scheduler, state in zip(registry.schedulers, found.schedulers, strict=True):
        change(scheduler, state)
    for one, state in zip(run.custom, found.custom, strict=True):
        change(one, state)
    if found.scaler is not None:
        optimizers, precision = run.bare_optimizers, run.precision
        before = copy.deepcopy(precision.state_dict(optimizers))
        undo.insert(0, lambda: precision.load_state_dict(before, optimizers))
        precision.load_state_dict(found.scaler, optimizers)
    if own is not None:
        _apply_own(run, own, undo)
    elif found.random is not None:
        before_step = run.loop.step
        undo.insert(0, lambda: setattr(run.loop, "step", before_step))
        run.loop.step = found.random.get("step", 0)
    if found.random is None:
        found.notes.append(f"it has no random states for rank {run.world.rank}, so its random numbers differ")
    else:
        before_random = rng.read()
        undo.insert(0, lambda: rng.write(before_random))
        found.notes += rng.write(found.random)


def _apply_own(run: Run, own: dict[str, Any], undo: list[Undo]) -> None:
    registry, modules, loop = run.registry, run.modules, run.loop
    windows = loop.state_dict(modules)
    undo.insert(0, lambda: loop.load_state_dict(windows, modules))
    loop.load_state_dict(own["loop"], modules)
    for (optimizer, whole, reduced), kept in zip(_by_optimizer(run, own), own["optimizers"], strict=True):
        undo.insert(0, _keep_gradients(run, optimizer))
        optimizer.is_own = kept["is_own"]
        optimizer.step_was_skipped = kept["was_skipped"]
        optimizer.finished = loop.backwards - (whole is not None)  # else they would be forgotten by the next save
        gradients.put(run, optimizer, whole, reduced)
    for loader, state in zip(registry.loaders, own["loaders"], strict=False):  # `_match_loaders`
        undo.insert(0, loader.keep())
        loader.load_state_dict(state)


def _keep_optimizer(optimizer: AcceleratedOptimizer) -> Undo:
    bare: Any = optimizer.optimizer
    state, groups = bare.state, [dict(group) for group in bare.param_groups]
    steps = optimizer.completed_steps

    def undo() -> None:
        optimizer.completed_steps = steps
        bare.__setstate__({"state": state, "param_groups": groups})

    return undo


def _keep_gradients(run: Run, optimizer: AcceleratedOptimizer) -> Undo:
    put_back = gradients.kept(run, optimizer)
    flags = (optimizer.is_own, optimizer.step_was_skipped, optimizer.finished)

    def undo() -> None:
        optimizer.is_own, optimizer.step_was_skipped, optimizer.finished = flags
        put_back()

    return undo


def apply_own_buffers(run: Run, own: dict[str, Any] | None) -> None:
    """Give the models of a rank that is not the first its own buffers, and DDP its knowledge of them."""
    if own is None:
        return
    for model, asks in zip(run.registry.models, own["asks_for_buffers"], strict=False):
        if asks is not None and hasattr(model, "require_forward_param_sync"):
            model.require_forward_param_sync = asks
    with torch.no_grad():
        for _, buffer, saved in _by_buffer(run, own):
            buffer.copy_(saved)


def _by_buffer(run: Run, own: dict[str, Any]) -> Iterable[tuple[str, Tensor, Tensor]]:
    """Return the name of each buffer of which this rank has its own, the buffer, and what was saved of it."""
    for model, saved in zip(run.registry.models, own["buffers"], strict=False):
        for name, buffer in states.saved_buffers(model).items():
            if name in saved:
                yield name, buffer, saved[name]
