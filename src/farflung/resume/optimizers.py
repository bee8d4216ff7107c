# SPDX-License-Identifier: Apache-2.0
"""Optimizers in a checkpoint, whole or in shards: each form is read into optimizers that have either."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from farflung.base.errors import CheckpointError, ConfigError
from farflung.base.tree import leaves_of, recursively_apply
from farflung.base.words import counted
from farflung.checkpoint import paths
from farflung.checkpoint.checkpoint import Checkpoint
from farflung.checkpoint.entries import Entry
from farflung.checkpoint.reader import damage_as, read_torch
from farflung.comm.shards import full, is_sharded, local, spread_like, with_local
from farflung.loop.optimizer import AcceleratedOptimizer, parameters_of
from farflung.resume import lazy
from farflung.resume.models import bare_name
from farflung.resume.part import Loading, Part, Saving
from farflung.resume.run import Run

if TYPE_CHECKING:
    from farflung.checkpoint.sharded import ShardReader

_KEYS = "optimizer_keys"  # in a folder of shards, next to the optimizer's state


class Optimizers(Part):
    """The states of all optimizers: replicated, or sharded; of replicas that train apart each rank's own."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._gathered: dict[int, dict[str, Any]] = {}
        self._optimizers = run.optimizers

    def check(self) -> None:
        for optimizer in self._optimizers:
            check_optimizer(self.run.bare_models, optimizer)

    def gather(self, saving: Saving) -> None:
        self._gathered = {
            k: gathered_optimizer(one, saving.writes(paths.optimizer(k)))
            for k, one in enumerate(self._optimizers)
            if has_shards(one)
        }

    def replicated(self, saving: Saving) -> Iterable[Entry]:
        for k, one in enumerate(self._optimizers):
            name = paths.optimizer(k)
            if saving.writes(name) and (k in self._gathered or not has_shards(one)):
                yield Entry(name, self._gathered.get(k) or one.state_dict(), origin=type(one.optimizer).__name__)

    def sharded(self) -> Mapping[str, dict[str, Any]]:
        models = self.run.bare_models
        return {
            paths.optimizer_shards(k): for_shards(by_name(one.state_dict(), parameter_names(models, one)))
            for k, one in enumerate(self._optimizers)
            if has_shards(one)
        }

    def per_rank(self, saving: Saving) -> Mapping[str, dict[str, Any]]:
        if saving.leads or not self.run.replicas_differ:
            return {}
        states = [local_optimizer(optimizer) if optimizer.is_own else None for optimizer in self._optimizers]
        return {paths.outer_state(self.run.world.rank): {"optimizers": states}}

    def read(self, source: Loading) -> None:
        checkpoint, manifest = source.checkpoint, source.checkpoint.manifest
        steps = None if manifest is None else manifest.optimizer_steps
        unknown = [None] * len(self._optimizers)
        self._steps = steps if steps and len(steps) == len(unknown) else unknown
        self._states = []
        for k, one in enumerate(self._optimizers):
            own = source.apart_of("optimizers", k)
            if own is None:
                state = read_optimizer(self.run.bare_models, one, checkpoint, k)
            else:
                state = from_local(own, one)
            _check_groups(state, one, checkpoint.folder / paths.optimizer(k))
            self._states.append(state)

    def load(self, undo: ExitStack) -> None:
        for one, state, completed in zip(self._optimizers, self._states, self._steps, strict=True):
            bare: Any = one.optimizer
            groups = [dict(group) for group in bare.param_groups]
            undo.callback(bare.__setstate__, {"state": bare.state, "param_groups": groups})
            undo.callback(setattr, one, "completed_steps", one.completed_steps)
            one.load_state_dict(state)
            one.completed_steps = completed


def _check_groups(state: Any, optimizer: AcceleratedOptimizer, path: Path) -> None:
    with damage_as(f"{path} is not the state of an optimizer"):
        saved = [len(group["params"]) for group in state["param_groups"]]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if saved != here:
        raise CheckpointError(
            f"{path} is of an optimizer whose groups have {saved} parameters, but those of this one have {here}."
        )


def has_shards(optimizer: Any) -> bool:
    """Return whether an optimizer trains sharded parameters."""
    return any(map(is_sharded, parameters_of(optimizer)))


