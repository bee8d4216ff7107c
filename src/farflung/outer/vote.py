# SPDX-License-Identifier: Apache-2.0
"""Who is in a round, and how much each replica counts: one tiny vote, and what follows from it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from farflung.base.errors import CollectiveMismatch
from farflung.base.words import numbered
from farflung.comm.group import Group

_TENSORS_SHOWN = 5  # that ranks differ in, in an error


@dataclass(frozen=True)
class Ballot:
    """What a rank says in a round.

    Args:
        number: of the vote; ranks that are not in the same one must not reduce together.
        weight: what was really done since this rank's values were last agreed on, as a part of what a full round has.
            A number of fp32, as all ranks must take it for the same.
        norm: of what it brings; finite if and only if its values are. 0 where they are weights, and finite.
        largest: their largest magnitude where the codec has a limit, else 0.
        sound: this rank's floating buffers are finite. A batch that fp16 could not hold spoils statistics for ever.
        finished: this rank has no more data and only stays for the others.
        position: how many steps it has attempted.
        digest: of what was last agreed on, or -1.
    """

    number: int
    weight: float
    norm: float = 0.0
    largest: float = 0.0
    sound: bool = True
    finished: bool = False
    position: int = 0
    digest: int = -1


_HALF = 2**24  # whole numbers below this are exact in fp32
_LARGEST = 3e38  # stands for a norm that is finite, but not in fp32
BALLOT_BYTES = 4 * 13  # on the wire: so many numbers, each of which is exact in fp32


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

    def too_large(self, factors: Sequence[float], limit: float) -> tuple[int, ...]:
        """Name the ranks whose values would not be finite once summed under a codec's `limit`."""
        if math.isinf(limit):
            return ()
        parts = [factor * value for factor, value in zip(factors, self.largest, strict=True)]
        return (
            () if sum(parts) <= limit else tuple(rank for rank, part in enumerate(parts) if part > limit / len(parts))
        )

    @property
    def sound_weights(self) -> tuple[float, ...]:
        """The weights of the ranks whose floating buffers are finite, 0 for the others, which get what these have."""
        return tuple(weight * sound for weight, sound in zip(self.weights, self.sound, strict=True))


class FixedMembership:
    """The ranks of one group, all of them in every round.

    Args:
        description: what must be the same on all ranks: recipe, shapes, cut.
        tensors: a line for each tensor that is exchanged, of which the description has no more than a digest.
        noun: for one of them, in errors.
    """

    def __init__(self, group: Group, description: str, tensors: Sequence[str] = (), noun: str = "rank") -> None:
        self.group = group
        self.noun = noun
        self.describe(description, tensors)

    def describe(self, description: str, tensors: Sequence[str]) -> None:
        """Say in the next votes that this rank is as described now."""
        self.description = description
        self._tensors = tensors
        digest = hashlib.blake2b(description.encode(), digest_size=6).digest()
        self._fingerprint = _halves(int.from_bytes(digest, "big"))

    def begin(self, ballot: Ballot) -> Callable[[], Tally]:
        """Begin to gather the ballots of all ranks; calling what is returned waits for them, and may raise an error.

        Raises:
            CollectiveMismatch: the ranks differ in their descriptions, or in the number of the vote.
        """
        ballots = self.group.begin_all_gather_small(torch.tensor(self._row(ballot), dtype=torch.float32))
        return lambda: self._count(ballots(), ballot)

    def _row(self, ballot: Ballot) -> list[float]:
        """Return the ballot as numbers that are exact in fp32."""
        norm = ballot.norm if not math.isfinite(ballot.norm) else min(ballot.norm, _LARGEST)
        values = [ballot.weight, norm, ballot.largest, ballot.sound, ballot.finished]
        whole = [*_halves(ballot.number), *_halves(ballot.position), *_halves(ballot.digest)]
        return [*self._fingerprint, *whole, *map(float, values)]

    def _count(self, rows: Tensor, ballot: Ballot) -> Tally:
        listed = rows.tolist()
        mine = [*self._fingerprint, *_halves(ballot.number)]
        if any(row[:4] != mine for row in listed):
            self._explain(ballot.number)
        columns = list(zip(*listed, strict=True))
        weights, norms, largest, sound, finished = columns[8:]
        return Tally(
            weights,
            norms,
            largest,
            sound=tuple(map(bool, sound)),
            finished=all(finished),
            position=max(map(_whole, columns[4], columns[5])),
            digests=tuple(map(_whole, columns[6], columns[7])),
        )

    def _explain(self, number: int) -> None:
        """Exchange the descriptions themselves, and raise the same error everywhere."""
        said = self._told(f"vote {number} of {self.description}")
        listed = [dict.fromkeys(text.splitlines()) for text in self._told("\n".join(self._tensors))]
        ranks = {text: [rank for rank, other in enumerate(said) if other == text] for text in said}
        lines = [f"  {numbered(self.noun, who)}: {text}" for text, who in ranks.items()]
        where = {line: [rank for rank, mine in enumerate(listed) if line in mine] for mine in listed for line in mine}
        names = list(dict.fromkeys(line.split()[0] for line in where))
        there = sorted(where.items(), key=lambda found: names.index(found[0].split()[0]))
        odd = [f"  on {numbered(self.noun, who)} alone: {line}" for line, who in there if len(who) < self.group.size]
        lines += odd[:_TENSORS_SHOWN] + ([f"  and {len(odd) - _TENSORS_SHOWN} more"] if odd[_TENSORS_SHOWN:] else [])
        raise CollectiveMismatch("The ranks of an outer loop are not in the same round:\n" + "\n".join(lines))

    def _told(self, text: str) -> list[str]:
        """Exchange texts of any length."""
        mine = text.encode()
        longest = 1 + int(self.group.all_gather_small(torch.tensor([float(len(mine))])).max())
        rows = self.group.all_gather_small(torch.tensor([float(byte) for byte in mine.ljust(longest)]))
        return [bytes(map(int, row)).decode(errors="replace").rstrip() for row in rows.tolist()]


