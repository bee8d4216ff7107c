# SPDX-License-Identifier: Apache-2.0
"""How much each replica counts in a round: what a policy is, and the plain one; others are in `policies.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

Norm = Literal["none", "local", "sent"]


# What a policy remembers of the replicas' norms, by rank. `WithoutOutliers`: count, mean and mean square of those it
# took for sound, and how many it has refused since the last one. `Screened`: strikes, and whether it is left out.
NormHistory: TypeAlias = dict[int, list[float]]


@dataclass(frozen=True)
class Decision:
    """Factors by rank, what their sum of values is divided by, and the ranks whose values nobody can use.

    If some are unfit all drop the round; of those that are `left_out`, with the reason, only they do not count.
    """

    factors: tuple[float, ...]
    total: float
    unfit: tuple[int, ...] = ()
    left_out: Mapping[int, str] = field(default_factory=dict)


class Policy(Protocol):
    """From the ballots of a round to factors: the same on every rank, as all of them have the same ballots.

    Under any policy but `ByWork()` nothing is sent before the votes are in.
    """

    weighs_work: ClassVar[bool] = True  # a replica that has done more counts for more
    screens: ClassVar[bool] = False  # it leaves out single replicas, also those whose values would spoil a sum
    beside: ClassVar[tuple[Any, Any] | None] = None  # aggregators of floats and counters without norms; None: the usual

    @property
    def norm(self) -> Norm:
        """Which norms it uses: those of the pseudo-gradients (`local`), or of their encoded form (`sent`)."""

    @property
    def max_norm(self) -> float:
        """The largest norm that the aggregate may have; it is scaled down to that."""

    def __call__(self, weights: Sequence[float], norms: Sequence[float], history: NormHistory) -> Decision:
        """Decide.

        Args:
            weights: what each rank has done since the last round, as a part of what a full round has.
            norms: of each rank; one that is not finite means that its values aren't.
            history: of the rounds before; what the policy changes in it counts once this round has ended.
        """


@dataclass(frozen=True)
class ByWork(Policy):
    """Each replica counts by its work; if the values of one are not finite, all drop the round."""

    norm: ClassVar[Norm] = "none"
    max_norm: ClassVar[float] = math.inf

    def __call__(self, weights: Sequence[float], norms: Sequence[float], history: NormHistory) -> Decision:
        return in_proportion(weights, not_finite(norms))


def in_proportion(weights: Sequence[float], unfit: tuple[int, ...] = ()) -> Decision:
    """Return factors in proportion to the weights, in a unit that makes the largest at least 1 and less than 2.

    So sums fit into few bits if weights are items; and as the unit is a power of two, or the weight itself if all
    are equal, sums of exact values stay exact.
    """
    largest = max(weights, default=0.0)
    scale = largest if len(set(weights) - {0}) == 1 else math.ldexp(1.0, math.frexp(largest)[1] - 1)
    return Decision(tuple(weight / scale for weight in weights), float(sum(weights)) / scale, unfit)


def not_finite(norms: Sequence[float]) -> tuple[int, ...]:
    """Return the ranks whose norms say that their values are not finite."""
    return tuple(rank for rank, norm in enumerate(norms) if not math.isfinite(norm))
