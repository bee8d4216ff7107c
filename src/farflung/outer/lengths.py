# SPDX-License-Identifier: Apache-2.0
"""How long each tensor of a round is: on each replica, and in their mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from farflung.comm.bucket import Buckets
from farflung.comm.group import Group
from farflung.outer.island import Island
from farflung.outer.weighting import Decision


class Lengths:
    """The squared norms of each tensor in one round, by which `RadialMean` lengthens the mean.

    A tensor that is cut into several buckets, or into the shards of an island, has one norm. It is of what the other
    replicas decode: a lossy codec shortens each replica's values and their mean alike, and that must cancel out.

    Args:
        buckets: of the parameters.
        embeddings: which of them keep the plain mean.
    """

    def __init__(self, buckets: Buckets, embeddings: Sequence[bool]) -> None:
        self._buckets, self._embeddings = buckets, embeddings
        device = buckets.flat(0).device if len(buckets) else None
        self._squares = torch.zeros(2, len(embeddings), dtype=torch.float64, device=device)  # sent, and of the mean
        self._factors = [1.0] * len(embeddings)
        self.num_bytes = self._squares.nbytes  # that `agree` sends to each rank

    def note_sent(self, k: int, sent: Tensor) -> None:
        """Measure what the others decode of this rank's bucket `k`, `[sizes[k]]`."""
        self._squares[0, self._buckets.owners(k)] += self._dots(k, sent)

    def note_mean(self, k: int, total: Tensor, divisor: float) -> None:
        """Measure bucket `k` of the mean, `total / divisor`."""
        self._squares[1, self._buckets.owners(k)] += self._dots(k, total) / divisor**2

    def agree(self, group: Group, island: Island, decision: Decision) -> float:
        """Find the factor of each tensor, the same bits on all ranks: a collective. Returns the mean's squared norm."""
        count = len(self._embeddings)
        mine = island.squares(self._squares.flatten().tolist())
        rows = group.all_gather_small(torch.tensor(mine, dtype=torch.float64)).tolist()
        means = rows[0][count:]  # one rank's, as machines may differ in the last bits of a sum
        for number, square in enumerate(means):
            if not self._embeddings[number] and square > 0:
                sent = zip(decision.factors, rows, strict=True)
                length = sum(factor * math.sqrt(row[number]) for factor, row in sent if factor) / decision.total
                ratio = length / math.sqrt(square)
                self._factors[number] = ratio if math.isfinite(ratio) else 1.0
        return math.fsum(means)

    def lengthen(self, k: int, total: Tensor) -> None:
        """Multiply each tensor's part of bucket `k` by its factor."""
        for number, part in zip(self._buckets.owners(k), self._buckets.cut(k, total), strict=True):
            if self._factors[number] != 1:
                part.mul_(self._factors[number])

    def _dots(self, k: int, flat: Tensor) -> Tensor:
        parts = [part.view(-1) for part in self._buckets.cut(k, flat)]
        return torch.stack([torch.dot(part, part) for part in parts]).double()
