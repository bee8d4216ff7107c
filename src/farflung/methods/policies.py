# SPDX-License-Identifier: Apache-2.0
"""Policies that look at the replicas' norms: who counts less in a round, and who is left out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from farflung.base.checks import check_number, check_whole
from farflung.methods.aggregate import TrimmedMax, TrimmedMean
from farflung.methods.weighting import Decision, Norm, NormHistory, Policy, in_proportion, not_finite


@dataclass(frozen=True)
class ClippedToMedian(Policy):
    """Like `ByWork`, but what a replica sends is scaled down to the median norm of all replicas at work.

    Source: SparseLoCo's robust aggregation (arXiv:2508.15706).
    """

    norm: ClassVar[Norm] = "sent"
    max_norm: ClassVar[float] = math.inf

    def __call__(self, weights: Sequence[float], norms: Sequence[float], history: NormHistory) -> Decision:
        """Scale the factors, not the sum of weights: a clipped replica moves the mean less."""
        unfit = not_finite(norms)
        decision = in_proportion(weights, unfit)
        at_work = [norm for norm, weight in zip(norms, weights, strict=True) if weight]
        if unfit or not at_work:
            return decision
        middle = statistics.median(at_work)
        clipped = [
            factor * middle / norm if norm > middle else factor
            for factor, norm in zip(decision.factors, norms, strict=True)
        ]
        return replace(decision, factors=tuple(clipped))


@dataclass(frozen=True)
class WithoutOutliers(Policy):
    """Leaves out replicas that moved unusually far or to no finite values; the others count by softmax(-norm / T).

    A replica's own history defines what is unusual: mean and deviation of its norms, which forget at the rate
    `1 - decay` and take in sound norms only, as an outlier among them would hide the next ones. If no replica is sound,
    all drop the round and keep their local steps.

    Args:
        threshold: deviations above the mean from which a norm is an outlier.
        temperature: T; an infinite one gives sound replicas equal weights.
        max_norm: the largest norm of the aggregate.
        decay: of the statistics.
        patience: rounds of a replica before any of its finite norms can be an outlier; after as many outliers in a row
            its history starts again, because they have become usual.

    Raises:
        ConfigError: a number is out of its range.

    Source: EDiT's pseudo gradient penalty (arXiv:2412.07210).
    """

    threshold: float = 3.0
    temperature: float = 1.0
    max_norm: float = 10.0
    decay: float = 0.98
    patience: int = 10
    norm: ClassVar[Norm] = "local"
    weighs_work: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, above=0, finite=False)
        check_number("temperature", self.temperature, above=0, finite=False)
        check_number("max_norm", self.max_norm, above=0, finite=False)
        check_number("decay", self.decay, above=0, below=1)
        check_whole("patience", self.patience, least=1)

    def __call__(self, weights: Sequence[float], norms: Sequence[float], history: NormHistory) -> Decision:
        present = [rank for rank, weight in enumerate(weights) if weight and math.isfinite(norms[rank])]
        sound = [rank for rank in present if not self._is_outlier(norms[rank], history.get(rank))]
        for rank in set(present).difference(sound):
            history[rank][3] += 1
            if history[rank][3] >= self.patience:  # it is no outlier any more but how this replica moves now
                del history[rank]
        if not sound:
            return Decision((0.0,) * len(norms), 0.0, tuple(rank for rank, weight in enumerate(weights) if weight))
        for rank in sound:
            self._remember(norms[rank], history.setdefault(rank, [0.0] * 4))
        shortest = min(norms[rank] for rank in sound)
        scores = [
            math.exp((shortest - norm) / self.temperature) if rank in sound else 0.0 for rank, norm in enumerate(norms)
        ]
        return in_proportion(scores)

    def _is_outlier(self, norm: float, past: list[float] | None) -> bool:
        if past is None or past[0] < self.patience:
            return False
        _, mean, square, _ = past
        deviation = math.sqrt(max(0.0, square - mean * mean))
        return norm - mean > self.threshold * max(deviation, 1e-3 * mean)

    def _remember(self, norm: float, past: list[float]) -> None:
        past[0] += 1
        past[3] = 0
        rate = max(1 - self.decay, 1 / past[0])  # a plain mean of the first ones
        past[1] += rate * (norm - past[1])
        past[2] += rate * (norm * norm - past[2])


@dataclass(frozen=True)
class Screened(Policy):
    """Leaves out replicas whose values are no numbers or keep being far too large; `rule` decides on the others.

    A round in which a replica's norm is above `bound` times the median of all replicas at work is a strike, any other
    finite one takes a strike back. With `patience` strikes it is left out, until it has none. One whose values are not
    finite is left out of that round. A replica counts for at most `bound` times the median of the work reported.

    If no majority is left, or fewer than three are at work, no replica is left out, and values that are not finite drop
    the round, as under `ByWork`.

    Args:
        rule: `ByWork()` or `ClippedToMedian()`.
        norm: the norms that it compares; with `none`, for weights that are averaged, only values that are not finite
            count.

    Raises:
        ConfigError: a number is out of its range.

    Source: norms are compared with their median as in SparseLoCo (arXiv:2508.15706); strikes are ours.
    """

    rule: Policy
    norm: Norm = "local"
    bound: float = 5.0
    patience: int = 3
    max_norm: ClassVar[float] = math.inf
    screens: ClassVar[bool] = True
    beside: ClassVar[tuple[Any, Any] | None] = (TrimmedMean(), TrimmedMax())

    def __post_init__(self) -> None:
        check_number("bound", self.bound, above=1)
        check_whole("patience", self.patience, least=1)

    def __call__(self, weights: Sequence[float], norms: Sequence[float], history: NormHistory) -> Decision:
        at_work = [rank for rank, weight in enumerate(weights) if weight]
        sound = [rank for rank in at_work if 0 < weights[rank] < math.inf and math.isfinite(norms[rank])]
        left_out = {rank: "its values are not finite" for rank in at_work if rank not in sound}
        if len(at_work) < 3 or 2 * len(sound) <= len(at_work):
            return in_proportion([weights[rank] if rank in sound else 0.0 for rank in range(len(norms))], (*left_out,))
        middle = statistics.median(norms[rank] for rank in sound)
        known = {rank: history.setdefault(rank, [0, 0]) for rank in sound if middle}
        far = [rank for rank, past in known.items() if self._is_out(norms[rank] > self.bound * middle, past)]
        if 2 * len(left_out) + 2 * len(far) < len(at_work):
            why = f"its values were over {self.bound:g} times as large as the median of all replicas"
            left_out |= dict.fromkeys(far, why)
        most = self.bound * statistics.median(weights[rank] for rank in sound)
        kept = [0.0 if rank in left_out else min(weight, most) for rank, weight in enumerate(weights)]
        decision = self.rule(kept, [norm if weight else 0.0 for norm, weight in zip(norms, kept, strict=True)], history)
        return replace(decision, left_out=left_out)

    def _is_out(self, is_far: bool, past: list[float]) -> bool:
        """Count a round of one replica in its `past`; return whether it is left out of it."""
        past[0] = min(self.patience, past[0] + 1) if is_far else max(0, past[0] - 1)
        past[1] = float(past[0] == self.patience or (past[1] > 0 and past[0] > 0))
        return past[1] > 0
