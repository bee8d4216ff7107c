# SPDX-License-Identifier: Apache-2.0
"""A running mean of the weights that an optimizer trains, kept in its state: saved, resumed and resharded with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.base.errors import Unsupported
from farflung.base.torch_internals import foreach_lerp_
from farflung.comm.shards import local, reshard
from farflung.comm.tensor_memory import lent

MEAN, STEPS = "ema", "ema_steps"  # in the optimizer's state of a parameter, and in its group


class WeightAverage:
    """A running mean of the weights of one optimizer: mean <- mean + share * (weights - mean) every few steps.

    The share is 1 / (the number of snapshots so far), until that reaches its smallest value.

    Args:
        size: the decay of an exponential mean, below 1; or over how many snapshots the mean goes.
        every: steps between two snapshots.

    Raises:
        Unsupported: weights of 16 bits, which hold no such mean.
    """

    def __init__(self, optimizer: Optimizer, size: float, every: int) -> None:
        self.optimizer = optimizer
        self._least, self._every = 1 - size if size < 1 else 1 / size, every
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        if narrow := {one.dtype for one in parameters} & {torch.bfloat16, torch.float16}:
            raise Unsupported(
                f"ema={size} over weights in {narrow.pop()}: such a mean would hardly move. Keep them in fp32, and "
                "compute in 16 bits with mixed_precision."
            )
        self.hook = optimizer.register_step_post_hook(self._stepped)

    @torch.no_grad()
    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group[STEPS] = steps = group.get(STEPS, 0) + 1
            if steps % self._every:
                continue
            moved = [one for one in group["params"] if one.grad is not None or MEAN in optimizer.state.get(one, {})]
            for parameter in moved:
                if MEAN not in optimizer.state[parameter]:
                    optimizer.state[parameter][MEAN] = parameter.detach().clone()
            if moved:
                means = [local(optimizer.state[parameter][MEAN]) for parameter in moved]
                share = max(self._least, self._every / steps)
                foreach_lerp_(means, [local(parameter) for parameter in moved], share)

    def means_of(self, parameters: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return those parameters that have a mean, each with its part of the mean."""
        kept = [(one, self.optimizer.state.get(one, {})) for one in parameters]
        return [(parameter, local(state[MEAN])) for parameter, state in kept if MEAN in state]


@contextmanager
def means_in(model: nn.Module, averages: Iterable[WeightAverage]) -> Iterator[None]:
    """Have the means in place of the weights of a model within the block, in which it may move to another device."""
    reshard(model.modules())
    pairs = [pair for average in averages for pair in average.means_of(model.parameters())]

    def tensors() -> list[Tensor]:
        reshard(model.modules())
        return [local(parameter) for parameter, _ in pairs]

    def lend(own: list[tuple[Tensor, Tensor]]) -> None:
        for (tensor, _), (_, mean) in zip(own, pairs, strict=True):
            tensor.copy_(mean)

    with lent(model, tensors, lend):
        yield
