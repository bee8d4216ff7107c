# SPDX-License-Identifier: Apache-2.0
"""Models and optimizers in a checkpoint, whole or in shards: each form is read into models that have either.

What was read of something sharded is always the local part, on the CPU, whatever form it was written in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farflung.accelerator import lazy
from farflung.base.errors import CheckpointError, ConfigError
from farflung.base.forms import memory_of
from farflung.base.torch_internals import COMPILED_FROM, changes_what_it_loads, passing_buffers
from farflung.base.tree import leaves_of, rebuilt
from farflung.base.words import counted
from farflung.checkpoint import discovery, layout
from farflung.checkpoint.reader import DAMAGE, read_torch, read_weights
from farflung.comm.shards import full, is_sharded, local, model_has_dtensor, spread_like, with_local

_KEYS = "optimizer_keys"  # in a folder of shards, beside the optimizer's state
_RECOMPUTED = "_checkpoint_wrapped_module."  # where torch's wrapper for activation checkpointing keeps a module


def bare_name(name: str) -> str:
    """Return a weight's name without those of wrappers inside a model: torch.compile's, activation checkpointing's."""
    return name.replace(f"{COMPILED_FROM}.", "").replace(_RECOMPUTED, "")


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a model that are part of its state dict, by name: not those with `persistent=False`."""
    passing = {
        f"{path}.{name}".removeprefix(".") for path, module in model.named_modules() for name in passing_buffers(module)
    }
    return {name: buffer.detach() for name, buffer in model.named_buffers() if name not in passing}


# ---- states of what is sharded


def model_shards(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a sharded model under the names of the bare one: each rank's shards."""
    return {bare_name(name): value for name, value in model.state_dict().items()}


def has_shards(optimizer: Any) -> bool:
    """Say whether an optimizer trains sharded parameters."""
    return any(map(is_sharded, parameters(optimizer)))