class Island:
    """The ranks that train one replica together: the same for all, or each its shards.

    In a round each of them meets the same rank of the other islands, so all must make the same of what they hear there.
    That needs no more than that all ranks of an island cast the same ballot.

        norm = sqrt(sum of the shards' squared norms);  largest = max;  sound, finished = and;  weight = mean

    Args:
        group: those ranks; of one alone nothing is sent.
        is_sharded: each holds another part of every weight.
        description, tensors: see `FixedMembership`.

    Attributes:
        shard: which of them this rank holds; 0 where there are none.
    """

    def __init__(self, group: Group, is_sharded: bool, description: str, tensors: Sequence[str]) -> None:
        self.members = FixedMembership(group, description, tensors, "island rank")
        self.size = group.size
        self.shard = group.rank if is_sharded else 0
        self._is_sharded = is_sharded

    def ballot(self, mine: Ballot) -> Ballot:
        """Return what the island says, where this rank says `mine`: a collective."""
        if self.size == 1:
            return mine
        tally = self.members.begin(mine)()
        weight = torch.tensor(math.fsum(tally.weights) / self.size, dtype=torch.float32).item()
        norm = math.sqrt(self._of_all([norm * norm for norm in tally.norms]))
        said = replace(mine, weight=weight, norm=norm, largest=max(tally.largest), sound=all(tally.sound))
        return replace(said, finished=tally.finished, position=tally.position)

    def square(self, mine: float) -> float:
        """Return the square of a norm of which this rank's values make up `mine`: a collective."""
        return mine if self.size == 1 else self._of_all(self._gathered(mine))

    def agrees(self, flag: bool) -> bool:
        """Return whether all ranks say so: a collective."""
        return flag if self.size == 1 else all(self._gathered(flag))

    def longest(self, seconds: float) -> float:
        """Return the largest number of all ranks: a collective."""
        return seconds if self.size == 1 else max(self._gathered(seconds))

    def _gathered(self, value: float) -> list[float]:
        rows = self.members.group.all_gather_small(torch.tensor([value], dtype=torch.float64))
        return [float(value) for value in rows.flatten()]

    def _of_all(self, squares: Sequence[float]) -> float:
        """Add up what shards have; of equal ones take the mean, which lets no NaN through unseen."""
        return math.fsum(squares) / (1 if self._is_sharded else self.size)


Norm = Literal["none", "local", "sent"]


@dataclass
class NormHistory:
    """What a policy remembers of the replicas' norms, by rank.

    Args:
        seen: count, mean and mean square of those it took for sound, and how many it has refused since the last one.
    """

    seen: dict[int, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """Factors by rank, what their sum of values is divided by, and the ranks whose values nobody can use."""

    factors: tuple[float, ...]
    total: float
    unfit: tuple[int, ...] = ()


class Policy(Protocol):
    """From the ballots of a round to factors: the same on every rank, as all of them have the same ballots.

    Under any policy but `ByWork()` nothing is sent before the votes are in.
    """

    @property
    def norm(self) -> Norm:
        """Which norms it looks at: of what the replicas moved by, or of what is left of that on the wire."""

    @property
    def max_norm(self) -> float:
        """The largest norm that the aggregate may have; it is scaled down to that."""

    def __call__(self, weights: Sequence[float], norms: Sequence[float], history: NormHistory) -> Decision:
        """Decide.

        Args:
            weights: what each rank has done since the last round, as a part of what a full round has.
            norms: of each rank; one that is not finite means that its values aren't.
        """


@dataclass(frozen=True)
class ByWork:
    """Each replica counts by what it has done; one with values that are not finite makes everyone drop the round."""

    norm: ClassVar[Norm] = "none"
    max_norm: ClassVar[float] = math.inf

    def __call__(self, weights: Sequence[float], norms: Sequence[float], history: NormHistory) -> Decision:
        """Take the weights as factors."""
        return in_proportion(weights, not_finite(norms))


def in_proportion(weights: Sequence[float], unfit: tuple[int, ...] = ()) -> Decision:
    """Let each rank count by its weight. Equal weights become 1, so that sums of exact values stay exact."""
    scale = max(weights) if len(set(weights) - {0}) == 1 else 1.0
    return Decision(tuple(weight / scale for weight in weights), float(sum(weights)) / scale, unfit)


def not_finite(norms: Sequence[float]) -> tuple[int, ...]:
    """Return the ranks whose norms say that their values are not finite."""
    return tuple(rank for rank, norm in enumerate(norms) if not math.isfinite(norm))


def _halves(number: int) -> tuple[float, float]:
    high, low = divmod(number, _HALF)
    return float(high), float(low)


def _whole(high: float, low: float) -> int:
    return int(high) * _HALF + int(low)
