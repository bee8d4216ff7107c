# SPDX-License-Identifier: Apache-2.0
"""What the rest of the house asks of a way to distribute training; each kind is one object, chosen once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from farflung.base.enums import DistributedType
from farflung.comm.group import Group


class Strategy(Protocol):
    """How the gradients of several processes come together."""

    @property
    def kind(self) -> DistributedType: ...

    @property
    def replicas(self) -> Group:
        """The ranks that hold the same weights as this one: those that an outer loop averages over."""

    def prepare(self, pairs: Sequence[tuple[nn.Module, Sequence[Optimizer]]]) -> list[nn.Module]:
        """Wrap each model, given with the optimizers that own its parameters; the wrappers come in the same order."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which the gradients of `model` stay on this process."""

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context whose backward passes synchronize the gradients of `model`, wherever its forward ran."""

    def local(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which nothing of `model` travels by itself: neither gradients nor buffers."""

    def synchronizes(self, model: nn.Module) -> bool:
        """Whether the gradients of `model` are averaged over ranks: it is wrapped for it and not inside `local`."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that `prepare` was given."""
