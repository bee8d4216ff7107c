# SPDX-License-Identifier: Apache-2.0
"""What DDP does with the gradients of all replicas: their mean, exact, rounded, of low rank, or of many steps.

And DiLoCo with such a mean of low rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from farflung.outer import diloco


def ring(replicas: int) -> float:
    """Return how often a replica sends each byte of an all-reduce."""
    return 2 * (replicas - 1) / replicas


class Mean:
    """Average `[replicas, parameters]` over replicas, of each step or of `accumulate` steps at a time."""

    def __init__(self, lane: Any, shapes: Sequence[torch.Size], accumulate: int = 1, dtype: str = "float32") -> None:
        self._lane, self._every, self._dtype = lane, accumulate, getattr(torch, dtype)
        self._sum, self._steps = torch.zeros(()), 0

    def __call__(self, gradients: Tensor) -> Tensor | None:
        self._sum, self._steps = self._sum + gradients, self._steps + 1
        if self._steps % self._every:
            return None
        total, self._sum = self._sum / self._every, torch.zeros(())
        sent = (total.to(self._dtype) / len(total)).sum(0, keepdim=True)
        self._lane.bytes_sent += ring(len(total)) * sent.nbytes
        return sent.float()


class PowerSGD:
    """Average matrices by their projections on `rank` directions, and send what that leaves out later.

    torch's own hook works on the buckets of a DDP and can't be called here. Like it, this one starts each iteration
    from the last one's result and leaves vectors whole, and matrices that would not get half as large.

    Source: PowerSGD (arXiv:1905.13727).
    """

    def __init__(self, lane: Any, shapes: Sequence[torch.Size], rank: int = 2) -> None:
        self._lane, self._shapes, self._rank = lane, shapes, rank
        generator = torch.Generator().manual_seed(0)
        self._right: dict[int, Tensor] = {}
        self._kept: dict[int, Tensor | float] = {}
        for number, shape in enumerate(shapes):
            if len(shape) == 2 and 2 * rank * sum(shape) < shape.numel():
                self._right[number] = torch.randn(shape[1], rank, generator=generator)
                self._kept[number] = 0.0

    def __call__(self, gradients: Tensor) -> Tensor:
        parts = gradients.split([shape.numel() for shape in self._shapes], dim=1)
        means = [self._mean(number, part) for number, part in enumerate(parts)]
        return torch.cat([mean.reshape(1, -1) for mean in means], dim=1)

    def _mean(self, number: int, part: Tensor) -> Tensor:
        replicas, shape = len(part), self._shapes[number]
        if number not in self._right:
            self._lane.bytes_sent += ring(replicas) * 4 * shape.numel()
            return part.mean(0)
        matrices = part.view(replicas, *shape) + self._kept[number]
        left = torch.linalg.qr((matrices @ self._right[number]).mean(0)).Q
        self._right[number] = (matrices.mT @ left).mean(0)
        approximation = left @ self._right[number].T
        self._kept[number] = matrices - approximation
        self._lane.bytes_sent += ring(replicas) * 4 * self._rank * sum(shape)
        return approximation


class LowRankDiLoCo:
    """DiLoCo's rounds, with a mean of low rank of the pseudo-gradients; a codec of the package sees no matrices."""

    def __init__(self, lane: Any, shapes: Sequence[torch.Size], every: int, rank: int, **settings: Any) -> None:
        self._lane, self._every, self._mean = lane, every, PowerSGD(lane, shapes, rank)
        self._anchor = nn.Parameter(lane.weights[0].clone())
        self._optimizer = diloco(every, **settings).optimizer([self._anchor])

    def after_step(self) -> None:
        """Do the round that is due; the last one is when the run ends."""
        done = self._lane.step - self._lane.run.split
        if done <= 0:
            self._anchor.copy_(self._lane.weights[0])
        elif done % self._every == 0 or self._lane.step == self._lane.run.steps:
            self._anchor.grad = self._mean(self._anchor - self._lane.weights)[0]
            self._optimizer.step()
            self._lane.weights.copy_(self._anchor)
            self._lane.rounds += 1


HOOKS: Mapping[str, Callable[..., Any]] = {"mean": Mean, "powersgd": PowerSGD}
