# SPDX-License-Identifier: Apache-2.0
"""One process: nothing to wrap and nothing to synchronize."""

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


class Single:
    """One process alone."""

    kind = DistributedType.NO
    places = False
    ddp_handler: DistributedDataParallelKwargs | None = None

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def prepare(self, pairs: Sequence[tuple[nn.Module, Sequence[Optimizer]]]) -> list[nn.Module]:
        return [model for model, _ in pairs]

    def adopt(self, optimizer: Optimizer) -> None:
        return None

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def local(self, model: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()

    def averaged_over(self, model: nn.Module) -> Group | None:
        return None

    def awaited(self, model: nn.Module) -> Group | None:
        return None

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model
