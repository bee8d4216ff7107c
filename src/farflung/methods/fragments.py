# SPDX-License-Identifier: Apache-2.0
"""What is exchanged together: a model cut into fragments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from farflung.base.checks import check_callable, check_type, check_whole, wrong_type
from farflung.base.errors import ConfigError
from farflung.base.torch_internals import own_buffers, own_parameters, passing_buffers
from farflung.base.words import counted
from farflung.comm.shards import local
from farflung.comm.tensor_memory import check_exchangeable, memory_of


@dataclass(frozen=True)
class TensorPlace:
    """Where a model keeps a tensor, so that it is found again after it was replaced by another."""

    name: str
    owner: Mapping[str, Any]  # a module's own dictionary
    key: str
    is_embedding: bool = False  # a parameter of an nn.Embedding, which another module may use too

    def get(self) -> Tensor:
        """Return the tensor; a complex buffer, such as rotary frequencies, as pairs of real numbers in its memory."""
        tensor: Tensor = self.owner[self.key]
        return torch.view_as_real(tensor) if tensor.is_complex() and not isinstance(tensor, nn.Parameter) else tensor


@dataclass(frozen=True)
class Fragment:
    """Tensors that are exchanged together."""

    parameters: tuple[TensorPlace, ...]  # trainable ones; a tensor with two names is here once
    averages: tuple[TensorPlace, ...]  # floating buffers, such as the running statistics of a BatchNorm
    counters: tuple[TensorPlace, ...]  # integer and boolean buffers

    @property
    def kinds(self) -> tuple[tuple[TensorPlace, ...], ...]:
        return self.parameters, self.averages, self.counters

    @property
    def places(self) -> tuple[TensorPlace, ...]:
        """Everything that is exchanged."""
        return self.parameters + self.averages + self.counters


Cut: TypeAlias = Callable[[nn.Module, int], list[Fragment]]
_Choose: TypeAlias = Callable[[str], "int | None"]


def whole(model: nn.Module, count: int = 1) -> list[Fragment]:
    """Make one fragment of the whole model.

    Buffers that are not part of the state dict are left out: each rank can rebuild them.

    Raises:
        ConfigError: more than one fragment is asked for, or a parameter of the model has no shape yet.
    """
    if count != 1:
        raise ConfigError(f"The schedule has {count} fragments: split the model with strided, blocks or by_bytes.")
    return _cut(model, 1, lambda name: 0)


def strided(model: nn.Module, count: int) -> list[Fragment]:
    """Put block b of the model into fragment b modulo `count`, and the rest into the smallest fragments.

    Blocks are the children of the longest `ModuleList` or `Sequential`, such as a transformer's layers. Strides give
    every fragment layers from all depths, which trained best in Streaming DiLoCo (arXiv:2501.18512).

    Raises:
        ConfigError: the model has fewer blocks than fragments are asked for.
    """
    return _by_block(model, count, lambda block, blocks: block % count)


def blocks(model: nn.Module, count: int) -> list[Fragment]:
    """Put neighbouring blocks of the model into one fragment, and the rest into the smallest fragments.

    Raises:
        ConfigError: the model has fewer blocks than fragments are asked for.
    """
    return _by_block(model, count, lambda block, blocks: block * count // blocks)


def by_bytes(model: nn.Module, count: int) -> list[Fragment]:
    """Put each tensor, the largest first, into the smallest fragment: as even as whole tensors allow.

    Raises:
        ConfigError: the model trains fewer tensors than fragments are asked for.
    """
    return _cut(model, count, lambda name: None)


def apart(cut: Cut, kind: type[nn.Module] = nn.Embedding) -> Cut:
    """Return a cut that gives modules of one kind a fragment of their own, the last one, and leaves the rest to `cut`.

    Raises:
        ConfigError: when it is used, if the model has no such module or only one fragment is asked for.
    """

    check_callable("cut", cut, "farflung.outer.strided")
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise wrong_type("kind", kind, "a class of modules, such as nn.Embedding")

    def cut_apart(model: nn.Module, count: int) -> list[Fragment]:
        parameters = [p for module in model.modules() if isinstance(module, kind) for p in module.parameters()]
        inside = {id(parameter) for parameter in parameters}
        if not inside or count < 2:
            raise ConfigError(f"apart({kind.__name__}) needs such a module, and two fragments or more, not {count}.")
        last = _only(whole(model)[0], inside, True)
        with training(model, lambda one: one.requires_grad and id(one) not in inside):  # which count no bytes meanwhile
            return [*(_only(fragment, inside, False) for fragment in cut(model, count - 1)), last]

    return cut_apart


@contextmanager
def training(model: nn.Module, is_trained: Callable[[Tensor], bool]) -> Iterator[None]:
    """Within the block, a cut takes these parameters for the trained ones."""
    flags = [(one, one.requires_grad, is_trained(one)) for one in model.parameters() if can_train(one)]
    try:
        for one, _, is_cut in flags:
            one.requires_grad_(is_cut)
        yield
    finally:
        for one, before, _ in flags:
            one.requires_grad_(before)


def can_train(parameter: Tensor) -> bool:
    """Return whether rounds could exchange a parameter: a frozen one may be of a kind that they can't."""
    return parameter.is_floating_point() and parameter.itemsize > 1 and not parameter.is_meta


def could_train(model: nn.Module) -> tuple[dict[str, TensorPlace], dict[int, str]]:
    """Return the parameters that may train at some time, by name, and the name of each by its id; see `_once`."""
    there = [place for place in _parameters(model) if can_train(place.get())]
    places = {place.name: place for place in _once(iter(there))}
    by_memory = {_memory(place.get()): name for name, place in places.items()}
    return places, {id(place.get()): by_memory[_memory(place.get())] for place in there}


