# SPDX-License-Identifier: Apache-2.0
"""Detects replicas that see the same batches: their weights are equal to the last bit, round after round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

from farflung.base.errors import ConfigError
from farflung.base.words import numbered

_ROUNDS = 3  # in which two replicas bring the same


@dataclass(eq=False)
class Twins:
    """Compares the replicas' weights in the first rounds in which they move, by the fingerprints in their ballots."""

    are_allowed: bool  # so nothing is compared
    _latest: dict[tuple[int, int], int] = field(default_factory=dict)  # fingerprints, by fragment and replica
    _alike: dict[tuple[int, int], int] = field(default_factory=dict)  # rounds in which two were alike; -1: not any more

    def are_looked_for(self, ids: Sequence[int]) -> bool:
        """Whether some of these replicas were not different yet."""
        return not self.are_allowed and any(self._alike.get(pair, 0) >= 0 for pair in combinations(ids, 2))

    def look(self, fragment: int, ids: Sequence[int], marks: Sequence[int]) -> None:
        """Compare the replicas' fingerprints in a round: of their weights, 0 for a replica without steps.

        Raises:
            ConfigError: some were equal in as many rounds as it takes.
        """
        if not self.are_looked_for(ids) or len(marks) != len(ids):  # a round out of a checkpoint has no marks
            return
        brought = {one: mark for one, mark in zip(ids, marks, strict=True) if mark}
        latest = {one: self._latest.get((fragment, one), mark) for one, mark in brought.items()}
        moved = [one for one, mark in brought.items() if mark != latest[one]]  # never in the first round
        self._latest |= {(fragment, one): mark for one, mark in brought.items()}
        for pair in combinations(moved, 2):
            seen = self._alike.get(pair, 0)
            if seen >= 0:
                self._alike[pair] = seen + 1 if brought[pair[0]] == brought[pair[1]] else -1
        found = {one for pair in combinations(ids, 2) if self._alike.get(pair, 0) >= _ROUNDS for one in pair}
        if found:
            twins = [rank for rank, one in enumerate(ids) if one in found]
            raise ConfigError(
                f"{numbered('replica', twins).capitalize()} see the same batches: their weights were equal to the last "
                f"bit in each of {_ROUNDS} rounds. Give each its own part of the data, by a "
                "DistributedSampler, a prepared loader (--as-accelerate), or a seed that depends on its place "
                "(farflung.elastic.place()). If this is meant, say same_data=True (--outer-same-data)."
            )
