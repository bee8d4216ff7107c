# SPDX-License-Identifier: Apache-2.0
"""Ranks that train one replica together: in a round they speak with one voice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from farflung.comm.group import Group
from farflung.outer.ballot import Ballot, Voters


class Island:
    """The ranks that train one replica together: the same for all, or each its shards.

    In a round each of them meets the same rank of the other islands, so all must make the same of what they hear there.
    That needs no more than that all ranks of an island cast the same ballot.

        norm = sqrt(sum of the shards' squared norms);  largest = max;  sound, finished = and;  weight = mean

    Args:
        group: those ranks; of one alone nothing is sent.
        is_sharded: each holds another part of every weight.
        description, tensors: see `Voters`.

    Attributes:
        shard: which of them this rank holds; 0 where there are none.
    """

    def __init__(self, group: Group, is_sharded: bool, description: str, tensors: Sequence[str]) -> None:
        self.voters = Voters(group, description, tensors, "island rank")
        self.size = group.size
        self.shard = group.rank if is_sharded else 0
        self._is_sharded = is_sharded

    def ballot(self, mine: Ballot) -> Ballot:
        """Return what the island says, where this rank says `mine`: a collective."""
        if self.size == 1:
            return mine
        tally = self.voters.begin(mine)()
        weight = torch.tensor(math.fsum(tally.weights) / self.size, dtype=torch.float32).item()
        norm = math.sqrt(self._of_all([norm * norm for norm in tally.norms]))
        said = replace(mine, weight=weight, norm=norm, largest=max(tally.largest), sound=all(tally.sound))
        return replace(said, finished=tally.finished, position=tally.position, awaited=tally.awaited)

    def square(self, mine: float) -> float:
        """Return the square of a norm of which this rank's values make up `mine`: a collective."""
        return self.squares([mine])[0]

    def squares(self, mine: Sequence[float]) -> list[float]:
        """Return the squares of several norms: one collective, of the same number on all ranks."""
        return [self._of_all(column) for column in zip(*self._gathered(*mine), strict=True)]

    def agrees(self, flag: bool) -> bool:
        """Return whether all ranks say so: a collective."""
        return all(said for (said,) in self._gathered(flag))

    def longest(self, seconds: float) -> float:
        """Return the largest number of all ranks: a collective."""
        return max(said for (said,) in self._gathered(seconds))

    def _gathered(self, *mine: float) -> list[list[float]]:
        if self.size == 1:
            return [list(mine)]
        rows: list[list[float]] = self.voters.group.all_gather_small(torch.tensor(mine, dtype=torch.float64)).tolist()
        return rows

    def _of_all(self, squares: Sequence[float]) -> float:
        """Add up what shards have; of equal ones take the mean, which lets no NaN through unseen."""
        return math.fsum(squares) / (1 if self._is_sharded else self.size)
