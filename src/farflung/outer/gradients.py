# SPDX-License-Identifier: Apache-2.0
"""Gradients under an outer loop: DDP keeps them on their rank or island, and in a warm-up all ranks average them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from farflung.base.errors import CollectiveMismatch, ConfigError, StateError, Unsupported
from farflung.base.torch_internals import COMPILED_FROM, free_static_graph, is_joining, keep_static_graph
from farflung.base.words import counted, numbered
from farflung.comm.ddp_hook import average_hook
from farflung.comm.group import Group, SoloGroup
from farflung.comm.recording import unrecorded
from farflung.comm.shards import align_gradients
from farflung.comm.torch_group import TorchGroup
from farflung.methods.agreement import average
from farflung.methods.weighting import in_proportion
from farflung.outer.quorum import Quorum
from farflung.outer.stats import Meter
from farflung.outer.timetable import Timetable

_LATEST: weakref.WeakKeyDictionary[DistributedDataParallel, list[LocalDDP]] = weakref.WeakKeyDictionary()


class LocalDDP:
    """Keeps a DDP model from sending, in place of the one that did so before.

    Args:
        averages: returns, before each exchange, whether to average the gradients of all ranks, as in a warm-up.
        island: the ranks over which DDP was made, if several; it sends its buffers among them, and otherwise averages
            gradients over them.

    Raises:
        ConfigError: DDP was made over other ranks: neither all of them nor the island.
        Unsupported: DDP has a communication hook of somebody else, or `--outer` follows it.
    """

    def __init__(self, ddp: DistributedDataParallel, averages: Callable[[], bool], island: Group | None = None) -> None:
        check_ranks(ddp, island or SoloGroup())
        self._island = island.pg if isinstance(island, TorchGroup) else None
        self.module: nn.Module = ddp.module
        self._averages = averages
        self._ddp = weakref.ref(ddp)  # which holds the hook, and so this object
        latest = _LATEST.get(ddp, [])
        if not latest or "register_comm_hook" in vars(ddp):  # torch takes one for good; --outer refuses any other
            try:
                ddp.register_comm_hook(None, average_hook(lambda: latest[0]._ranks()))
            except RuntimeError as error:
                raise Unsupported(
                    "This DDP has a communication hook already, which compresses gradients. An outer loop sends none "
                    "of them: remove the hook, and set codec= of the recipe to compress what is sent."
                ) from error
        for one in latest:
            one.end()
        latest[:] = [self]
        _LATEST[ddp] = latest
        self._sends_buffers = ddp.broadcast_buffers
        self._keeps_graph = self._stops = False
        self._hooks: list[RemovableHandle] = []
        self._ranks()
        if self._island is None:  # a script may set the flag by itself before each pass
            this = weakref.ref(self)

            def before_forward(*_: object) -> None:  # a function, which copies of the model share
                if not torch.compiler.is_compiling() and (one := this()) is not None and one._ranks() is not None:
                    one._resume()

            self._hooks.append(ddp.register_forward_pre_hook(before_forward))

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The DDP model, as long as it is there."""
        return self._ddp()

    def _ranks(self) -> dist.ProcessGroup | None:
        ddp, averages = self._ddp(), self._averages()
        assert ddp is not None
        if self._island is not None:
            return dist.group.WORLD if averages else self._island
        ddp.broadcast_buffers = self._sends_buffers and averages
        if not averages:
            # DDP would meet the other ranks in the second pass to order its buckets, and with unused parameters in each
            # pass; a rank that skips a step, or has no second batch, is elsewhere then.
            ddp.require_backward_grad_sync, self._stops = False, True
            self._keeps_graph |= keep_static_graph(ddp)
            if is_joining(ddp):
                raise ConfigError(
                    "DistributedDataParallel.join() asks all ranks in each pass. Leave it out: in an outer loop ranks "
                    "without data stay in the rounds until all have come to flush() or close()."
                )
        return ddp.process_group if averages else None

    def _resume(self) -> None:
        """Have DDP send again; once more, if the end of a `no_sync()` block has put back what was before it."""
        if self._stops and (ddp := self._ddp()) is not None:
            self._stops = not ddp.require_backward_grad_sync
            ddp.require_backward_grad_sync = True

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        ddp = self._ddp()
        if ddp is not None:
            ddp.broadcast_buffers = self._sends_buffers
            ddp.require_backward_grad_sync = True
            if self._keeps_graph:
                free_static_graph(ddp)


