# SPDX-License-Identifier: Apache-2.0
"""What the rest of the house asks of a way to distribute training; each is one object."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer

from farflung.base.enums import DistributedType
from farflung.comm.group import Group
from farflung.config.handlers import DistributedDataParallelKwargs
from farflung.process.mesh import Mesh


class Strategy:
    """How the gradients of several processes come together. What it does by default is what one process alone needs.

    Attributes:
        mesh: the ranks; an outer loop averages over its columns.
        places: whether `prepare` moves models to their device itself, piece by piece.
        ddp_handler: arguments for torch's DDP.
    """

    kind = DistributedType.NO
    places = False
    ddp_handler: DistributedDataParallelKwargs | None = None

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def prepare(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> nn.Module:
        """Wrap `model`, given with the optimizers that own its parameters."""
        return model

    def unaveraged(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of a model, as it comes to be prepared, whose gradients would stay on each rank."""
        return []

    def adopt(self, optimizer: Optimizer) -> None:
        """Make an optimizer that was made before its models were prepared train what they have become."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which the gradients of `model` stay on this process."""
        return nullcontext()

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context whose backward passes synchronize the gradients of `model`, wherever its forward ran."""
        return nullcontext()

    def local(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which nothing of `model` leaves its island by itself: neither gradients nor buffers."""
        return nullcontext()

    def averaged_over(self, model: nn.Module) -> Group | None:
        """Return the ranks over which the gradients of `model` are averaged: all, or the island inside `local`.

        None: they are not, as this rank is alone there, or `model` is not wrapped for it.
        """
        return None

    def awaited(self, model: nn.Module) -> Group | None:
        """Return the ranks that a forward pass of `model`, or the backward pass after it, waits for now; None: none."""
        return None

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that `prepare` was given."""
        return model
