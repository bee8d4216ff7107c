# SPDX-License-Identifier: Apache-2.0
"""Who is in a round, and on what terms: one tiny vote before anything is reduced."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from laconic.base.errors import CollectiveMismatch
from laconic.comm.group import Group
from laconic.outer.aggregate import Share

BALLOT_BYTES = 6 * 8  # of one ballot on the wire
_TEXT_BYTES = 1024  # of a rank's description of itself, sent only to explain a mismatch


@dataclass(frozen=True)
class Ballot:
    """What a rank says before a round.

    Args:
        number: of the vote; ranks that are not in the same one must not reduce together.
        weight: optimizer steps that were really done since this rank's values were last agreed on.
        largest: something that is finite if and only if this rank's weights are; their largest magnitude where the
            codec has a limit.
        sound: this rank's floating buffers are finite. A batch that fp16 could not hold spoils statistics for ever.
        finished: this rank has no more data and only stays for the others.
    """

    number: int
    weight: float
    largest: float
    sound: bool
    finished: bool


@dataclass(frozen=True)
class Tally:
    """The ballots of all ranks, by rank."""

    weights: tuple[float, ...]
    largest: tuple[float, ...]
    sound: tuple[bool, ...]
    finished: bool  # all of them are

    def share(self, rank: int) -> Share:
        """Return the share of `rank` in a mean of weights."""
        return _share(self.weights, rank)

    def share_of_buffers(self, rank: int) -> Share:
        """Return the same among the ranks whose floating buffers are finite; the others get what those agree on."""
        return _share([weight * sound for weight, sound in zip(self.weights, self.sound, strict=True)], rank)

    def unfit(self, limit: float) -> list[int]:
        """Name the ranks whose values are not finite, or would not be once summed under a codec's `limit`."""
        bad = [rank for rank, value in enumerate(self.largest) if not math.isfinite(value)]
        if bad or math.isinf(limit):
            return bad
        parts = [self.share(rank).mine * value for rank, value in enumerate(self.largest)]
        return [] if sum(parts) <= limit else [rank for rank, part in enumerate(parts) if part > limit / len(parts)]


def _share(weights: Sequence[float], rank: int) -> Share:
    """Equal weights become 1, so that sums of exact values stay exact."""
    at_work = [weight for weight in weights if weight]
    if len(set(at_work)) <= 1:
        return Share(1.0 if weights[rank] else 0.0, len(at_work))
    return Share(weights[rank], sum(at_work))


class Static:
    """The ranks of one group, all of them in every round.

    Args:
        description: what must be the same on all ranks: recipe, shapes, cut.
    """

    def __init__(self, group: Group, description: str) -> None:
        self.group = group
        self.description = description
        digest = hashlib.blake2b(description.encode(), digest_size=6).digest()
        self._fingerprint = float(int.from_bytes(digest, "big"))  # 48 bits: exact in a float64

    def open(self, ballot: Ballot) -> Tally:
        """Gather the ballots of all ranks.

        Raises:
            CollectiveMismatch: the ranks differ in their descriptions, or in the number of the vote.
            RankFailure: a rank has left or died.
        """
        mine = [self._fingerprint, ballot.number, ballot.weight, ballot.largest, ballot.sound, ballot.finished]
        ballots = self.group.meet(torch.tensor(mine, dtype=torch.float64)).tolist()
        if any(other[:2] != mine[:2] for other in ballots):
            self._explain(ballot.number)
        _, _, weights, largest, sound, finished = zip(*ballots, strict=True)
        return Tally(weights, largest, tuple(map(bool, sound)), all(finished))

    def _explain(self, number: int) -> None:
        """Exchange the descriptions themselves, and raise the same error everywhere."""
        text = f"vote {number} of {self.description}".encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)
        texts = self.group.meet(torch.tensor(list(text), dtype=torch.float64))
        said = [bytes(int(value) for value in row).decode(errors="replace").strip() for row in texts.tolist()]
        ranks = {text: [rank for rank, other in enumerate(said) if other == text] for text in said}
        lines = [f"  ranks {who}: {text}" for text, who in ranks.items()]
        raise CollectiveMismatch("The ranks of an outer loop are not in the same round:\n" + "\n".join(lines))
