# SPDX-License-Identifier: Apache-2.0
"""The structure of a model, by which a change is noticed, and descriptions of what its ranks exchange and save."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from farflung.base.checks import shown, wrong_type
from farflung.base.errors import ConfigError
from farflung.base.torch_internals import own_buffers, own_parameters, passing_buffers
from farflung.base.words import counted
from farflung.comm.bucket import Buckets
from farflung.comm.shards import addresses, local, num_parts, reshard
from farflung.methods.fragments import Fragment, TensorPlace
from farflung.methods.recipe import Recipe
from farflung.votes.generation import Parts

_STATE = ("description", "position", "synced", "began", "seconds", "lr", "stats", "rounds")
AVERAGE = "average over rounds:"  # how a running mean of the weights is described

_kind = attrgetter("dtype", "shape")


def structure_of(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return a model's structure, and the objects whose ids are in it: while they are held, no other gets these ids.

    It lists a model's parameters and buffers with their places and kinds, and which of them share memory. It contains
    neither values nor addresses: a parameter whose `.data` was given other memory of the same shape and dtype is the
    same one. Column by column, because every round computes it: 0.3 ms for 500 tensors, tensor by tensor 0.5 ms.
    """
    modules = list(model.modules())
    reshard(modules)
    parameters: list[Tensor] = []
    seen: list[Any] = []
    for module in modules:
        own = {key: parameter for key, parameter in own_parameters(module).items() if parameter is not None}
        passing = passing_buffers(module)
        kept = {
            key: (buffer.dtype, buffer.shape)
            for key, buffer in own_buffers(module).items()
            if buffer is not None and key not in passing
        }
        parameters += own.values()
        seen += [id(module), list(own), list(map(id, own.values())), list(map(_kind, own.values())), kept]
    first: dict[int, int] = {}
    ties = [first.setdefault(at, number) for number, at in enumerate(addresses(parameters)) if at]
    return [*seen, ties], [parameters, modules]


def line_of(place: TensorPlace) -> str:
    """Describe a tensor in a line, which begins with its name."""
    tensor = place.get()
    return f"{place.name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def text_of(parts: Parts) -> str:
    """Return a description as a text."""
    return "; ".join(map(", ".join, parts))


_MEMORY = re.compile(r" at 0x[0-9a-fA-F]+")  # where a function is, another place in each process


def settings_of(recipe: Recipe) -> list[str]:
    """Describe what must be the same on all ranks whatever they train."""
    outer = "none"
    if recipe.optimizer is not None:
        probe = recipe.optimizer([torch.nn.Parameter(torch.zeros(1))])
        outer = f"{type(probe).__name__}({', '.join(f'{key}={value}' for key, value in probe.defaults.items())})"
    rule = [recipe.schedule, recipe.codec, recipe.aggregator, recipe.policy, f"by {recipe.weigh_by}", recipe.merge]
    rule += ["eager"] if recipe.eager else []
    rule += [f"{AVERAGE} {recipe.average}"] if recipe.average else []
    return [_MEMORY.sub("", str(one)) for one in (*rule, recipe.inner, f"outer optimizer {outer}", *recipe.changes)]


def described(recipe: Recipe, fragments: Sequence[Fragment], cap_bytes: int) -> tuple[Parts, list[str]]:
    """Describe, for errors, what must be the same on all ranks, and each tensor that is exchanged."""
    layout, tensors = hashlib.blake2b(digest_size=4), []
    places = [(number, place) for number, fragment in enumerate(fragments) for place in fragment.places]
    for number, place in places:
        tensor = place.get()  # the whole one, the same on all ranks of an island
        kind = f"{tensor.dtype} {list(tensor.shape)} {local(tensor).is_contiguous()}"
        layout.update(f"{number} {place.name} {kind};".encode())
        tensors.append(line_of(place))
    numel = sum(place.get().numel() for fragment in fragments for place in fragment.parameters)
    cut = (
        f"{counted(len(fragments), 'fragment')} of {counted(len(places), 'tensor')} with "
        f"{counted(numel, 'trainable value')} (layout {layout.hexdigest()})"
    )
    return [settings_of(recipe), [cut, f"buckets of {cap_bytes} bytes"]], tensors


def buckets_of(places: Sequence[TensorPlace], cap_bytes: int, num_buffers: int | None, island_size: int = 1) -> Buckets:
    """Plan buckets for tensors where a model has them, of a dtype that holds all their values."""
    tensors = [place.get() for place in places]
    if any(tensor.is_complex() for tensor in tensors):
        names = [place.name for place in places if place.get().is_complex()]
        raise ConfigError(f"{names[0]} is complex, which the outer loop can't average. Keep it as a real tensor.")
    dtype = torch.float32 if not tensors or tensors[0].is_floating_point() else torch.int64
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        dtype = torch.float64
    shares = [num_parts(tensor) / island_size for tensor in tensors]  # of several ranks that hold a value
    return Buckets(tensors, dtype, cap_bytes=cap_bytes, num_buffers=num_buffers, shares=shares)


def adapter_in(model: nn.Module) -> dict[str, Any] | None:
    """Return the settings of a peft model's active adapter as JSON, and how peft's file names each tensor, by name.

    None: the model has no adapter, or one whose saved values are computed, such as prompts.
    """
    peft: Any = sys.modules.get("peft")  # a model of peft has loaded it
    for prefix, module in model.named_modules() if peft is not None else ():
        if isinstance(module, peft.PeftModel) and not module.active_peft_config.is_prompt_learning:
            tensors = module.state_dict(keep_vars=True)
            found = peft.get_peft_model_state_dict(module, tensors, module.active_adapter, save_embedding_layers=False)
            names = {id(x): f"{prefix}.{name}".lstrip(".") for name, x in tensors.items()}
            if names.keys() >= {id(x) for x in found.values()}:
                settings = {**module.active_peft_config.to_dict(), "inference_mode": True}
                own = {names[id(x)]: name for name, x in found.items()}
                return {"settings": json.dumps(settings, default=list, indent=2), "names": own}
    return None


def check_form(where: str, state: object) -> None:
    """Raise ConfigError unless `state` is that of an outer loop."""
    if not isinstance(state, Mapping):
        raise wrong_type(where, state, "what OuterLoop.state_dict() returned")
    missing = [name for name in _STATE if name not in state]
    if missing:
        raise ConfigError(
            f"{where}: {shown(list(state)) if state else '{}'} is not the state of an outer loop: {', '.join(missing)} "
            "is missing. Give it what OuterLoop.state_dict() returned."
        )


def check_state(state: Mapping[str, Any], like: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the state of a loop has the same description and shards as `like`."""
    saved, here = state["description"], like["description"]
    if saved != here:
        pairs = zip(state["parts"], like["parts"], strict=False) if "parts" in state else [(saved, here)]
        odd = [f"{theirs} (here {mine})" for theirs, mine in pairs if theirs != mine]
        raise ConfigError(f"This state was saved by another outer loop, with {', '.join(odd)}. Give both the same.")
    old, new = state.get("shard", 0), like.get("shard", 0)
    if old != new:
        raise ConfigError(
            f"This state was saved by rank {old} of an island, and this is rank {new} of one, with other shards. "
            "Load on each rank what it saved."
        )


def identity_of(parts: Parts, shard: int) -> dict[str, Any]:
    """Return the part of a state that must equal that of the loop that loads it: all but a mean of its weights."""
    kept = [[part for part in group if not part.startswith(AVERAGE)] for group in parts]
    return {"description": text_of(kept), "parts": [part for group in kept for part in group], "shard": shard}