def parameters(optimizer: Any) -> list[Tensor]:
    """Return the parameters of an optimizer in the order of its groups, in which a state dict numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parameter_names(models: Sequence[nn.Module], optimizer: Any) -> list[str]:
    """Return the names of an optimizer's parameters in their models, in order.

    Where they are of several models, the model's number comes before each name.
    """
    mine = parameters(optimizer)
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
    own: list[tuple[tuple[Any, ...], list[Any]]] = []
    inner: Iterable[tuple[Any, Any]] = enumerate(node) if isinstance(node, list) else ()
    if isinstance(node, Mapping):
        inner = ((str(key), value) for key, value in node.items())
        own = [] if all(isinstance(key, str) for key in node) else [(path, list(node))]
    return own + [found for key, value in inner for found in _other_keys(value, (*path, key))]


def _with_keys(node: Any, keys: Mapping[tuple[Any, ...], list[Any]], path: tuple[Any, ...] = ()) -> Any:
    """Return a state with the keys that `_other_keys` found in place of the same as text."""
    if type(node) is list:
        return [_with_keys(value, keys, (*path, number)) for number, value in enumerate(node)]
    if type(node) is not dict:
        return node
    own = {str(key): key for key in keys.get(path, ())}
    return {own.get(key, key): _with_keys(value, keys, (*path, key)) for key, value in node.items()}


def by_number(state: Mapping[str, Any], names: Sequence[str], optimizer: Any, path: Path) -> dict[str, Any]:
    """Return the state dict of an optimizer with the numbers of its parameters here in place of names.

    Raises:
        CheckpointError: it is of other parameters, or they are in other groups.
    """
    places = {name: k for k, group in enumerate(state["param_groups"]) for name in group["params"]}
    missing, odd = set(names) - places.keys(), places.keys() - set(names)
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
        saved = {places[names[number]] for number in numbers} or {len(groups)}
        if len(saved) > 1 or max(saved) >= len(state["param_groups"]):
            raise CheckpointError(f"{path} is of an optimizer whose parameters are in other groups than here.")
        groups.append({**state["param_groups"][saved.pop()], "params": numbers})
    kept = {number: state["state"][name] for number, name in enumerate(names) if name in state["state"]}
    return {"state": kept, "param_groups": groups}


def _mapped(state: Mapping[str, Any], change: Callable[[int, Any], Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with each tensor that it keeps changed, given its parameter's number."""

    def changed(number: int, value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(number, value)
        return rebuilt(value, partial(changed, number)) if type(value) in (dict, list, tuple) else value

    return {**state, "state": {number: changed(number, one) for number, one in state["state"].items()}}


def check_optimizer(models: Sequence[nn.Module], optimizer: Any) -> None:
    """Check that what an optimizer keeps of sharded parameters is sharded too, or the same on all ranks.

    Raises:
        ConfigError: it is a plain tensor of the size of this rank's part; or a list of sharded tensors and others.
    """
    mine = parameters(optimizer)
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
    mine = parameters(optimizer)

    def spread(number: int, value: Tensor) -> Tensor:
        shard = mine[number]
        return with_local(value, shard) if is_sharded(shard) and value.shape == local(shard).shape else value

    return _mapped(state, spread)


def gathered_model(model: nn.Module, state: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """Return a state dict with whole tensors, on the CPU: a collective of all ranks that share its tensors.

    Args:
        model: whose state it is; names of one parameter get one tensor.
        keep: False: this rank only takes part, and gets nothing.
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


def gathered_optimizer(optimizer: Any, keep: bool) -> dict[str, Any]:
    """Return the state dict of an optimizer with whole tensors, on the CPU: a collective, as of a model."""

    def gather(_: int, value: Tensor) -> Tensor:
        whole = full(value) if is_sharded(value) else value
        return whole.detach().cpu() if keep else whole.new_empty(0)

    whole = _mapped(optimizer.state_dict(), gather)
    return whole if keep else {}


# ---- reading


def read_model(model: nn.Module, folder: Path, index: int, strict: bool, taken: int = 0) -> dict[str, Any]:
    """Read the weights of a model and check that they fit; the names are those of `model`, wrapped or not.

    Args:
        index: the model's place among those that were prepared.
        taken: how many before it are left to hooks, which took them out of the whole files too.

    Returns:
        whole tensors; the local parts of those that are sharded here.

    Raises:
        CheckpointError: they are missing, damaged, or of another model.
    """
    path = discovery.model_path(folder, index, taken)
    if layout.is_shards(path.name):
        return _read_shards(model, path, strict)
    named = fitted(model, read_weights(path), path, strict)
    own = model.state_dict()
    return {name: cut(value, own.get(name)) for name, value in named.items()}


def cut(value: Any, own: Any) -> Any:
    """Return the part of a whole tensor that this rank holds of its own."""
    sharded = isinstance(own, Tensor) and is_sharded(own)
    return local(spread_like(value, own)).cpu().clone() if sharded else value


def _read_shards(model: nn.Module, folder: Path, strict: bool) -> dict[str, Any]:
    stored = lazy.ShardReader(folder)
    flat = {".".join(map(str, path[1:])): name for name, path in stored.paths.items() if path[0] == "model"}
    shapes = {
        short: torch.empty(stored.sizes[name], dtype=stored.dtypes[name], device="meta")
        if name in stored.sizes
        else object()
        for short, name in flat.items()
    }
    named = fitted(model, shapes, folder, strict)
    own = model.state_dict()
    source = {id(value): flat[short] for short, value in shapes.items()}
    here = {name: value for name, value in named.items() if name in own}
    sources = {name: source[id(value)] for name, value in here.items()}
    found = stored.read(
        {sources[name]: own[name] if isinstance(value, Tensor) else None for name, value in here.items()}
    )
    return {name: found[sources[name]] for name in here}


def load(model: nn.Module, weights: Mapping[str, Any], strict: bool) -> Any:
    """Give a model the weights that `read_model` returned, and return what `load_state_dict` does."""
    own = model.state_dict()
    shards = {name: value for name, value in own.items() if isinstance(value, Tensor) and is_sharded(value)}
    with torch.no_grad():
        for name in shards.keys() & weights.keys():
            local(shards[name]).copy_(weights[name])
    there = {name: shards.get(name, value) for name, value in weights.items()}
    return model.load_state_dict(there, strict=strict)


def read_optimizer(models: Sequence[nn.Module], optimizer: Any, folder: Path, index: int) -> dict[str, Any]:
    """Read the state dict of an optimizer, in shards where its parameters are.

    Raises:
        CheckpointError: it is missing, damaged, or of another optimizer.
    """
    shards = folder / layout.optimizer_shards(index)
    path = shards if shards.is_dir() else folder / layout.optimizer(index)
    try:
        if shards.is_dir():
            return _read_optimizer_shards(models, optimizer, shards)
        state: dict[str, Any] = read_torch(path)
        if any(isinstance(name, str) for group in state["param_groups"] for name in group["params"]):
            state = by_number(state, parameter_names(models, optimizer), optimizer, path)
        mine = parameters(optimizer)
        if not any(map(is_sharded, mine)):
            return state

        def spread(number: int, value: Tensor) -> Tensor:
            shard = mine[number]
            return spread_like(value, shard) if is_sharded(shard) and value.shape == shard.shape else value

        return _mapped(state, spread)
    except DAMAGE as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not the state of an optimizer: {error!r}") from error


def _read_optimizer_shards(models: Sequence[nn.Module], optimizer: Any, folder: Path) -> dict[str, Any]:
    stored = lazy.ShardReader(folder)
    paths = {name: path[1:] for name, path in stored.paths.items() if path[0] == "optimizer" and len(path) > 2}
    groups = {name: path for name, path in paths.items() if path[0] == "param_groups"}
    described = stored.read({name: _empty(stored, name) for name in groups})
    param_groups = lazy.nested({groups[name][1:]: value for name, value in described.items()})
    names = parameter_names(models, optimizer)
    of_name = dict(zip(names, parameters(optimizer), strict=True))
    kept = {name: path for name, path in paths.items() if path[0] == "state" and path[1] in of_name}
    shards = {name: of_name[path[1]] for name, path in kept.items() if is_sharded(of_name[path[1]])}
    alike = {name: shard for name, shard in shards.items() if stored.sizes.get(name) == shard.shape}
    values = stored.read({name: alike.get(name, _empty(stored, name)) for name in kept})
    for name, shard in alike.items():
        values[name] = with_local(values[name], shard)
    state = lazy.nested({kept[name][1:]: value for name, value in values.items()})
    keys = dict(stored.read({_KEYS: None})[_KEYS]) if _KEYS in stored.paths else {}
    whole = _with_keys({"state": state, "param_groups": param_groups}, keys)
    return by_number(whole, names, optimizer, folder)


def _empty(stored: Any, name: str) -> Tensor | None:
    return torch.empty(stored.sizes[name], dtype=stored.dtypes[name]) if name in stored.sizes else None


def fitted(model: nn.Module, weights: dict[str, Any], path: Path, strict: bool) -> dict[str, Any]:
    """Return `weights` under the names of `model`, whatever wrapper they were saved from, with tied ones given twice.

    Raises:
        CheckpointError: names or shapes are of another model.
    """
    own = model.state_dict()
    named = _renamed(weights, {bare_name(name): name for name in own})
    places: dict[Any, str] = {}
    ties = _ties(model)
    for name in named:
        if isinstance(own.get(name), Tensor):
            places.setdefault(_place(own[name], ties.get(bare_name(name))), name)
    for name, value in own.items():
        twin = places.get(_place(value, ties.get(bare_name(name)))) if isinstance(value, Tensor) else None
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
        shape = getattr(named[name], "shape", ())
        if isinstance(own[name], Tensor) and not hooked and own[name].shape != shape:
            raise CheckpointError(f"{path} is of another model: {name} is {list(shape)}, here {list(own[name].shape)}.")
    return named


def _renamed(weights: dict[str, Any], own: dict[str, str]) -> dict[str, Any]:
    """Return `weights` under the names of a model: as they are, or else without DDP's `module.`, or with it.

    A model may itself have a child called `module`, so of the three that counts in which most names are the model's.

    Args:
        own: the names of the model, by their bare ones.
    """
    ways: tuple[Callable[[str], str], ...] = (str, lambda name: name.removeprefix("module."), "module.".__add__)
    attempts = [{own.get(way(bare_name(name)), name): value for name, value in weights.items()} for way in ways]
    return max(attempts, key=lambda named: len(named.keys() & own.values()))


def _ties(model: nn.Module) -> dict[str, int]:
    """Return which parameter each name is, where parts on this rank may be empty and have no place in memory."""
    if not model_has_dtensor(model):
        return {}
    return {bare_name(name): id(p) for name, p in model.named_parameters(remove_duplicate=False)}


def _place(tensor: Tensor, tie: int | None) -> Any:
    if tie is not None or not tensor.numel():
        return id(tensor) if tie is None else tie
    return memory_of(tensor)