def _only(one: Fragment, ids: set[int], wanted: bool) -> Fragment:
    """Keep the parameters whose ids are among `ids`, or the others and all buffers."""
    parameters = tuple(place for place in one.parameters if (id(place.get()) in ids) == wanted)
    return Fragment(parameters, averages=(), counters=()) if wanted else replace(one, parameters=parameters)


def _check(model: object, count: object) -> None:
    check_type("model", model, nn.Module, "an nn.Module")
    check_whole("count", count, least=1)


def num_blocks(model: nn.Module) -> int:
    """Return how many blocks of a model train, in the sense of `strided`; at least one."""
    return max(1, len(_blocks(model)[0]))


def _blocks(model: nn.Module) -> tuple[list[str], str]:
    """Return the names of the modules that aren't frozen in the longest list of these, and the list's own name.

    Among lists of one length it is the one with the most values.
    """
    found: list[tuple[int, int, list[str], str]] = []
    for name, one in model.named_modules():
        if isinstance(one, (nn.ModuleList, nn.Sequential)):
            names = [child for child, block in one.named_children() if not _is_frozen(block)]
            found.append((len(names), sum(p.numel() for p in one.parameters()), names, name))
    *_, names, path = max(found, key=lambda each: each[:2], default=(0, 0, [], ""))
    return names, path


def _is_frozen(block: nn.Module) -> bool:
    """Return whether a block has parameters, and none of them trains."""
    flags = [parameter.requires_grad for parameter in block.parameters()]
    return bool(flags) and not any(flags)


def _by_block(model: nn.Module, count: int, choose: Callable[[int, int], int]) -> list[Fragment]:
    _check(model, count)
    names, path = _blocks(model)
    if len(names) < count:
        raise ConfigError(
            f"{count} fragments of {counted(len(names), 'block')} that train: the model's longest list of modules is "
            f"{path or 'itself'!r}. Use fewer fragments, or cut by_bytes."
        )

    prefix = f"{path}." if path else ""
    order = {child: index for index, child in enumerate(names)}

    def chosen(name: str) -> int | None:
        index = order.get(name[len(prefix) :].split(".", 1)[0]) if name.startswith(prefix) else None
        return None if index is None else choose(index, len(names))

    return _cut(model, count, chosen)


def _cut(model: nn.Module, count: int, choose: _Choose) -> list[Fragment]:
    """Put each tensor where `choose` says; the others, the largest first, into the fragment with the fewest bytes."""
    _check(model, count)
    places = [*_once(_parameters(model)), *_once(_buffers(model))]
    targets = [choose(place.name) for place in places]
    sizes = [0] * count
    for k in sorted(range(len(places)), key=lambda k: (targets[k] is None, -_bytes(places[k]))):
        target = targets[k] = sizes.index(min(sizes)) if (wished := targets[k]) is None else wished
        sizes[target] += _bytes(places[k])
    bins = [[place for place, target in zip(places, targets, strict=True) if target == n] for n in range(count)]
    fragments = [_fragment(mine) for mine in bins]
    empty = [fragment for fragment in fragments if not fragment.parameters]
    if count > 1 and empty:
        raise ConfigError(f"{count} fragments, but {len(empty)} of them would have no trainable parameters.")
    return fragments


def _fragment(places: list[TensorPlace]) -> Fragment:
    buffers = [place for place in places if not isinstance(place.get(), nn.Parameter)]
    return Fragment(
        parameters=tuple(
            place for place in places if isinstance(place.get(), nn.Parameter) and place.get().requires_grad
        ),
        averages=tuple(place for place in buffers if place.get().is_floating_point()),
        counters=tuple(place for place in buffers if not place.get().is_floating_point()),
    )


def _bytes(place: TensorPlace) -> int:
    tensor = place.get()
    return tensor.numel() * tensor.element_size() if tensor.requires_grad else 0  # of a shard, the whole one's


def _parameters(model: nn.Module) -> Iterator[TensorPlace]:
    embeddings = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    for path, module in model.named_modules():
        for key, parameter in own_parameters(module).items():
            name = f"{path}.{key}" if path else key
            if parameter is not None:
                check_exchangeable([(name, parameter)], is_sent=parameter.requires_grad)
                yield TensorPlace(name, own_parameters(module), key, id(parameter) in embeddings)


def _buffers(model: nn.Module) -> Iterator[TensorPlace]:
    for path, module in model.named_modules():
        for key, buffer in own_buffers(module).items():
            if buffer is not None and key not in passing_buffers(module):
                name = f"{path}.{key}" if path else key
                check_exchangeable([(name, buffer)])
                if buffer.is_meta:
                    raise ConfigError("is on the meta device, so it has no values. Load the model first.", name)
                yield TensorPlace(name, own_buffers(module), key)


def _once(places: Iterator[TensorPlace]) -> Iterator[TensorPlace]:
    """Leave out tensors that are the same object as an earlier one, or the same memory under another object."""
    seen: set[object] = set()
    for place in places:
        memory = _memory(place.get())
        if memory not in seen:
            seen.add(memory)
            yield place


def _memory(tensor: Tensor) -> object:
    storage = local(tensor)
    return memory_of(storage) if storage.numel() else id(tensor)


def without_masks(fragment: Fragment, known: Mapping[str, bool] | None = None) -> Fragment:
    """Leave out floating buffers that hold an infinity or a NaN: those are constants, such as attention masks.

    Args:
        known: whether to keep a buffer, by name, as decided before: statistics may have become infinite since.
    """

    def is_kept(place: TensorPlace) -> bool:
        if known is not None and place.name in known:
            return known[place.name]
        return bool(torch.isfinite(place.get()).all())

    return replace(fragment, averages=tuple(place for place in fragment.averages if is_kept(place)))
