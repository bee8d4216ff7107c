# SPDX-License-Identifier: Apache-2.0
"""Models in a checkpoint, whole or in shards: each form is read into models that have either.

What was read of something sharded is always the local part, on the CPU, whatever form it was written in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farflung.base.errors import CheckpointError
from farflung.base.torch_internals import COMPILED_FROM, changes_what_it_loads, passing_buffers
from farflung.base.words import counted
from farflung.checkpoint import paths
from farflung.checkpoint.checkpoint import Checkpoint, Fetch
from farflung.checkpoint.entries import Entry
from farflung.checkpoint.reader import read_weights
from farflung.comm.shards import full, is_sharded, local, model_has_dtensor, spread_like
from farflung.comm.tensor_memory import memory_of
from farflung.resume import lazy
from farflung.resume.part import Loading, Part, Saving
from farflung.resume.run import Run

_RECOMPUTED = "_checkpoint_wrapped_module."  # where torch's wrapper for activation checkpointing keeps a module


class Models(Part):
    """The weights and buffers of all models: replicated, or sharded."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._gathered: dict[int, dict[str, Any]] = {}
        self._places = list(enumerate(run.bare_models))

    def gather(self, saving: Saving) -> None:
        self._gathered = {
            k: gathered_model(model, model_shards(model), saving.writes(paths.model(k)))
            for k, model in enumerate(self.run.bare_models)
            if model_has_dtensor(model)
        }

    def replicated(self, saving: Saving) -> Iterable[Entry]:
        models = self.run.bare_models
        weights = [model.state_dict() for model in models if not model_has_dtensor(model)]
        prepared = list(self.run.models)  # hooks may change the list
        for hook in self.run.save_hooks.values():
            hook(prepared, weights, os.fspath(saving.folder))
        waiting = list(weights)  # what hooks have left: files are numbered without the others
        whole: list[dict[str, Any]] = []
        for k, model in enumerate(models):
            if k in self._gathered:
                whole.append(self._gathered[k])
            elif waiting and not model_has_dtensor(model):
                whole.append(waiting.pop(0))
        entries = [
            Entry(paths.model(k, saving.safe), state, saving.safe, f"model {k}") for k, state in enumerate(whole)
        ]
        return [entry for entry in entries if saving.writes(entry.name)]

    def sharded(self) -> Mapping[str, dict[str, Any]]:
        models = enumerate(self.run.bare_models)
        return {paths.model_shards(k): {"model": model_shards(one)} for k, one in models if model_has_dtensor(one)}

    def begin(self, source: Loading) -> None:
        prepared = self.run.models
        given = [prepared[k] for k, model in self._places if not model_has_dtensor(model)]
        for hook in self.run.load_hooks.values():
            hook(given, os.fspath(source.checkpoint.folder))
        left = set(map(id, given))  # those that hooks took out of the list are not loaded here
        self._places = [(k, model) for k, model in self._places if id(prepared[k]) in left or model_has_dtensor(model)]

    def read(self, source: Loading) -> None:
        self._strict = source.strict
        self._weights = [
            read_model(model, source.checkpoint, k, source.strict, k - number)
            for number, (k, model) in enumerate(self._places)
        ]

    def fill(self) -> None:
        for (_, model), named in zip(self._places, self._weights, strict=True):
            load(model, named, self._strict)


