# SPDX-License-Identifier: Apache-2.0
"""The costs of rounds so far, what happened in each, and advice."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from farflung.base.words import counted, in_bytes, in_seconds

# Each round of each loop, at level DEBUG, with the attributes `round` and `rounds` (the loop's): a handler writes
# them to the run's folder.
ROUNDS = logging.getLogger("farflung.rounds")


@dataclass(frozen=True)
class Stats:
    """Counters and seconds of one rank since its outer loop began (or since the run it resumed began).

    Printed, they are a short table; `as_dict()` returns them all by name.
    """

    steps: int = 0  # optimizer steps that were done
    attempts: int = 0  # the same, and those that fp16 overflow skipped
    rounds: int = 0  # that were agreed on and applied; a round of one fragment counts as one
    dropped_rounds: int = 0  # that were given up, because a rank's values were not finite; local steps were kept
    # What this rank put on the wire in rounds: by the rule 2(M-1)/M of the payload for an all-reduce among M ranks,
    # M - 1 times the payload if it is gathered. Neither votes nor the broadcast of the first weights are in it.
    bytes_sent: int = 0
    bytes_received: int = 0  # the same of what came
    bytes_voting: int = 0  # what this rank sent in votes
    seconds_exposed: float = 0.0  # that the training loop waited in rounds
    seconds_hidden: float = 0.0  # of rounds that overlapped with training
    seconds_voting: float = 0.0  # in votes: mostly waiting for slower ranks; hidden or not, as the next two
    seconds_encoding: float = 0.0  # copying values into buffers and encoding them
    # Waiting for buckets under way, decoding them, the outer optimizer, writing back. On CUDA these last two only count
    # what the host takes, as the work continues behind it.
    seconds_landing: float = 0.0
    seconds_total: float = 0.0  # since the loop began
    drift_norm: float = 0.0  # how far this rank had moved from the anchor in the latest round; 0 without an anchor
    first_drift_norm: float = 0.0  # the same in the first round that had one
    cosine: float = 0.0  # between the ways of two replicas in the latest round, on average; 0 with no anchor or alone
    weight: float = 0.0  # this rank's part of the latest round, from 0 to 1
    replicas_lost: int = 0  # that others continued without, since this one came
    replicas_joined: int = 0  # that came after it
    seconds_recovering: float = 0.0  # from when a loss was noticed until those that were left had met again
    steps_lost: float = 0.0  # of this replica's own, in the unit of `weigh_by`, while the others continued without it

    @property
    def waiting(self) -> float:
        """The share of the time since the loop began that training has waited in rounds, from 0 to 1."""
        return min(1.0, self.seconds_exposed / self.seconds_total) if self.seconds_total else 0.0

    def saved(self) -> dict[str, int | float]:
        """Return the figures that a checkpoint keeps: all but those of other replicas that came and went."""
        seen = ("replicas_lost", "replicas_joined", "seconds_recovering", "steps_lost")
        return {name: value for name, value in asdict(self).items() if name not in seen}

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)

    def __str__(self) -> str:
        skipped, dropped = self.attempts - self.steps, self.dropped_rounds
        rows = {
            "steps": f"{self.steps:,}" + (f" ({skipped:,} skipped)" if skipped else ""),
            "rounds": f"{self.rounds:,}" + (f" ({dropped:,} dropped)" if dropped else ""),
            "sent": f"{in_bytes(self.bytes_sent)}, votes {in_bytes(self.bytes_voting)}",
            "received": in_bytes(self.bytes_received),
            "waited": f"{in_seconds(self.seconds_exposed)} of {in_seconds(self.seconds_total)} ({self.waiting:.0%})",
            "hidden": f"{in_seconds(self.seconds_hidden)} of rounds during training",
            "drift": f"{self.drift_norm:.3g} from the anchor, {self.first_drift_norm:.3g} in the first round",
            "cosine": f"{self.cosine:.3g} between replicas",
        }
        if self.replicas_lost or self.replicas_joined:
            changes = f"{self.replicas_lost} lost, {self.replicas_joined} joined"
            rows["replicas"] = f"{changes}; {in_seconds(self.seconds_recovering)} to recover"
        return "\n".join(f"{name:<10}{value}" for name, value in rows.items())


@dataclass(frozen=True)
class Round:
    """What happened in one round of one fragment, as one rank saw it. By rank: by island, if these are replicas."""

    number: int  # of the vote
    # Who took part, by rank: the ids of replicas that come and go, else the ranks. A round of one block of
    # `hierarchical` has all ranks here, and only those of the block in what is by rank below.
    members: tuple[int, ...]
    step: int  # of this rank, when the fragment was sent off
    fragment: int
    dropped: bool  # some rank's values were not finite; nothing came of it
    weights: tuple[float, ...]  # how much each rank counted, by rank; they sum up to 1 unless some were clipped
    norms: tuple[float, ...]  # how far each rank had moved, by rank; 0 without an anchor
    norm: float  # how far the replicas agreed to move, before the outer optimizer
    cosine: float  # between the ways of two replicas, on average; too large under a codec that rounds coarsely
    bytes_sent: int
    bytes_received: int
    seconds_exposed: float
    seconds_hidden: float
    lost: Mapping[int, str] = field(default_factory=dict)  # why members were lost since the round before, by id
    joined: tuple[int, ...] = ()  # the ids of those that joined since then
    left_out: Mapping[int, str] = field(default_factory=dict)  # why members did not count in this round, by id
    seconds_voting: float = 0.0  # parts of the exposed and hidden ones
    seconds_encoding: float = 0.0
    seconds_landing: float = 0.0
    seconds_recovering: float = 0.0  # from losses, since the round before


@dataclass(eq=False)
class Meter:
    """The same figures, growing."""

    _figures: dict[str, Any] = field(default_factory=lambda: dict(vars(Stats())))
    _began: float = field(default_factory=time.perf_counter)

    def add(self, name: str, amount: float = 1) -> None:
        self._figures[name] += amount

    def add_exchanged(self, num_bytes: int) -> None:
        """Count bytes that were sent, and as many that came."""
        self.add("bytes_sent", num_bytes)
        self.add("bytes_received", num_bytes)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that a block takes to `seconds_<name>`, also when it ends with an error."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._figures[f"seconds_{name}"] += time.perf_counter() - start

    def absorb(self, other: Meter) -> None:
        for name, amount in other._figures.items():
            self._figures[name] += amount

    def note(self, this: Round, rank: int) -> None:
        self.add("dropped_rounds" if this.dropped else "rounds")
        self.add("replicas_lost", len(this.lost))
        self.add("replicas_joined", len(this.joined))
        self._figures["weight"] = this.weights[rank] if this.weights else 0.0
        if not this.dropped:
            self._figures |= {"drift_norm": this.norms[rank], "cosine": this.cosine}
            self._figures["first_drift_norm"] = self._figures["first_drift_norm"] or this.norms[rank]

    def stats(self) -> Stats:
        now = Stats(**self._figures)
        return replace(now, seconds_total=now.seconds_total + time.perf_counter() - self._began)

    def load(self, stats: dict[str, Any]) -> None:
        """Continue from the figures that `asdict(stats())` gave."""
        self._figures = {each.name: stats.get(each.name, each.default) for each in fields(Stats)}
        self._began = time.perf_counter()

    def advice(self, by_flags: bool, is_fixed: bool, is_auto: bool = False) -> str:
        """Return a sentence or two of advice for this run, in flags or in keywords; empty when all is well.

        Args:
            is_auto: the recipe was chosen, and its options can't be set.
            is_fixed: the ranks have as many steps each, so rounds by time would leave the last ones to the slowest.
        """

        def option(name: str, value: str = "") -> str:
            return f"--outer-{name}{value and ' '}{value}" if by_flags else f"{name}={value}"

        now, said = self.stats(), []
        if now.rounds and not now.bytes_sent and not is_fixed:
            said.append(
                f"warning: 0 B were sent in {counted(now.rounds, 'round')}: no other replica took part in any, so this "
                "one has trained alone, and its weights are its own."
            )
        if now.rounds and now.waiting > 0.1:
            voting = min(1.0, now.seconds_voting / max(now.seconds_exposed, 1e-9))
            share = f"Training spent {now.waiting:.0%} of the time waiting for rounds, "
            share += f"{voting:.0%} of that for slower ranks: "
            if voting > 0.5:  # fewer bytes or rounds would leave the slow ones as slow as they are
                as_it_is = is_fixed or is_auto
                seconds = option("seconds", f"{now.seconds_total / now.rounds:.2g}")
                by_time = f"--outer diloco {seconds}" if by_flags else f"diloco({seconds})"
                share += "" if as_it_is else f"start rounds by time ({by_time}), so that each makes as many steps as "
                said.append(f"{share}{'' if as_it_is else 'it can, or '}give slower ranks less work per step.")
            elif not is_auto:
                overlaps = "--outer streaming_diloco" if by_flags else "streaming_diloco"
                share += f"synchronize less often ({option('every')}), send fewer bits ({option('codec')}), or let "
                said.append(f"{share}rounds overlap with training ({overlaps}).")
        if not is_auto and now.first_drift_norm and now.drift_norm > 4 * now.first_drift_norm:
            said.append(
                f"Replicas moved {now.drift_norm / now.first_drift_norm:.1f} times as far from the anchor in the "
                f"latest round as in the first one: synchronize more often ({option('every')}), or lower the learning "
                "rate."
            )
        return " ".join(said)
