# SPDX-License-Identifier: Apache-2.0
"""The tiny vote of a round: a ballot of each rank, or island of ranks, and the tally they all derive."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from farflung.base.errors import CollectiveMismatch, Unsupported
from farflung.base.words import numbered
from farflung.comm.group import Group

Seen: TypeAlias = "Mapping[str, tuple[list[int], int]]"  # by name, where a part of a tensor begins, and its hash
_TENSORS_SHOWN = 5  # that ranks differ in, in an error


def digest_of(text: str) -> int:
    """Return a whole number, exact in fp64, that is the same for equal texts and almost never for different ones."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def odd_among(digests: Sequence[float]) -> list[int]:
    """Return the ranks whose digest is not that of the majority; of two, the one that joined later."""
    usual = max(digests, key=digests.count)  # of equally frequent ones the first: members are in the order of coming
    return [rank for rank, digest in enumerate(digests) if digest != usual]


@dataclass(frozen=True)
class Ballot:
    """A rank's vote in a round."""

    number: int  # of the vote; ranks that are not in the same one must not reduce together
    # What was really done since this rank's values were last agreed on, as a part of what a full round has. A number of
    # fp32, as all ranks must take it for the same.
    weight: float
    norm: float = 0.0  # of its share of what it brings; finite if and only if that is. 0 if it is weights, and finite
    largest: float = 0.0  # their largest magnitude if the codec has a limit, else 0
    sound: bool = True  # its floating buffers are finite: a batch that fp16 could not hold spoils statistics for ever
    finished: bool = False  # this rank has no more data and only stays for the others
    position: int = 0  # how many steps it has attempted
    digest: int = -1  # of what was last agreed on, or -1
    awaited: bool = False  # a newcomer is known to wait
    mark: int = 0  # a fingerprint of this rank's weights, or 0
    proposal: tuple[int, int] = (0, 0)  # H and delay that this rank wants from some step on, or zeros
    trained: int = 0  # a digest of the names of what this rank has trained; 0 if that is nothing, or not asked


_ISLAND_RANK = "island rank"
_STAGES = (
    "Pipeline stages are no island: give each stage an OuterLoop of its own, over the ranks of its column as group=."
)
_LARGEST = 3e38  # stands for a norm that is finite, but not in fp32
BALLOT_BYTES = 8 * 14  # on the wire: 14 fp64 numbers


@dataclass(frozen=True)
class Tally:
    """The ballots of all ranks, by rank."""

    weights: tuple[float, ...]
    norms: tuple[float, ...]
    largest: tuple[float, ...]
    sound: tuple[bool, ...]
    finished: bool  # all of them are
    position: int  # the furthest
    digests: tuple[int, ...]
    awaited: bool = False  # some of them say so
    marks: tuple[int, ...] = ()
    proposal: tuple[int, int] = (0, 0)  # of the first rank that has one
    trained: tuple[int, ...] = ()

    def too_large(self, factors: Sequence[float], limit: float) -> tuple[int, ...]:
        """Return the ranks whose values would not be finite once summed under a codec's `limit`."""
        parts = [factor * value for factor, value in zip(factors, self.largest, strict=True)]
        if sum(parts) <= limit:
            return ()
        return tuple(rank for rank, part in enumerate(parts) if part > limit / len(parts))

    def usable_norms(self, limit: float) -> tuple[float, ...]:
        """Return the norms; infinite ones for ranks whose values would spoil the sum under a codec's `limit`."""
        most = limit / (2 * len(self.norms))  # factors are below 2
        return tuple(norm if value <= most else math.inf for norm, value in zip(self.norms, self.largest, strict=True))

    @property
    def sound_weights(self) -> tuple[float, ...]:
        """The weights of the ranks whose floating buffers are finite; 0 for the others, which receive those buffers."""
        return tuple(weight * sound for weight, sound in zip(self.weights, self.sound, strict=True))


