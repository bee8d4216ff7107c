# SPDX-License-Identifier: Apache-2.0
"""The tiny vote of a round: what each rank says of itself, and what all of them make of it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
        awaited: a newcomer is known to wait.
    """

    number: int
    weight: float
    norm: float = 0.0
    largest: float = 0.0
    sound: bool = True
    finished: bool = False
    position: int = 0
    digest: int = -1
    awaited: bool = False


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
    awaited: bool = False  # some of them say so

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


class Voters:
    """The ranks of one group, which vote before anything that they agreed on is changed.

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
        values = [ballot.weight, norm, ballot.largest, ballot.sound, ballot.finished + 2 * ballot.awaited]
        whole = [*_halves(ballot.number), *_halves(ballot.position), *_halves(ballot.digest)]
        return [*self._fingerprint, *whole, *map(float, values)]

    def _count(self, rows: Tensor, ballot: Ballot) -> Tally:
        listed = rows.tolist()
        mine = [*self._fingerprint, *_halves(ballot.number)]
        if any(row[:4] != mine for row in listed):
            self._explain(ballot.number)
        columns = list(zip(*listed, strict=True))
        weights, norms, largest, sound, flags = columns[8:]
        return Tally(
            weights,
            norms,
            largest,
            sound=tuple(map(bool, sound)),
            finished=all(flag % 2 for flag in flags),
            position=max(map(_whole, columns[4], columns[5])),
            digests=tuple(map(_whole, columns[6], columns[7])),
            awaited=any(flag >= 2 for flag in flags),
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
        mine = text.encode()
        longest = 1 + int(self.group.all_gather_small(torch.tensor([float(len(mine))])).max())
        rows = self.group.all_gather_small(torch.tensor([float(byte) for byte in mine.ljust(longest)]))
        return [bytes(map(int, row)).decode(errors="replace").rstrip() for row in rows.tolist()]


def _halves(number: int) -> tuple[float, float]:
    high, low = divmod(number, _HALF)
    return float(high), float(low)


def _whole(high: float, low: float) -> int:
    return int(high) * _HALF + int(low)
