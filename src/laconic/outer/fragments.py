# SPDX-License-Identifier: Apache-2.0
"""What is exchanged together: a model cut into fragments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from laconic.base.errors import ConfigError
from laconic.comm.shards import local


@dataclass(frozen=True)
class Place:
    """Where a tensor of a model is kept, so that it is found again after someone has put another in its place."""

    name: str
    owner: Mapping[str, Any]  # a module's own dictionary
    key: str

    def get(self) -> Tensor:
        """Return the tensor that is there now."""
        tensor: Tensor = self.owner[self.key]
        return tensor


@dataclass(frozen=True)
class Fragment:
    """Tensors that are exchanged together.

    Args:
        parameters: trainable ones; a tensor with two names is here once.
        averages: floating buffers, such as the running statistics of a BatchNorm.
        counters: integer and boolean buffers.
        frozen: parameters that are not trained, and stay at home.
    """

    parameters: tuple[Place, ...]
    averages: tuple[Place, ...]
    counters: tuple[Place, ...]
    frozen: tuple[Place, ...]

    @property
    def places(self) -> tuple[Place, ...]:
        """All that is exchanged."""
        return self.parameters + self.averages + self.counters


Cut: TypeAlias = Callable[[nn.Module], Sequence[Fragment]]


def whole(model: nn.Module) -> list[Fragment]:
    """Make one fragment of all that a model learns.

    Buffers that are not part of the state dict are left out: each rank can rebuild them.

    Raises:
        ConfigError: a parameter of the model has no shape yet.
    """
    parameters = list(_once(_parameters(model)))
    buffers = list(_once(_buffers(model)))
    return [
        Fragment(
            parameters=tuple(place for place in parameters if place.get().requires_grad),
            averages=tuple(place for place in buffers if place.get().is_floating_point()),
            counters=tuple(place for place in buffers if not place.get().is_floating_point()),
            frozen=tuple(place for place in parameters if not place.get().requires_grad),
        )
    ]


def _parameters(model: nn.Module) -> Iterator[Place]:
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            name = f"{path}.{key}" if path else key
            if is_lazy(parameter):
                raise ConfigError(f"The parameter {name} has no shape yet. Run one batch through the model first.")
            if parameter is not None:
                yield Place(name, module._parameters, key)


def _buffers(model: nn.Module) -> Iterator[Place]:
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield Place(f"{path}.{key}" if path else key, module._buffers, key)


def _once(places: Iterator[Place]) -> Iterator[Place]:
    """Leave out tensors that are the same object as an earlier one, or the same memory under another object."""
    seen: set[object] = set()
    for place in places:
        tensor = place.get()
        storage = local(tensor)
        memory = (storage.data_ptr(), storage.shape, storage.stride()) if storage.numel() else id(tensor)
        if memory not in seen:
            seen.add(memory)
            yield place


def without_masks(fragment: Fragment) -> Fragment:
    """Leave out floating buffers that hold an infinity or a NaN: those are constants, such as attention masks."""
    kept = tuple(place for place in fragment.averages if bool(torch.isfinite(place.get()).all()))
    return replace(fragment, averages=kept)
