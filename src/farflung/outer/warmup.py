# SPDX-License-Identifier: Apache-2.0
"""The first steps of a recipe with a warm-up: gradients are averaged, as data-parallel training does."""

from __future__ import annotations

import torch
from torch import nn

from farflung.base.errors import CollectiveMismatch, StateError, Unsupported
from farflung.base.words import counted
from farflung.comm.group import Group
from farflung.outer.agreement import average
from farflung.outer.rounds import Rounds
from farflung.outer.stats import Meter
from farflung.outer.weighting import in_proportion

_HALF = 2**24  # whole numbers below this are exact in fp32


class GradientWarmup:
    """The first steps of a recipe, which all replicas make with the same gradients.

    Args:
        steps: how many there are.
        is_done_by_ddp: torch's DDP averages gradients, in the backward pass.

    Attributes:
        are_alike: the weights of all replicas; not if one had no more data.
    """

    def __init__(self, steps: int, model: nn.Module, rounds: Rounds, meter: Meter, is_done_by_ddp: bool) -> None:
        self.steps, self.are_alike = steps, True
        self._model, self._rounds, self._meter = model, rounds, meter
        self._is_done_by_ddp = is_done_by_ddp
        self._averaged = 0  # the position up to which gradients have been averaged

    def is_on(self, position: int) -> bool:
        return position < self.steps

    def makes_alike(self, position: int) -> bool:
        """Whether all replicas make the next step, with the same gradients."""
        return self.is_on(position) and self.are_alike

    def average(self, position: int) -> None:
        if self.is_on(position) and self._averaged <= position:
            self._averaged = position + 1
            if not self._is_done_by_ddp:
                self._rounds.retry_after_losses(lambda: self._meet(finished=False))

    def stay(self, position: int) -> None:
        """Stay without data until all ranks have done the steps that are left, or have no more data either."""
        for _ in range(position, self.steps):
            if not self._meet(finished=True):
                break

    def _meet(self, finished: bool) -> bool:
        goes_on, by_all = average_gradients(self._model, self._rounds.group, self._meter, finished)
        self.are_alike = self.are_alike and (by_all or not goes_on)
        return goes_on

    def check_averaged(self, position: int) -> None:
        """Raise StateError unless the gradients of the next step have been averaged."""
        if self.is_on(position) and self._averaged <= position and self._rounds.group.size > 1:
            raise StateError(
                f"This recipe averages gradients in the first {counted(self.steps, 'step')}, and this is step "
                f"{position + 1}. Call outer.average_gradients() before optimizer.step(), or attach it; with a "
                "GradScaler call it before scaler.step(optimizer)."
            )

    def check_closure(self, position: int, closure: object) -> None:
        """Raise Unsupported for an optimizer's step with a closure: it computes gradients after they were averaged."""
        if self.is_on(position) and closure is not None:
            raise Unsupported(
                f"In the warm-up of this recipe ({counted(self.steps, 'step')}) an attached optimizer can't "
                "take a closure: it computes gradients after they were averaged. Use a recipe without a warm-up."
            )


def average_gradients(model: nn.Module, group: Group, meter: Meter, finished: bool) -> tuple[bool, bool]:
    """Average in place the gradients of all ranks that still have data.

    Args:
        finished: this rank has no more data, and brings nothing.

    Returns:
        whether any rank has data, and whether all have.

    Raises:
        CollectiveMismatch: the ranks train different numbers of values.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numel = sum(parameter.numel() for parameter in trained)
    ballot = torch.tensor([float(not finished), *map(float, divmod(numel, _HALF))], dtype=torch.float32)
    with meter.timed("exposed"), torch.no_grad():
        flags, *sizes = group.all_gather_small(ballot).T.tolist()
        meter.add("bytes_voting", (group.size - 1) * ballot.nbytes)
        numels = [int(high) * _HALF + int(low) for high, low in zip(*sizes, strict=True)]
        if len(set(numels)) > 1:
            raise CollectiveMismatch(
                f"The ranks have different numbers of trainable values: {numels}. Change the model in the same way "
                "on all ranks."
            )
        decision = in_proportion(flags)
        if not decision.total:
            return False, False
        if not finished:
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = [p.grad for p in trained if p.grad is not None and not finished]
        sent = average(gradients or [torch.zeros_like(p) for p in trained], group, decision)
    meter.add("bytes_sent", sent)
    meter.add("bytes_received", sent)
    return True, all(flags)
