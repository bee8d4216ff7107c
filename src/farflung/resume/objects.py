# SPDX-License-Identifier: Apache-2.0
"""The smaller parts of a run: schedulers, the scaler, registered objects, loaders and random states."""

from __future__ import annotations

import copy
import os
import random
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farflung.base.errors import CheckpointError, ConfigError
from farflung.base.events import Kind, record
from farflung.base.tree import leaves_of
from farflung.base.words import counted
from farflung.checkpoint import paths, rng
from farflung.checkpoint.entries import Entry
from farflung.comm.shards import is_sharded
from farflung.data.loader import PreparedLoader
from farflung.loop.state import LoopState
from farflung.resume.part import Loading, Part, Saving, change


class Schedulers(Part):
    """Replicated; of replicas that train apart each rank's own."""

    def replicated(self, saving: Saving) -> Iterable[Entry]:
        for k, one in enumerate(self.run.schedulers):
            if saving.writes(paths.scheduler(k)):
                yield Entry(paths.scheduler(k), one.state_dict(), origin=type(one.scheduler).__name__)

    def per_rank(self, saving: Saving) -> Mapping[str, dict[str, Any]]:
        if saving.leads or not self.run.replicas_differ:
            return {}
        states = [scheduler.state_dict() for scheduler in self.run.schedulers]
        return {paths.outer_state(self.run.world.rank): {"schedulers": states}}

    def read(self, source: Loading) -> None:
        self._states = []
        for k, _ in enumerate(self.run.schedulers):
            own = source.apart_of("schedulers", k)
            self._states.append(source.checkpoint.read(paths.scheduler(k)) if own is None else own)

    def load(self, undo: ExitStack) -> None:
        for scheduler, state in zip(self.run.schedulers, self._states, strict=True):
            change(scheduler, state, undo)


class RegisteredObjects(Part):
    """What the script registered for checkpointing: replicated."""

    def replicated(self, saving: Saving) -> Iterable[Entry]:
        for k, one in enumerate(self.run.custom):
            if saving.writes(paths.custom(k)):
                yield Entry(paths.custom(k), _state_of(one), origin=f"the registered {type(one).__name__}")

    def read(self, source: Loading) -> None:
        names = os.listdir(source.checkpoint.folder)
        saved, here = sum(paths.CUSTOM.fullmatch(name) is not None for name in names), len(self.run.custom)
        if saved != here:
            raise CheckpointError(
                f"{source.checkpoint.folder} has the state of {counted(saved, 'registered object')}, but here there "
                f"are {here}. Call register_for_checkpointing for the same objects, in the same order, before "
                "load_state."
            )
        self._states = [source.checkpoint.read(paths.custom(k)) for k in range(saved)]

    def load(self, undo: ExitStack) -> None:
        for one, state in zip(self.run.custom, self._states, strict=True):
            change(one, state, undo)


def _state_of(registered: Any) -> Any:
    state = registered.state_dict()
    if any(isinstance(leaf, Tensor) and is_sharded(leaf) for leaf in leaves_of(state)):
        raise ConfigError(
            f"The state of the registered {type(registered).__name__} holds sharded tensors, and its file would "
            "have one rank's part of them. Keep whole ones (tensor.full_tensor(), called on all ranks), or keep a copy "
            "of the weights in a model that is prepared too."
        )
    return state


class Scaler(Part):
    """The gradient scaler: replicated after each step, and within a step each rank's own."""

    def replicated(self, saving: Saving) -> Iterable[Entry]:
        precision = self.run.precision
        if precision.scaler is not None and saving.writes(paths.SCALER):
            yield Entry(paths.SCALER, precision.state_dict(self.run.bare_optimizers)["after_update"])

    def per_rank(self, saving: Saving) -> Mapping[str, dict[str, Any]]:
        state = self.run.precision.state_dict(self.run.bare_optimizers)
        return {paths.loop_state(self.run.world.rank): {"precision": state}}

    def read(self, source: Loading) -> None:
        self._state: dict[str, Any] | None = None
        if self.run.precision.scaler is not None:
            whole = {"scaler": source.checkpoint.read(paths.SCALER)}
            self._state = (None if source.first is None else source.first["precision"]) or whole

    def load(self, undo: ExitStack) -> None:
        if self._state is not None:
            optimizers, precision = self.run.bare_optimizers, self.run.precision
            undo.callback(precision.load_state_dict, copy.deepcopy(precision.state_dict(optimizers)), optimizers)
            precision.load_state_dict(self._state, optimizers)


class Loaders(Part):
    """Where each loader stands: each rank's own. Other ranks or batches continue after as many samples."""

    def per_rank(self, saving: Saving) -> Mapping[str, dict[str, Any]]:
        states = [loader.state_dict() for loader in self.run.loaders]
        loop = self.run.loop
        for kind, sentence in (("nesting", _nesting(loop, states)), ("workers", _renewed_workers(states))):
            if sentence and self.run.world.is_main and kind not in loop.told:
                loop.told.add(kind)
                record(Kind.WARNING, message=sentence)
        return {paths.loop_state(self.run.world.rank): {"loaders": states}}

    def read(self, source: Loading) -> None:
        loaders = self.run.loaders
        own = source.first
        self._states: list[dict[str, Any]] = [] if own is None else list(own["loaders"])
        if own is None:
            if any(source.checkpoint.folder.glob(paths.TORCHDATA_LOADERS)):
                source.notes.append(
                    "what it says of loaders is torchdata's and is not read, so their data start over. Use "
                    "skip_first_batches"
                )
            return
        for k, (state, one) in enumerate(zip(self._states, loaders, strict=False)):
            under_way = [
                iteration for iteration in self.run.loop.loaders if iteration.num_batches > 1
            ]  # more than a look
            if any(iteration.loader.base_dataloader is one.base_dataloader for iteration in under_way):
                self._states[k] = {}
                source.notes.append(
                    f"the loop over prepared loader {k} that is under way continues where it is: leave it before "
                    "load_state to continue its data from the checkpoint"
                )
            elif source.is_other or _has_other_batches(state, one):
                self._states[k] = _redistributed(state, one, source)
        saved, here = len(self._states), len(loaders)
        written = f"it was written with {counted(saved, 'prepared loader')}"
        if saved < here:
            source.notes.append(f"{written}: the later ones stay as they are")
        elif saved > here:  # it is not known which are missing
            self._states = []
            source.notes.append(f"{written}, but here there are {here}: they stay as they are")

    def load(self, undo: ExitStack) -> None:
        for loader, state in zip(self.run.loaders, self._states, strict=False):
            if state:
                undo.callback(loader.keep())
                loader.load_state_dict(state)


