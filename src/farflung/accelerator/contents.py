# SPDX-License-Identifier: Apache-2.0
"""What of a run goes into a checkpoint, and how it is put back: first read and checked, then applied or left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farflung.accelerator.outer import OpenLoops
from farflung.accelerator.prepare import Registry
from farflung.accelerator.regroup import joined_loops, regrouped
from farflung.base.errors import CheckpointError
from farflung.base.torch_internals import COMPILED_FROM, changes_what_it_loads
from farflung.base.words import counted
from farflung.checkpoint import layout, rng
from farflung.checkpoint.entries import Entry, Staging
from farflung.checkpoint.reader import DAMAGE, read_torch, read_weights
from farflung.checkpoint.regular import is_file
from farflung.loop.optimizer import AcceleratedOptimizer
from farflung.loop.state import LoopState
from farflung.precision.base import Precision
from farflung.process.world import World
from farflung.strategy.base import Strategy

Undo = Callable[[], Any]


@dataclass(frozen=True)
class Run:
    """All objects whose state is kept."""

    world: World
    loop: LoopState
    precision: Precision
    strategy: Strategy
    registry: Registry
    outers: OpenLoops
    custom: list[Any]

    @property
    def modules(self) -> list[nn.Module]:
        """The models as they were prepared, and the modules inside them, in a fixed order."""
        return [*self.registry.models, *self.bare_models]

    @property
    def bare_models(self) -> list[nn.Module]:
        """The modules inside the prepared models, which hooks are given, and whose names files have."""
        return [self.strategy.unwrap(model) for model in self.registry.models]

    @property
    def bare_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that do the work."""
        return [prepared.optimizer for prepared in self.registry.optimizers]

    @property
    def replicas_differ(self) -> bool:
        """Whether ranks have trained alone, so that what is usually the same on all of them is not."""
        return any(optimizer.is_own for optimizer in self.registry.optimizers)


def shared_entries(run: Run, weights: Sequence[Mapping[str, Tensor]], safe: bool) -> list[Entry]:
    """Return what is the same on all ranks, in the files in which Accelerate keeps it."""
    registry = run.registry
    parts = [Entry(layout.model(k, safe), state, safe, f"model {k}") for k, state in enumerate(weights)]
    parts += [
        Entry(layout.optimizer(k), one.state_dict(), origin=type(one.optimizer).__name__)
        for k, one in enumerate(registry.optimizers)
    ]
    parts += [
        Entry(layout.scheduler(k), one.state_dict(), origin=type(one.scheduler).__name__)
        for k, one in enumerate(registry.schedulers)
    ]
    if run.precision.scaler is not None:
        parts.append(Entry(layout.SCALER, run.precision.state_dict(run.bare_optimizers)["after_update"]))
    parts += [
        Entry(layout.custom(k), one.state_dict(), origin=f"the registered {type(one).__name__}")
        for k, one in enumerate(run.custom)
    ]
    return parts


def own_entries(run: Run, is_leader: bool) -> list[Entry]:
    """Return what only this rank knows."""
    rank, registry = run.world.rank, run.registry
    state = {
        "rank": rank,
        "world_size": run.world.size,
        "loop": run.loop.state_dict(run.modules),
        "gradients": [_gradients(one) if one.is_unfinished else None for one in registry.optimizers],
        "optimizers": [{"is_own": one.is_own, "was_skipped": one.step_was_skipped} for one in registry.optimizers],
        "precision": run.precision.state_dict(run.bare_optimizers),
        "loaders": [loader.state_dict() for loader in registry.loaders],
        "buffers": [] if is_leader else [_buffers(model) for model in registry.models],
        "asks_for_buffers": [getattr(model, "require_forward_param_sync", None) for model in registry.models],
    }
    parts = [
        Entry(layout.random_states(rank), {"step": run.loop.step, **rng.read()}),
        Entry(layout.loop_state(rank), state, origin="the training loop"),
    ]
    loops = [*(loop.state_dict() for loop in run.outers.live), *run.outers.waiting]
    differing: dict[str, Any] = {}
    if run.replicas_differ and not is_leader:
        differing = {
            "optimizers": [one.state_dict() if one.is_own else None for one in registry.optimizers],
            "schedulers": [one.state_dict() for one in registry.schedulers],
        }
    if loops or differing:
        parts.append(Entry(layout.outer_state(rank), {"loops": loops, **differing}, origin="the outer loop"))
    return parts


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
    found.loops = outer.get("loops", [])
    for k, optimizer in enumerate(run.registry.optimizers):
        state = _own_or_shared(outer, "optimizers", k, folder / layout.optimizer(k))
        _check_optimizer(state, optimizer, folder / layout.optimizer(k))
        found.optimizers.append(state)
    for k, _ in enumerate(run.registry.schedulers):
        found.schedulers.append(_own_or_shared(outer, "schedulers", k, folder / layout.scheduler(k)))
    found.custom = _read_custom(run, folder)
    if run.precision.scaler is not None:
        found.scaler = {"scaler": read_torch(folder / layout.SCALER)}
    if is_other and size is not None:
        _regroup(run, found, folder, size)
    else:
        found.random = _read_if_there(folder / layout.random_states(rank))
        found.own = _read_if_there(folder / layout.loop_state(rank))
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
        loops = joined_loops(folder, size)
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