def kept_local(model: nn.Module, island: Group, averages: Callable[[], bool]) -> LocalDDP | None:
    """Keep a DDP model's gradients and buffers on this rank; None if it isn't one, or averages over the island."""
    ddp = getattr(model, COMPILED_FROM, model)
    if not isinstance(ddp, DistributedDataParallel):
        return None
    if island.size == 1:
        return LocalDDP(ddp, averages)
    check_ranks(ddp, island)
    return None


def check_ranks(ddp: DistributedDataParallel, island: Group) -> None:
    """Raise ConfigError for a DDP model that averages gradients over other ranks than those of the island.

    If each island is one rank, all ranks are right too, as they can be kept from it.
    """
    ranks = dist.get_process_group_ranks(ddp.process_group)
    if isinstance(island, TorchGroup):
        if ranks != island.ranks:
            raise ConfigError(
                f"This DDP averages over {numbered('rank', ranks)}, but the island of this replica is "
                f"{numbered('rank', island.ranks)}. Use DistributedDataParallel(model, process_group=island.pg). Under "
                "--outer, leave process_group out."
            )
    elif len(ranks) != dist.get_world_size():
        raise ConfigError(
            f"This DDP averages over {len(ranks)} of {dist.get_world_size()} ranks, the island of one replica. "
            "Pass both groups: OuterLoop(ddp.module, recipe, group=TorchGroup(replicas), island=TorchGroup(island))."
        )