class Voters:
    """The ranks of one group, which vote before they change anything that they agreed on.

    Args:
        description: all that must be the same on all ranks: recipe, shapes, cut.
        tensors: a line for each tensor that is exchanged; the description has only a digest of them.
        noun: for one of them, in errors.
    """

    def __init__(self, group: Group, description: str, tensors: Sequence[str] = (), noun: str = "rank") -> None:
        self.group = group
        self.noun = noun
        self.describe(description, tensors)

    def describe(self, description: str, tensors: Sequence[str]) -> None:
        self.description = description
        self._tensors = tensors
        self._fingerprint = digest_of(description)

    def begin(self, ballot: Ballot) -> Callable[[], Tally]:
        """Begin to gather the ballots of all ranks; return a function that waits for them, and may raise an error.

        Raises:
            CollectiveMismatch: the ranks differ in their descriptions, or in the number of the vote.
        """
        flags = ballot.sound, ballot.finished, ballot.awaited
        whole = self._fingerprint, ballot.number, ballot.position, ballot.digest, *map(float, flags), ballot.mark
        row = torch.tensor(
            [*whole, *ballot.proposal, ballot.trained, ballot.weight, ballot.norm, ballot.largest], dtype=torch.float64
        )
        ballots = self.group.begin_all_gather_small(row)
        return lambda: self._count(ballots(), ballot)

    def _count(self, rows: Tensor, ballot: Ballot) -> Tally:
        columns = list(zip(*rows.tolist(), strict=True))
        fingerprints, numbers, positions, digests, sound, finished, awaited, marks, *values = columns
        everys, delays, trained, weights, norms, largest = values
        if set(fingerprints) != {self._fingerprint} or set(numbers) != {ballot.number}:
            self._explain(ballot.number)
        return Tally(
            weights,
            norms,
            largest,
            sound=tuple(map(bool, sound)),
            finished=all(finished),
            position=int(max(positions)),
            digests=tuple(map(int, digests)),
            awaited=any(awaited),
            marks=tuple(map(int, marks)),
            proposal=next(((int(h), int(delay)) for h, delay in zip(everys, delays, strict=True) if h), (0, 0)),
            trained=tuple(map(int, trained)),
        )

    def _explain(self, number: int) -> None:
        """Exchange the descriptions themselves, and raise the same error everywhere."""
        mine = (f"vote {number} of {self.description}", list(self._tensors))
        everyone = self.group.all_gather_json(mine)
        said, listed = [text for text, _ in everyone], [dict.fromkeys(lines) for _, lines in everyone]
        ranks = {text: [rank for rank, other in enumerate(said) if other == text] for text in said}
        lines = [f"  {numbered(self.noun, who)}: {text}" for text, who in ranks.items()]
        where = {line: [rank for rank, mine in enumerate(listed) if line in mine] for mine in listed for line in mine}
        first = {line: min(list(mine).index(line) for mine in listed if line in mine) for line in where}
        there = sorted(where, key=first.__getitem__)  # what differs in one tensor stands together
        alone = [(line, where[line]) for line in there if len(where[line]) < self.group.size]
        odd = [f"  on {numbered(self.noun, ranks)} alone: {line}" for line, ranks in alone]
        lines += odd[:_TENSORS_SHOWN] + ([f"  and {len(odd) - _TENSORS_SHOWN} more"] if odd[_TENSORS_SHOWN:] else [])
        lines += [f"  {_STAGES}"] if self.noun == _ISLAND_RANK else []
        raise CollectiveMismatch("The ranks of an outer loop are not in the same round:\n" + "\n".join(lines))


class Island:
    """The ranks that train one replica together: each holds all of a tensor, or a part that others may hold too.

    In a round each of them meets the same rank of the other islands, and all must reach the same decision. For that it
    is enough that all ranks of an island cast the same ballot.

        norm = sqrt(sum of squares, each value once);  largest = max;  sound, finished = and;  weight = mean

    Args:
        group: those ranks; of one alone nothing is sent.
        is_sharded: some weights are in parts.
        description, tensors: see `Voters`.

    Attributes:
        shard: which of them this rank holds; 0 if there are none.
    """

    def __init__(self, group: Group, is_sharded: bool, description: str, tensors: Sequence[str]) -> None:
        self.voters = Voters(group, description, tensors, _ISLAND_RANK)
        self.size = group.size
        self.shard = group.rank if is_sharded else 0

    def ballot(self, mine: Ballot) -> Ballot:
        """Return the island's ballot, from this rank's `mine` and those of the others: a collective."""
        if self.size > 1:
            tally = self.voters.begin(mine)()
            kinds = set(tally.trained) - {0}
            mine = replace(
                mine,
                weight=math.fsum(tally.weights) / self.size,
                norm=math.sqrt(math.fsum(norm * norm for norm in tally.norms)),
                largest=max(tally.largest),
                sound=all(tally.sound),
                finished=tally.finished,
                position=tally.position,
                awaited=tally.awaited,
                mark=digest_of(str(tally.marks)) if all(tally.marks) else 0,
                proposal=tally.proposal,
                trained=kinds.pop() if len(kinds) == 1 else -len(kinds),  # of no names, if its ranks differ
            )
        norm = min(mine.norm, _LARGEST) if math.isfinite(mine.norm) else mine.norm
        weight, norm, largest = torch.tensor([mine.weight, norm, mine.largest], dtype=torch.float32).tolist()
        return replace(mine, weight=weight, norm=norm, largest=largest)

    def compare(self, seen: Seen) -> None:
        """Compare what ranks hold the same parts of: a collective.

        Raises:
            Unsupported: their values differ.
        """
        everyone = self.voters.group.all_gather_json(seen)
        first: dict[str, tuple[int, int]] = {}
        for rank, theirs in enumerate(everyone):
            for name, (offset, number) in theirs.items():
                other, usual = first.setdefault(f"{name} {offset}", (rank, number))
                if number != usual:
                    raise Unsupported(
                        f"{name} has other values on rank {rank} of an island than on its rank {other}, though neither "
                        "has a part of it that the other lacks: nothing sums its gradients over them, or they began "
                        "with different values. Make it a DTensor too (by parallelize_module, such as "
                        "SequenceParallel, or fully_shard of the whole model), average its gradients over the island "
                        f"(DDP's process_group=), or freeze it. {_STAGES}"
                    )

    def squares(self, mine: Sequence[float]) -> list[float]:
        """Return the squares of several norms, from each rank's part of them: one collective of as many on all ranks.

        A value that several ranks hold is in the parts of all of them, divided by their number.
        """
        return [math.fsum(column) for column in zip(*self.gathered(*mine), strict=True)]

    def gathered(self, *mine: float) -> list[list[float]]:
        """Return the values of all ranks, by rank: a collective."""
        if self.size == 1:
            return [list(mine)]
        rows: list[list[float]] = self.voters.group.all_gather_small(torch.tensor(mine, dtype=torch.float64)).tolist()
        return rows