def _own_or_shared(outer: dict[str, Any], kind: str, index: int, shared: Path) -> Any:
    """Return the state that this rank wrote by itself, or else the one of all ranks."""
    own = outer[kind][index] if kind in outer and index < len(outer[kind]) else None
    return read_torch(shared) if own is None else own


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
        kinds = (("loaders", "loader", registry.loaders), ("gradients", "optimizer", registry.optimizers))
        for name, kind, here in kinds:
            if len(own[name]) != len(here):
                raise CheckpointError(
                    f"{folder} was written with {counted(len(own[name]), f'prepared {kind}')}, but here there are "
                    f"{len(here)}. Prepare the same objects in the same order before load_state."
                )
        for gradients, optimizer in zip(own["gradients"], registry.optimizers, strict=True):
            for gradient, parameter in zip(gradients or [], _parameters(optimizer), strict=gradients is not None):
                if gradient is not None and gradient.shape != parameter.shape:
                    raise CheckpointError(f"{folder} has gradients of another model: {list(gradient.shape)}.")
        if run.precision.scaler is not None and own["precision"]:
            found.scaler = own["precision"]
    except DAMAGE as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder} holds something other than the state of a run: {error!r}") from error


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
        states = rng.read()
        undo.insert(0, lambda: rng.write(states))
        found.notes += rng.write(found.random)


def _apply_own(run: Run, own: dict[str, Any], undo: list[Undo]) -> None:
    registry, modules, loop = run.registry, run.modules, run.loop
    windows = loop.state_dict(modules)
    undo.insert(0, lambda: loop.load_state_dict(windows, modules))
    loop.load_state_dict(own["loop"], modules)
    for optimizer, gradients, kept in zip(registry.optimizers, own["gradients"], own["optimizers"], strict=True):
        undo.insert(0, _keep_gradients(optimizer))
        optimizer.is_own = kept["is_own"]
        optimizer.step_was_skipped = kept["was_skipped"]
        optimizer.finished = loop.backwards - (gradients is not None)  # else they would be forgotten by the next save
        for k, parameter in enumerate(_parameters(optimizer)):
            gradient = None if gradients is None else gradients[k]
            parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype)
    for loader, state in zip(registry.loaders, own["loaders"], strict=True):
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


def _keep_gradients(optimizer: AcceleratedOptimizer) -> Undo:
    before = [parameter.grad for parameter in _parameters(optimizer)]
    flags = (optimizer.is_own, optimizer.step_was_skipped, optimizer.finished)

    def undo() -> None:
        optimizer.is_own, optimizer.step_was_skipped, optimizer.finished = flags
        for parameter, gradient in zip(_parameters(optimizer), before, strict=True):
            parameter.grad = gradient

    return undo


def _parameters(optimizer: AcceleratedOptimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gradients(optimizer: AcceleratedOptimizer) -> list[Tensor | None]:
    return [parameter.grad for parameter in _parameters(optimizer)]


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach() for name, buffer in model.named_buffers()}


def read_model(model: nn.Module, folder: Path, index: int, strict: bool) -> dict[str, Any]:
    """Read the weights of a model and check that they fit; the names are those of `model`, wrapped or not.

    Raises:
        CheckpointError: they are missing, damaged, or of another model.
    """
    paths = [folder / layout.model(index, safe) for safe in (True, False)]
    path = next((path for path in paths if is_file(path)), None)
    if path is None:
        raise CheckpointError(f"{folder} has neither {paths[0].name} nor {paths[1].name}.")
    return fitted(model, read_weights(path), path, strict)


def fitted(model: nn.Module, weights: dict[str, Any], path: Path, strict: bool) -> dict[str, Any]:
    """Return `weights` under the names of `model`, whatever wrapper they were saved from, with tied ones given twice.

    Raises:
        CheckpointError: names or shapes are of another model.
    """
    own = model.state_dict()
    by_core = {} if own.keys() & weights.keys() else {_core(name): name for name in own}
    named = {by_core.get(_core(name), name): value for name, value in weights.items()}
    places: dict[Any, str] = {}
    for name in named:
        if isinstance(own.get(name), Tensor):
            places.setdefault(_place(own[name]), name)
    for name, value in own.items():
        twin = places.get(_place(value)) if isinstance(value, Tensor) else None
        if name not in named and twin is not None:
            named[name] = named[twin]
    hooked = any(changes_what_it_loads(module) for module in model.modules())
    missing, odd = own.keys() - named.keys(), named.keys() - own.keys()
    if strict and not hooked and (missing or odd):
        raise CheckpointError(
            f"{path} is of another model: {counted(len(missing), 'name')} missing ({', '.join(sorted(missing)[:3])}), "
            f"{len(odd)} unknown here ({', '.join(sorted(odd)[:3])})."
        )
    for name in own.keys() & named.keys():
        if isinstance(own[name], Tensor) and not hooked and own[name].shape != named[name].shape:
            raise CheckpointError(
                f"{path} is of another model: {name} is {list(named[name].shape)}, here {list(own[name].shape)}."
            )
    return named


def _core(name: str) -> str:
    """Return a weight's name without those of wrappers: DDP's `module.`, torch.compile's `_orig_mod.`."""
    core = name.replace(f"{COMPILED_FROM}.", "")
    return core.removeprefix("module.")


def _place(tensor: Tensor) -> Any:
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) if tensor.numel() else id(tensor)


def apply_own_buffers(run: Run, own: dict[str, Any] | None) -> None:
    """Give the models of a rank that is not the first its own buffers, and DDP its knowledge of them."""
    if own is None:
        return
    for model, asks in zip(run.registry.models, own["asks_for_buffers"], strict=False):
        if asks is not None and hasattr(model, "require_forward_param_sync"):
            model.require_forward_param_sync = asks
    with torch.no_grad():
        for model, saved in zip(run.registry.models, own["buffers"], strict=False):
            for name, buffer in model.named_buffers():
                if name in saved:
                    buffer.copy_(saved[name])