@dataclass(eq=False)
class GradientWarmup:
    """The first steps of a recipe, which all replicas make with the same gradients.

    Args:
        is_done_by_ddp: torch's DDP averages gradients, in the backward pass.

    Attributes:
        optimizers: the attached optimizers. Each may have its own backward pass, as in a GAN.
        are_alike: the weights of all replicas; not if one had no more data.
        averaged: the position up to which gradients have been averaged.
        is_over: no rank stays without data any more.
    """

    model: nn.Module
    timetable: Timetable
    quorum: Quorum
    meter: Meter
    is_done_by_ddp: bool
    optimizers: Sequence[Optimizer] = ()
    are_alike: bool = True
    averaged: int = 0
    is_over: bool = False
    _has_all: int = -1  # the position at which those of all optimizers were averaged together

    @property
    def is_timed(self) -> bool:
        """Whether the exchange of gradients counts as waiting; DDP and an Accelerator have theirs in the step."""
        return self.averaged > 0 and not self.is_done_by_ddp

    def makes_alike(self) -> bool:
        """Whether all replicas make the next step, with the same gradients."""
        return self.timetable.is_warming and self.are_alike

    def average(self, optimizer: Optimizer | None = None) -> None:
        """Average the gradients of the next step: those of an attached optimizer, unless those of all have been."""
        position = self.timetable.position
        if not self.timetable.is_warming or (optimizer is not None and self._has_all == position):
            return
        self.averaged = position + 1
        self._has_all = position if optimizer is None else -1
        number = -1 if optimizer is None else [id(one) for one in self.optimizers].index(id(optimizer))
        if not self.is_done_by_ddp:  # the others may be past these steps, if this rank comes back to them
            self.quorum.together(lambda: self.timetable.is_warming and self._meet(number))

    def stay(self) -> None:
        """Stay until all ranks have done the steps that are left, or have no more data: a collective, if any has not.

        Ranks that have data average as often in a step as there are optimizers. At the end of the warm-up they come
        here too, if another rank stays.
        """
        if not self.is_over and (self.timetable.is_warming or not self.are_alike):
            while self.quorum.together(self._meet):
                pass
        self.is_over = not self.timetable.is_warming

    def end_if_due(self) -> None:
        """Release ranks that have stayed: called after each step."""
        if not (self.timetable.is_warming or self.is_over):
            self.stay()

    def _meet(self, number: int | None = None) -> bool:
        """Average the gradients of all ranks that still have data.

        Args:
            number: of the optimizer; -1 for the gradients of the whole model, None if this rank has no data.

        Returns:
            whether any rank has data.

        Raises:
            CollectiveMismatch: the ranks train different numbers of values.
        """
        group = self.quorum.group
        numel = sum(parameter.numel() for parameter in self._trained_by(-1))
        lacks = number is not None and any(parameter.grad is None for parameter in self._trained_by(number))
        with self.meter.timed("exposed"), unrecorded():
            said = [number is not None, -1 if number is None else number, numel, lacks]
            mine = torch.tensor(said, dtype=torch.float64)
            flags, numbers, numels, lacking = group.all_gather_small(mine).T.tolist()
            self.meter.add("bytes_voting", (group.size - 1) * mine.nbytes)
            decision = in_proportion(flags)
            if not decision.total:
                return False
            stepping = {int(one) for one, has_data in zip(numbers, flags, strict=True) if has_data}
            if len(stepping) > 1 or len(set(numels)) > 1:
                raise CollectiveMismatch(
                    f"In a warm-up ranks make the same steps, but these have {[int(one) for one in numels]} trainable "
                    f"values, and step optimizers {sorted(stepping)}. Change the model and step its optimizers in the "
                    "same way on all ranks."
                )
            self.are_alike = self.are_alike and all(flags)
            trained = self._trained_by(stepping.pop())
            if any(lacking):  # what no rank has used stays without a gradient
                has = torch.tensor(
                    [number is not None and one.grad is not None for one in trained], dtype=torch.float64
                )
                used = group.all_gather_small(has).any(0).tolist()
                trained = [parameter for parameter, is_used in zip(trained, used, strict=True) if is_used]
            if number is None:
                gradients = [torch.zeros_like(parameter) for parameter in trained]
            else:
                for parameter in trained:
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                align_gradients(trained)
                gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
            self.meter.add_exchanged(average(gradients, group, decision))
        return True

    def _trained_by(self, number: int) -> list[nn.Parameter]:
        """Return the trainable parameters of an attached optimizer; of the whole model for -1."""
        trained = [one for one in self.model.parameters() if one.requires_grad]
        if number < 0:
            return trained
        ids = {id(one) for group in self.optimizers[number].param_groups for one in group["params"]}
        return [one for one in trained if id(one) in ids]

    def check_averaged(self) -> None:
        """Raise StateError unless the gradients of the next step have been averaged."""
        position, steps = self.timetable.position, self.timetable.recipe.warmup
        if self.averaged <= position < steps and self.quorum.group.size > 1:
            raise StateError(
                f"This recipe averages gradients in the first {counted(steps, 'step')}, and this is step "
                f"{position + 1}. Call outer.average_gradients() before optimizer.step(), or attach it; with a "
                "GradScaler call it before scaler.step(optimizer)."
            )

    def before_step(self, optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Average the gradients of an attached optimizer, which is about to step.

        Raises:
            Unsupported: the step has a closure, which computes gradients after they were averaged.
        """
        if self.timetable.is_warming and options.get("closure", *arguments[1:2]) is not None:
            steps = counted(self.timetable.recipe.warmup, "step")
            raise Unsupported(
                f"In the warm-up of this recipe ({steps}) an attached optimizer can't take a closure: it computes "
                "gradients after they were averaged. Use a recipe without a warm-up."
            )
        self.average(optimizer)
