# SPDX-License-Identifier: Apache-2.0
"""What the rounds have cost so far."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Stats:
    """Counters and seconds of one rank since its outer loop began (or since the run it resumed began).

    Args:
        steps: optimizer steps that were done.
        attempts: the same, and those that fp16 overflow skipped.
        rounds: that were agreed on and applied.
        dropped_rounds: that were given up, because a rank's values were not finite; local steps were kept.
        bytes_sent: what this rank put on the wire in rounds, by the rule 2(M-1)/M of the payload for an all-reduce
            among M ranks. Neither votes nor the broadcast of the first weights are in it.
        bytes_voting: what this rank sent in votes, 48 bytes to each other rank.
        seconds_exposed: that the training loop waited in rounds; it is the sum of the next three and little more.
        seconds_voting: waiting in votes, which is mostly waiting for slower ranks.
        seconds_packing: looking over local values, copying them into buffers, encoding.
        seconds_landing: waiting for buckets under way, decoding them, the outer optimizer, writing back. On CUDA these
            last two only count what the host takes, as the work goes on behind it.
    """

    steps: int
    attempts: int
    rounds: int
    dropped_rounds: int
    bytes_sent: int
    bytes_voting: int
    seconds_exposed: float
    seconds_voting: float
    seconds_packing: float
    seconds_landing: float


_COUNTS = ("steps", "attempts", "rounds", "dropped_rounds", "bytes_sent", "bytes_voting")
_SECONDS = ("exposed", "voting", "packing", "landing")


@dataclass
class Meter:
    """The same figures, growing."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SECONDS, 0.0))

    def add(self, name: str, amount: int = 1) -> None:
        """Count."""
        self.counts[name] += amount

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that a block takes, also when it ends with an error."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def stats(self) -> Stats:
        """Return the figures as they are now."""
        figures: dict[str, Any] = {**self.counts, **{f"seconds_{name}": s for name, s in self.seconds.items()}}
        return Stats(**figures)

    def load(self, stats: dict[str, Any]) -> None:
        """Go on from the figures that `asdict(stats())` gave."""
        self.counts = {name: int(stats[name]) for name in _COUNTS}
        self.seconds = {name: float(stats[f"seconds_{name}"]) for name in _SECONDS}