def _nesting(loop: LoopState, states: Sequence[dict[str, Any]]) -> str:
    """Return what a run repeats that continues from these states of its loaders, saved inside of nested loops."""
    positions = [(number, state["position"] or {}) for number, state in enumerate(states)]
    there = [f"batch {at['batches'] + 1} of loader {number}" for number, at in positions if at.get("again")]
    said = []
    if there:
        said.append(
            f"saved inside of nested loops: {' and '.join(there)} comes again, and what the outer loop does "
            "with it before the inner one is repeated"
        )
    if len(loop.nesting()[0]) > len(there):
        said.append(
            "saved inside of a loop over a loader that is iterated in its own loop: only the inner pass continues, in "
            "place of the outer one"
        )
    if loop.is_nesting_unclear:
        said.append(
            "saved after the first step of loops over two loaders: if one of them is inside the other one, the rest of "
            "the inner one is left out. Save after the second step"
        )
    return "; ".join(said)


def _renewed_workers(states: Sequence[dict[str, Any]]) -> str:
    """Return what differs after a save, as persistent workers can't be restored in all respects."""
    numbers = [
        str(number)
        for number, state in enumerate(states)
        if state["has_workers"] and (state["position"] is not None or state["worker_states"] is None)
    ]
    if not numbers:
        return ""
    return (
        f"a run that continues from here starts persistent workers again (loader {', '.join(numbers)}): the next pass "
        "draws other random numbers if this one is left early, or if the data are a stream"
    )


def _has_other_batches(state: dict[str, Any], loader: PreparedLoader) -> bool:
    """Whether the loader was in a pass over batches of another size, so that counting them says nothing here."""
    sizes = (state["total_batch_size"], loader.total_batch_size)
    return state["position"] is not None and None not in sizes and sizes[0] != sizes[1]


def _redistributed(state: dict[str, Any], loader: PreparedLoader, source: Loading) -> dict[str, Any]:
    """Return a loader's state after as many samples, over all ranks."""
    total, position = loader.total_batch_size, state["position"]  # samples in one step here
    if position is None:
        return {**state, "worker_states": None, "host": None}
    is_inner = state.get("host") is not None
    before, old, size = state["total_batch_size"], source.old_size, source.size
    samples = position["batches"] * (old if before is None or total is None else before)
    step = size if before is None or total is None else total
    batches, rest = divmod(samples, step)
    if position["ended"]:
        batches += old + size  # past the end, whatever the last steps are like
    elif loader.already_sharded and old != size:
        source.notes.append(
            f"the script shares out its data, now among {size}: which samples come twice or are missed is not known"
        )
    elif rest:
        unit = "batch" if before is None or total is None else "sample"
        source.notes.append(
            f"the last {counted(rest, unit)} before it will be seen again, as {samples} is no multiple of {step}"
        )
    kept = {key: position[key] for key in ("ended", "host", "generators", "has_workers")}  # nothing has been read
    more = {"host": None, "is_inner": is_inner, "position": {"batches": batches, **kept}}
    return {**state, "worker_states": None, **more}


class RNGStates(Part):
    """Each rank's own: rank r draws on where old rank r stood, and additional ranks start their own.

    So do replicas that come and go, as one of them has written the states of all.
    """

    def per_rank(self, saving: Saving) -> Mapping[str, dict[str, Any]]:
        return {paths.random_states(self.run.world.rank): {"step": self.run.loop.step, **rng.read()}}

    def read(self, source: Loading) -> None:
        self._has_own = source.is_other or source.own is not None
        source_rank = source.rank if source.rank in source.known else source.known[source.rank % len(source.known)]
        name = paths.random_states(source_rank)
        self._states = source.checkpoint.read(name) if source.is_other else source.checkpoint.read_if_there(name)
        self._notes = source.notes
        if self._states is None:
            source.notes.append(f"it has no random states for rank {source.rank}, so its random numbers differ")
            return
        member = self.run.world.place.member or 0
        if source_rank != source.rank or member:
            self._states = _fresh(self._states, source.rank + 1000 * member)
        rng.check(self._states)

    def load(self, undo: ExitStack) -> None:
        if self._states is None:
            return
        loop = self.run.loop
        if not self._has_own:  # written by Accelerate: the windows' part knows nothing of the step
            undo.callback(setattr, loop, "step", loop.step)
            loop.step = self._states.get("step", 0)
        undo.callback(rng.write, rng.read())
        self._notes += rng.write(self._states)


def _fresh(states: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return random states for an additional rank, drawn from those of one that was saved."""
    seed = zlib.crc32(states["torch_manual_seed"].numpy().tobytes(), rank)
    return {
        "step": states["step"],
        "random_state": random.Random(seed).getstate(),
        "numpy_random_seed": np.random.RandomState(seed).get_state(),
        "torch_manual_seed": torch.Generator().manual_seed(seed).get_state(),
    }
