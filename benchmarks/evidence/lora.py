# SPDX-License-Identifier: Apache-2.0
"""LoRA on the rows of a run, and exchanges of its factors that keep the mean of the products B A.

The mean of A times that of B, as averaging each apart has it, is another matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evidence.data_parallel import ring
from farflung.demo.gpt import GPT

SCALE = 2.0  # alpha / rank


@dataclass(frozen=True)
class Pair:
    """Where the factors of a layer lie in a row of adapters, and its weight `[out, in]` in one of the model."""

    name: str
    weight: slice
    a: slice
    b: slice
    shape: tuple[int, int]
    rank: int

    def factors(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return A `[..., rank, in]` and B `[..., out, rank]` of rows `[..., parameters]`, as views."""
        outer, inner = self.shape
        a = rows[..., self.a].unflatten(-1, (self.rank, inner))
        return a, rows[..., self.b].unflatten(-1, (outer, self.rank))

    def put(self, rows: Tensor, a: Tensor, b: Tensor) -> None:
        """Give all rows these factors."""
        rows[:, self.a], rows[:, self.b] = a.flatten(), b.flatten()


class Adapters(nn.Module):
    """Factors of each linear layer in the blocks, which computes W + SCALE B A; B begins at 0, A as peft's."""

    def __init__(self, model: GPT, rank: int) -> None:
        super().__init__()
        self.shape, self.pairs = model.shape, []
        begin, at = 0, 0
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and name.startswith("blocks."):
                outer, inner = weight.shape
                a = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(rank, inner), a=math.sqrt(5)))
                b = nn.Parameter(torch.zeros(outer, rank))
                for factor, values in (("A", a), ("B", b)):
                    self.register_parameter(f"{name.replace('.', '_')}_{factor}", values)
                columns = slice(at, at + a.numel()), slice(at + a.numel(), at + a.numel() + b.numel())
                self.pairs.append(Pair(name, slice(begin, begin + weight.numel()), *columns, (outer, inner), rank))
                at += a.numel() + b.numel()
            begin += weight.numel()


class _Rounds:
    """Rounds of a lane of adapters, every so many steps and at the end of the run."""

    def __init__(self, lane: Any, shapes: Sequence[torch.Size], every: int) -> None:
        self._lane, self._every = lane, every

    def after_step(self) -> None:
        if self._lane.step % self._every == 0 or self._lane.step == self._lane.run.steps:
            self._round()
            self._lane.rounds += 1

    def _round(self) -> None:
        """Send all factors to all, and give each pair its new ones."""
        rows = self._lane.weights
        self._lane.bytes_sent += (len(rows) - 1) * rows[0].nbytes
        for pair in self._lane.model.pairs:
            self._join(pair, *pair.factors(rows))

    def _join(self, pair: Pair, a: Tensor, b: Tensor) -> None:
        raise NotImplementedError


class Residual(_Rounds):
    """Average A and B apart, and add what their product lacks to the frozen weight.

    Source: FedEx-LoRA (arXiv:2410.09432).
    """

    def _join(self, pair: Pair, a: Tensor, b: Tensor) -> None:
        lacking = (b @ a).mean(0) - b.mean(0) @ a.mean(0)
        self._lane.frozen[:, pair.weight] += SCALE * lacking.flatten()
        pair.put(self._lane.weights, a.mean(0), b.mean(0))


class BestRank(_Rounds):
    """Take the factors whose product is nearest to the mean of the products, of the same rank."""

    def _join(self, pair: Pair, a: Tensor, b: Tensor) -> None:
        pair.put(self._lane.weights, *best_factors(a, b))


def best_factors(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return A `[rank, in]` and B `[out, rank]`, whose product is the best of this rank to the mean of B A.

    The rows of A are orthogonal and as long as those of the mean on average, and turned to be nearest to these, so that
    AdamW's moments still mean something: with the mean's own projection B grew without bounds.

    Args:
        a: `[replicas, rank, in]`.
        b: `[replicas, out, rank]`.
    """
    (replicas, rank, _), mean = a.shape, a.mean(0)
    left, lower = torch.linalg.qr(torch.cat(list(b), dim=1))  # of [out, replicas * rank]
    right, upper = torch.linalg.qr(torch.cat(list(a)).T)
    u, lengths, v = torch.linalg.svd(lower @ upper.T / replicas)
    out, directions = left @ u[:, :rank] * lengths[:rank], v[:rank] @ right.T
    one, _, other = torch.linalg.svd(mean @ directions.T)
    turn, length = one @ other, mean.norm() / math.sqrt(rank)
    return length * turn @ directions, out @ turn.T / length


class Alternating(_Rounds):
    """Train B alone in one round and A alone in the next: where the other is equal, the mean of the products is kept.

    AdamW's moments of both go on, and gradients are clipped by the norm of both.

    Source: RoLoRA (arXiv:2502.01755).
    """

    def __init__(self, lane: Any, shapes: Sequence[torch.Size], every: int) -> None:
        super().__init__(lane, shapes, every)
        self._fixed = lane.weights[0].clone()
        self._columns = [
            torch.cat([torch.arange(one.start, one.stop) for one in ranges])
            for ranges in ([pair.b for pair in lane.model.pairs], [pair.a for pair in lane.model.pairs])
        ]

    def after_step(self) -> None:
        idle = self._columns[(self._lane.rounds + 1) % 2]
        self._lane.weights[:, idle] = self._fixed[idle]
        super().after_step()

    def _round(self) -> None:
        rows, trained = self._lane.weights, self._columns[self._lane.rounds % 2]
        rows[:, trained] = rows[:, trained].mean(0)
        self._lane.bytes_sent += ring(len(rows)) * 4 * len(trained)
        self._fixed = rows[0].clone()


EXACT: Mapping[str, Callable[..., _Rounds]] = {
    "residual": Residual,
    "best_rank": BestRank,
    "alternating": Alternating,
}