def parameter_names(models: Sequence[nn.Module], optimizer: Any) -> list[str]:
    """Return the names of an optimizer's parameters in order; those of several models begin with the model's number."""
    mine = parameters_of(optimizer)
    wanted = set(map(id, mine))
    found = [{id(p): bare_name(name) for name, p in model.named_parameters() if id(p) in wanted} for model in models]
    owners = [k for k, names in enumerate(found) if names]
    known: dict[int, str] = {}
    for k in reversed(owners):
        known.update({key: name if len(owners) == 1 else f"{k}.{name}" for key, name in found[k].items()})
    return [known.get(id(parameter), f"parameter {number}") for number, parameter in enumerate(mine)]


def by_name(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the state dict of an optimizer with names in place of numbers, as torch's DCP keeps it."""
    return {
        "state": {names[number]: kept for number, kept in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]
        ],
    }


def for_shards(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `by_name` did as the folder of an optimizer holds it, with the keys that DCP would turn into text."""
    keys = _other_keys(state, ())
    return {"optimizer": state, **({_KEYS: keys} if keys else {})}


def _other_keys(node: Any, path: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], list[Any]]]:
    """Return where dictionaries stand whose keys are not all text, each with its keys."""
    others: list[tuple[tuple[Any, ...], list[Any]]] = []
    inner: Iterable[tuple[Any, Any]] = enumerate(node) if isinstance(node, list) else ()
    if isinstance(node, Mapping):
        inner = ((str(key), value) for key, value in node.items())
        others = [] if all(isinstance(key, str) for key in node) else [(path, list(node))]
    return others + [found for key, value in inner for found in _other_keys(value, (*path, key))]


def _with_keys(node: Any, keys: Mapping[tuple[Any, ...], list[Any]], path: tuple[Any, ...] = ()) -> Any:
    """Return a state with the keys that `_other_keys` found in place of the same as text."""
    if type(node) is list:
        return [_with_keys(value, keys, (*path, number)) for number, value in enumerate(node)]
    if type(node) is not dict:
        return node
    own = {str(key): key for key in keys.get(path, ())}
    return {own.get(key, key): _with_keys(value, keys, (*path, key)) for key, value in node.items()}


def by_number(state: Mapping[str, Any], names: Sequence[str], optimizer: Any, path: Path) -> dict[str, Any]:
    """Undo `by_name`, with the parameters' numbers here; CheckpointError if parameters or groups are others."""
    group_of = {name: k for k, group in enumerate(state["param_groups"]) for name in group["params"]}
    missing, odd = set(names) - group_of.keys(), group_of.keys() - set(names)
    if missing or odd:
        raise CheckpointError(
            f"{path} is of an optimizer of other parameters: {counted(len(missing), 'name')} missing "
            f"({', '.join(sorted(missing)[:3])}), {len(odd)} unknown here ({', '.join(sorted(odd)[:3])})."
        )
    groups: list[dict[str, Any]] = []
    first = 0
    for group in optimizer.param_groups:
        numbers = list(range(first, first + len(group["params"])))
        first += len(numbers)
        saved = {group_of[names[number]] for number in numbers} or {len(groups)}
        if len(saved) > 1 or max(saved) >= len(state["param_groups"]):
            raise CheckpointError(f"{path} is of an optimizer whose parameters are in other groups than here.")
        groups.append({**state["param_groups"][saved.pop()], "params": numbers})
    kept = {number: state["state"][name] for number, name in enumerate(names) if name in state["state"]}
    return {"state": kept, "param_groups": groups}


def _mapped(state: Mapping[str, Any], change: Callable[[int, Any], Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with each tensor that it keeps changed, given its parameter's number."""
    mapped = {number: recursively_apply(partial(change, number), one) for number, one in state["state"].items()}
    return {**state, "state": mapped}


def check_optimizer(models: Sequence[nn.Module], optimizer: Any) -> None:
    """Raise ConfigError if an optimizer keeps a plain tensor, or a partly sharded list, of this rank's shard."""
    mine = parameters_of(optimizer)
    for number, kept in optimizer.state_dict()["state"].items() if has_shards(optimizer) else ():
        own = local(mine[number]).shape
        for key, value in kept.items():
            tensors = [leaf if isinstance(leaf, Tensor) else torch.empty(()) for leaf in leaves_of(value)]
            plain = [tensor for tensor in tensors if not is_sharded(tensor)]
            is_part = own != mine[number].shape and any(one.shape == own and one.numel() > 1 for one in plain)
            if is_part or (type(value) is not dict and 0 < len(plain) < len(tensors)):
                name = parameter_names(models, optimizer)[number]
                what = f"a plain tensor {list(own)}, the shape of this rank's part" if is_part else "partly sharded"
                raise ConfigError(
                    f"{key!r}, which {type(optimizer).__name__} keeps of the sharded {name}, is {what}: it would be "
                    "saved for one rank alone. Keep a tensor like the parameter, as torch.zeros_like(parameter) makes."
                )


def local_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return the state dict of an optimizer with the local part of what is sharded."""
    return _mapped(optimizer.state_dict(), lambda _, value: local(value) if is_sharded(value) else value)


def from_local(state: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """Return what `local_optimizer` did with the local parts sharded as the parameters are."""
    return _like_parameters(state, optimizer, lambda shard: local(shard).shape, with_local)


def _like_parameters(
    state: Mapping[str, Any],
    optimizer: Any,
    shape_of: Callable[[Tensor], torch.Size],
    spread: Callable[[Tensor, Tensor], Tensor],
) -> dict[str, Any]:
    """Return an optimizer's state dict with `spread(value, parameter)` for values of sharded parameters' shapes."""
    mine = parameters_of(optimizer)
    return _mapped(
        state,
        lambda number, value: (
            spread(value, mine[number]) if is_sharded(mine[number]) and value.shape == shape_of(mine[number]) else value
        ),
    )


def gathered_optimizer(optimizer: Any, keep: bool) -> dict[str, Any]:
    """Return the state dict of an optimizer with whole tensors, on the CPU: a collective, as for a model."""

    def gather(_: int, value: Tensor) -> Tensor:
        whole = full(value) if is_sharded(value) else value
        return whole.detach().cpu() if keep else whole.new_empty(0)

    whole = _mapped(optimizer.state_dict(), gather)
    return whole if keep else {}


def read_optimizer(models: Sequence[nn.Module], optimizer: Any, checkpoint: Checkpoint, index: int) -> dict[str, Any]:
    """Read the state dict of an optimizer, in shards where its parameters are, and check that it is one."""
    shards = checkpoint.folder / paths.optimizer_shards(index)
    path = shards if shards.is_dir() else checkpoint.folder / paths.optimizer(index)
    with damage_as(f"{path} is not the state of an optimizer"):
        if shards.is_dir():
            return _read_optimizer_shards(models, optimizer, lazy.sharded.ShardReader(shards, checkpoint.fetch_spans))
        state: dict[str, Any] = read_torch(path)
        if any(isinstance(name, str) for group in state["param_groups"] for name in group["params"]):
            state = by_number(state, parameter_names(models, optimizer), optimizer, path)
        return _like_parameters(state, optimizer, lambda shard: shard.shape, spread_like)


def _read_optimizer_shards(models: Sequence[nn.Module], optimizer: Any, stored: ShardReader) -> dict[str, Any]:
    paths = {name: path[1:] for name, path in stored.paths.items() if path[0] == "optimizer" and len(path) > 2}
    groups = {name: path for name, path in paths.items() if path[0] == "param_groups"}
    described = stored.read(dict.fromkeys(groups))
    param_groups = lazy.sharded.nested({groups[name][1:]: value for name, value in described.items()})
    names = parameter_names(models, optimizer)
    of_name = dict(zip(names, parameters_of(optimizer), strict=True))
    kept = {name: path for name, path in paths.items() if path[0] == "state" and path[1] in of_name}
    shards = {name: of_name[path[1]] for name, path in kept.items() if is_sharded(of_name[path[1]])}
    alike = {name: shard for name, shard in shards.items() if stored.sizes.get(name) == shard.shape}
    values = stored.read({name: alike.get(name) for name in kept})
    for name, shard in alike.items():
        values[name] = with_local(values[name], shard)
    state = lazy.sharded.nested({kept[name][1:]: value for name, value in values.items()})
    keys = dict(stored.read({_KEYS: None})[_KEYS]) if _KEYS in stored.paths else {}
    whole = _with_keys({"state": state, "param_groups": param_groups}, keys)
    return by_number(whole, names, optimizer, stored.folder)
