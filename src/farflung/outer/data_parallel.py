# SPDX-License-Identifier: Apache-2.0
"""An outer loop over a model in torch's DDP: while it is open, gradients and buffers stay on their rank or island."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from farflung.base.errors import ConfigError, Unsupported
from farflung.base.torch_internals import COMPILED_FROM
from farflung.base.words import numbered
from farflung.comm.ddp_hook import average_hook
from farflung.comm.group import Group, SoloGroup
from farflung.comm.torch_group import TorchGroup


class LocalDDP:
    """Keeps a DDP model from sending.

    Args:
        averages: says before each exchange whether the gradients of all ranks are to be averaged, as in a warm-up.
        island: the ranks over which DDP was made, of several; it sends its buffers among them, and averages gradients
            over them otherwise.

    Raises:
        ConfigError: DDP was made over other ranks: neither all of them nor the island.
        Unsupported: DDP has a communication hook already.
    """

    def __init__(self, ddp: DistributedDataParallel, averages: Callable[[], bool], island: Group | None = None) -> None:
        check_ranks(ddp, island or SoloGroup())
        self._island = island.pg if isinstance(island, TorchGroup) else None
        self.module: nn.Module = ddp.module
        self._averages = averages
        self._ddp = weakref.ref(ddp)  # which holds the hook, and so this object
        self._sends_buffers = ddp.broadcast_buffers
        try:
            ddp.register_comm_hook(None, average_hook(self._ranks))
        except RuntimeError as error:
            raise Unsupported(
                "This DDP has a communication hook already, which compresses gradients. An outer loop sends none of "
                "them: remove the hook, and let the recipe's codec= compress what is sent."
            ) from error
        self._ranks()
        self._hooks: list[RemovableHandle] = []
        if ddp.find_unused_parameters and self._island is None:  # a script may set the flag by itself before each pass
            this = weakref.ref(self)

            def before_forward(*_: object) -> None:  # a function, which copies of the model share
                if (one := this()) is not None:
                    one._ranks()

            self._hooks.append(ddp.register_forward_pre_hook(before_forward))

    def _ranks(self) -> dist.ProcessGroup | None:
        ddp, averages = self._ddp(), self._averages()
        assert ddp is not None
        if self._island is not None:
            return dist.group.WORLD if averages else self._island
        ddp.broadcast_buffers = self._sends_buffers and averages
        if ddp.find_unused_parameters and not averages:
            ddp.require_backward_grad_sync = False  # it would tell the other ranks which parameters each pass used
        return ddp.process_group if averages else None

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        ddp = self._ddp()
        if ddp is not None:
            ddp.broadcast_buffers = self._sends_buffers
            ddp.require_backward_grad_sync = True


def kept_local(model: nn.Module, island: Group, averages: Callable[[], bool]) -> LocalDDP | None:
    """Keep a DDP model's gradients and buffers on this rank; None where it isn't one, or averages over the island."""
    ddp = getattr(model, COMPILED_FROM, model)
    if not isinstance(ddp, DistributedDataParallel):
        return None
    if island.size == 1:
        return LocalDDP(ddp, averages)
    check_ranks(ddp, island)
    return None


def check_ranks(ddp: DistributedDataParallel, island: Group) -> None:
    """Refuse a DDP model that averages gradients over other ranks than those of the island.

    Raises:
        ConfigError: it does; where each island is one rank, all ranks are right too, as they can be kept from it.
    """
    ranks = dist.get_process_group_ranks(ddp.process_group)
    if isinstance(island, TorchGroup):
        if ranks != island.ranks:
            raise ConfigError(
                f"This DDP averages over {numbered('rank', ranks)}, but those that train a replica together (island) "
                f"are {numbered('rank', island.ranks)}. Make it over them: DistributedDataParallel(model, "
                "process_group=island.pg). Under --outer, leave process_group out."
            )
    elif len(ranks) != dist.get_world_size():
        raise ConfigError(
            f"This DDP averages over {len(ranks)} of {dist.get_world_size()} ranks, which train a replica together. "
            "Say so: OuterLoop(ddp.module, recipe, group=TorchGroup(replicas), island=TorchGroup(those ranks))."
        )