class OwnBuffers(Part):
    """The buffers of ranks that are not the first: DDP may broadcast the first one's before it reads them, or never."""

    def per_rank(self, saving: Saving) -> Mapping[str, dict[str, Any]]:
        models = self.run.models
        state = {
            "buffers": [] if saving.leads else [saved_buffers(model) for model in models],
            "asks_for_buffers": [getattr(model, "require_forward_param_sync", None) for model in models],
        }
        return {paths.loop_state(self.run.world.rank): state}

    def read(self, source: Loading) -> None:
        self._own = source.own
        for name, buffer, saved in self._pairs():
            if buffer.shape != saved.shape:
                raise CheckpointError(
                    f"{source.checkpoint.folder} is of another model: its buffer {name} is {list(saved.shape)} on rank "
                    f"{source.rank}, here {list(buffer.shape)}."
                )

    def fill(self) -> None:
        if self._own is None:
            return
        for model, asks in zip(self.run.models, self._own["asks_for_buffers"], strict=False):
            if asks is not None and hasattr(model, "require_forward_param_sync"):
                model.require_forward_param_sync = asks
        with torch.no_grad():
            for _, buffer, saved in self._pairs():
                buffer.copy_(saved)

    def _pairs(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Return the name of each buffer that is this rank's own, the buffer, and what was saved of it."""
        buffers = [] if self._own is None else self._own["buffers"]
        for model, saved in zip(self.run.models, buffers, strict=False):
            for name, buffer in saved_buffers(model).items():
                if name in saved:
                    yield name, buffer, saved[name]


def bare_name(name: str) -> str:
    """Return a weight's name without those of wrappers inside a model: torch.compile's, activation checkpointing's."""
    return name.replace(f"{COMPILED_FROM}.", "").replace(_RECOMPUTED, "")


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a model that are part of its state dict, by name: not those with `persistent=False`."""
    passing = {
        f"{path}.{name}".removeprefix(".") for path, module in model.named_modules() for name in passing_buffers(module)
    }
    return {name: buffer.detach() for name, buffer in model.named_buffers() if name not in passing}


def model_shards(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a sharded model under the names of the bare one: each rank's shards."""
    return {bare_name(name): value for name, value in model.state_dict().items()}


def gathered_model(model: nn.Module, state: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """Return a state dict with whole tensors, on the CPU: a collective of all ranks that share its tensors.

    Names of one parameter of `model` get one tensor. A rank that does not `keep` them takes part, and gets nothing.
    """
    owners = {bare_name(name): id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    done: dict[int, Tensor] = {}
    whole: dict[str, Any] = {}
    for name, value in state.items():
        name = bare_name(name)
        owner = owners.get(name, id(value))
        if isinstance(value, Tensor) and is_sharded(value):
            if owner not in done:
                gathered = full(value)
                done[owner] = gathered.detach().cpu() if keep else gathered.new_empty(0)
            value = done[owner]
        elif isinstance(value, Tensor):
            value = value.detach().cpu()
        if keep:
            whole[name] = value
    return whole


def read_model(model: nn.Module, checkpoint: Checkpoint, index: int, strict: bool, taken: int = 0) -> dict[str, Any]:
    """Read the weights of a model and check that they fit: whole tensors, and the local parts of those sharded here.

    The model is the `index`-th that was prepared. Of those before it hooks have taken `taken`, which whole files don't
    count.
    """
    path = checkpoint.model_path(index, taken)
    if paths.SHARDS.fullmatch(path.name):
        return _read_shards(model, path, checkpoint.fetch_spans, strict)
    named = fitted(model, read_weights(path), path, strict)
    state = model.state_dict()
    return {name: cut(value, state.get(name)) for name, value in named.items()}


def cut(value: Any, own: Any) -> Any:
    """Return the part of a whole tensor that this rank holds of its own."""
    sharded = isinstance(own, Tensor) and is_sharded(own)
    return local(spread_like(value, own)).cpu().clone() if sharded else value


def _read_shards(model: nn.Module, folder: Path, fetch: Fetch | None, strict: bool) -> dict[str, Any]:
    stored = lazy.sharded.ShardReader(folder, fetch)
    flat = {".".join(map(str, path[1:])): name for name, path in stored.paths.items() if path[0] == "model"}
    likes = {short: stored.like(name, "meta") for short, name in flat.items()}
    shapes = {short: object() if like is None else like for short, like in likes.items()}
    named = fitted(model, shapes, folder, strict)
    state = model.state_dict()
    source = {id(value): flat[short] for short, value in shapes.items()}
    here = {name: value for name, value in named.items() if name in state}
    sources = {name: source[id(value)] for name, value in here.items()}
    values = stored.read(
        {sources[name]: state[name] if isinstance(value, Tensor) else None for name, value in here.items()}
    )
    return {name: values[sources[name]] for name in here}


def load(model: nn.Module, weights: Mapping[str, Any], strict: bool) -> Any:
    """Give a model the weights that `read_model` returned, and return what `load_state_dict` does."""
    state = model.state_dict()
    shards = {name: value for name, value in state.items() if isinstance(value, Tensor) and is_sharded(value)}
    with torch.no_grad():
        for name in shards.keys() & weights.keys():
            local(shards[name]).copy_(weights[name])
    there = {name: shards.get(name, value) for name, value in weights.items()}
    return model.load_state_dict(there, strict=strict)


def fitted(model: nn.Module, weights: dict[str, Any], path: Path, strict: bool) -> dict[str, Any]:
    """Return `weights` under the names of `model`, if they fit, whatever wrapper they are from; tied ones twice."""
    state = model.state_dict()
    named = _renamed(weights, {bare_name(name): name for name in state})
    names: dict[Any, str] = {}
    ties: dict[str, int] = {}  # which parameter each name is, also if its part on this rank is empty, without memory
    if model_has_dtensor(model):
        ties = {bare_name(name): id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    for name in named:
        if isinstance(state.get(name), Tensor):
            names.setdefault(_identity(state[name], ties.get(bare_name(name))), name)
    for name, value in state.items():
        twin = names.get(_identity(value, ties.get(bare_name(name)))) if isinstance(value, Tensor) else None
        if name not in named and twin is not None:
            named[name] = named[twin]
    hooked = any(changes_what_it_loads(module) for module in model.modules())
    missing, odd = state.keys() - named.keys(), named.keys() - state.keys()
    if strict and not hooked and (missing or odd):
        raise CheckpointError(
            f"{path} is of another model: {counted(len(missing), 'name')} missing ({', '.join(sorted(missing)[:3])}), "
            f"{len(odd)} unknown here ({', '.join(sorted(odd)[:3])})."
        )
    for name in state.keys() & named.keys():
        shape = getattr(named[name], "shape", ())
        if isinstance(state[name], Tensor) and not hooked and state[name].shape != shape:
            raise CheckpointError(
                f"{path} is of another model: {name} is {list(shape)}, here {list(state[name].shape)}."
            )
    return named


def _renamed(weights: dict[str, Any], own: dict[str, str]) -> dict[str, Any]:
    """Return `weights` under a model's names: as they are, or else without DDP's `module.`, or with it.

    A model may itself have a child called `module`, so of the three that counts in which most names are the model's.
    `own` maps bare names to the model's.
    """
    ways: tuple[Callable[[str], str], ...] = (str, lambda name: name.removeprefix("module."), "module.".__add__)
    attempts = [{own.get(way(bare_name(name)), name): value for name, value in weights.items()} for way in ways]
    return max(attempts, key=lambda named: len(named.keys() & own.values()))


def _identity(tensor: Tensor, tie: int | None) -> Any:
    """Return what is the same for two names of one parameter: its tie, if it has one, else its memory."""
    if tie is not None or not tensor.numel():
        return id(tensor) if tie is None else tie
    return memory_of(tensor)
