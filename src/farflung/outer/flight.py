# SPDX-License-Identifier: Apache-2.0
"""One round of one fragment: the vote, the exchange, the landing.

Bucket after bucket is copied while others are on the wire. A bucket lands only when every rank is known to have
received it, so ranks that survive another one's death in the middle of a round have moved the same buckets.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from farflung.comm.group import Group
from farflung.outer.aggregate import Mean, Parcel, Pending, Shares
from farflung.outer.codec.base import Identity
from farflung.outer.lanes import Anchored, Averaged, Highest, Lane
from farflung.outer.membership import BALLOT_BYTES, BALLOT_SIZE, Ballot, Static, Tally
from farflung.outer.weigh import Memory, Rule, Verdict

_AHEAD = 2  # buckets on the wire at a time
_LAG = 2  # of two buckets that follow each other so, the second is sent only after the first has arrived


@dataclass
class Costs:
    """Bytes and seconds of a flight."""

    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_voting: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"voting": 0.0, "encoding": 0.0, "landing": 0.0})

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that a block takes, also when it ends with an error."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


@dataclass(frozen=True)
class Cargo:
    """What of a fragment can travel.

    Args:
        is_whole: the buffers hold all buckets at a time, and are loaded before the flight begins.
        votes_first: nothing is sent before the votes are in.
    """

    weights: Averaged | Anchored
    buffers: Averaged
    counters: Highest
    is_whole: bool
    votes_first: bool


class Flight:
    """A fragment under way.

    Args:
        ballot: of this rank.
        is_loaded: the first buckets of the weights and the floating buffers are in their buffers.
        is_idle: there is nothing to exchange, with nobody; only the vote is gone through.
    """

    def __init__(
        self, cargo: Cargo, members: Static, ballot: Ballot, rule: Rule, memory: Memory, is_loaded: bool, is_idle: bool
    ) -> None:
        self.ballot = ballot
        self._is_idle = is_idle
        self.tally: Tally | None = None
        self.verdict = Verdict((), 0.0)
        self.costs = Costs()
        self._cargo = cargo
        self._members = members
        self._group: Group = members.group
        self._rule = rule
        self._memory = memory
        self._is_loaded = is_loaded
        self._parcels: dict[int, Parcel] = {}  # of the weights, encoded before the vote
        self._squares: list[Tensor] = []  # of the weights' aggregate, by bucket
        self._coming: deque[tuple[Lane, int, Shares]] = deque()
        self._flying: deque[tuple[Lane, int, Parcel, Pending]] = deque()
        self._arrived: deque[tuple[Lane, int, Parcel, Tensor, float]] = deque()
        self._num_arrived = self._num_landed = 0
        self._is_confirmed = False

    @property
    def is_dropped(self) -> bool:
        """Whether nothing may be made of it, as some rank's values were unfit."""
        return bool(self.verdict.unfit)

    @property
    def is_empty(self) -> bool:
        """Whether nobody had anything to bring."""
        return not self.is_dropped and self.verdict.total == 0

    @property
    def has_cargo(self) -> bool:
        """Whether there is something to land."""
        return bool(self._coming or self._flying or self._arrived)

    @property
    def shares(self) -> Shares:
        """How each rank counts, once the votes are in."""
        return Shares(self.verdict.factors, self.verdict.total, self._group.rank, self.ballot.number)

    @property
    def norm(self) -> float:
        """The norm of what the replicas agreed to move by; 0 where weights have no anchor."""
        return math.sqrt(float(torch.stack(self._squares).sum())) if self._squares else 0.0

    def depart(self) -> None:
        """Vote, and send the first buckets off.

        Where all ranks are likely to count alike some are sent before the votes are in. If they can be summed as they
        are, the votes even ride in the first of them, which saves a round trip.
        """
        if self._rule.norm == "sent":
            self.ballot = self._encode_all()
        is_guessed = self._vote()
        assert self.tally is not None
        self.verdict = self._judge(self.tally)
        if is_guessed and (self.is_dropped or not self.shares.is_plain):
            is_guessed = False
            self._recall()
        if self.is_dropped or self.is_empty or self._is_idle:
            return
        shares = self.shares
        if not is_guessed:
            self._coming.extend(self._route(self._cargo.weights, shares))
        if self._group.size > 1:
            factors, total = self.tally.of_buffers()
            if total:
                of_buffers = Shares(factors, total, self._group.rank, self.ballot.number)
                self._coming.extend(self._route(self._cargo.buffers, of_buffers))
            self._coming.extend(self._route(self._cargo.counters, shares))
        self._fill()

    def arrive(self) -> None:
        """Wait for all buckets, and for every rank to have all of them. The model is not touched."""
        while self._flying:
            self._receive()
            self._fill()
        self._confirm()

    def land(self) -> None:
        """Bring everything into the model.

        Raises:
            RankFailure: a rank left or died.
        """
        with self.costs.timed("landing"):
            while self._flying and not self._cargo.is_whole:
                self._receive()
                # Where one of two ranks dies the other one has nobody to differ from.
                if self._group.size == 2 or len(self._arrived) > _LAG:
                    self._land_one()
                self._fill()
            self.arrive()
            self._clip()
            while self._arrived:
                self._land_one()

    def land_what_all_have(self) -> bool:
        """After a failure: agree with those that live on how many buckets land; return whether any has."""
        all_or_nothing = self._cargo.is_whole and (self._flying or self._coming)
        complete = 0 if all_or_nothing else self._num_arrived
        least = self._group.least(complete, f"flight {self.ballot.number}")
        if least:
            self._clip()
        while self._arrived and self._num_landed < least:
            self._land_one()
        return self._num_landed > 0

    def state_dict(self) -> dict[str, Any]:
        """Return what has arrived, as copies."""
        return {
            "ballot": asdict(self.ballot),
            "tally": None if self.tally is None else asdict(self.tally),
            "verdict": asdict(self.verdict),
            "costs": asdict(self.costs),
            "arrived": [
                (self._name(lane), k, parcel.counts, parcel.values.clone(), result.clone(), divisor)
                for lane, k, parcel, result, divisor in self._arrived
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned: a flight that has arrived."""
        self.ballot, self.verdict = Ballot(**state["ballot"]), Verdict(**state["verdict"])
        self.tally = None if state["tally"] is None else Tally(**state["tally"])
        self.costs = Costs(**state["costs"])
        for name, k, counts, values, result, divisor in state["arrived"]:
            lane: Lane = getattr(self._cargo, name)
            values, result = lane.buckets.flat(k).copy_(values), result.to(values.device)
            self._take(lane, k, Parcel(values, None, result, counts), result, divisor)
        self._is_confirmed = True

    def results(self) -> list[tuple[Tensor, float]]:
        """Return what has arrived of the weights with its divisors, and forget it."""
        mine = [(result, divisor) for lane, _, _, result, divisor in self._arrived if lane is self._cargo.weights]
        self._arrived = deque(bucket for bucket in self._arrived if bucket[0] is not self._cargo.weights)
        return mine

    def _name(self, lane: Lane) -> str:
        return next(name for name in ("weights", "buffers", "counters") if getattr(self._cargo, name) is lane)

    def _route(self, lane: Lane, shares: Shares) -> list[tuple[Lane, int, Shares]]:
        return [(lane, k, shares) for k in range(len(lane.buckets))]

    def _vote(self) -> bool:
        """Learn what all ranks say; return whether buckets of the weights have been sent that all count alike in."""
        size = self._group.size
        guess = Shares((1.0,) * size, float(size), self._group.rank, self.ballot.number)
        if self._cargo.votes_first or size == 1:
            self._tell()()
            return False
        if self._can_ride:
            ride = self._ride()
            self._coming.extend(self._route(self._cargo.weights, guess)[1:])
            self._fill()
            with self.costs.timed("voting"):
                ride.work.wait()
                self.tally = self._members.count(self._rows(), self.ballot)
            return True
        votes = self._tell()
        if not self.ballot.finished:
            self._send_ahead(guess)
        votes()
        assert self.tally is not None
        if self.ballot.finished and not self.tally.finished:  # others have sent, who couldn't know
            self._send_ahead(guess)
        return not self.tally.finished

    def _tell(self) -> Callable[[], None]:
        """Begin the vote; what is returned ends it."""
        with self.costs.timed("voting"):
            votes = self._members.begin(self.ballot)
        self.costs.bytes_voting += (self._group.size - 1) * BALLOT_BYTES

        def end() -> None:
            with self.costs.timed("voting"):
                self.tally = votes()

        return end

    @property
    def _can_ride(self) -> bool:
        lane = self._cargo.weights
        plain = isinstance(lane.codec, Identity) and isinstance(lane.aggregator, Mean)
        return plain and len(lane.buckets) > 0 and lane.buckets.flat(0).is_cpu

    def _rows(self) -> Tensor:
        """Return the room for ballots behind the first bucket, a row for each rank."""
        size, lane = self._group.size, self._cargo.weights
        return lane.buckets.with_tail()[lane.buckets.sizes[0] :][: size * BALLOT_SIZE].view(size, BALLOT_SIZE)

    def _ride(self) -> Pending:
        """Send the first bucket of the weights off, with the ballots behind it: each rank adds its row to zeros."""
        lane, size = self._cargo.weights, self._group.size
        with self.costs.timed("encoding"):
            if not self._is_ready(lane, 0):
                lane.load(0)
            x, rows = lane.buckets.flat(0), self._rows()
            rows.zero_()
            rows[self._group.rank] = torch.tensor(self._members.row(self.ballot))
            work = self._group.all_reduce(lane.buckets.with_tail()[: x.numel() + rows.numel()])
        hops = 2 * (size - 1) / size
        pending = Pending(work, lambda: x, float(size), int(hops * x.nbytes), int(hops * x.nbytes))
        self._flying.append((lane, 0, Parcel(x, None, x), pending))
        self._count(pending)
        self.costs.bytes_voting += int(hops * rows.nbytes)
        return pending

    def _count(self, pending: Pending) -> None:
        self.costs.bytes_sent += pending.bytes_sent
        self.costs.bytes_received += pending.bytes_received

    def _judge(self, tally: Tally) -> Verdict:
        verdict = self._rule(tally.weights, tally.norms, self._memory)
        too_large = tally.too_large(verdict.factors, self._cargo.weights.codec.limit)
        return Verdict(verdict.factors, verdict.total, too_large) if too_large and not verdict.unfit else verdict

    def _encode_all(self) -> Ballot:
        """Encode all weights, and say in the ballot how long that is which the others will decode."""
        lane, total = self._cargo.weights, 0.0
        if math.isfinite(self.ballot.norm):
            with self.costs.timed("encoding"):
                for k in range(len(lane.buckets)):
                    parcel = self._parcels[k] = lane.prepare(k, self._group)
                    assert parcel.wire is not None
                    sent = lane.codec.decode(parcel.wire, torch.empty_like(parcel.values))
                    total += float(torch.dot(sent, sent))
            return replace(self.ballot, norm=math.sqrt(total))
        return self.ballot

    def _fill(self) -> None:
        while self._coming and len(self._flying) < _AHEAD:
            with self.costs.timed("encoding"):
                lane, k, shares = self._coming.popleft()
                parcel = self._parcels.pop(k, None) if lane is self._cargo.weights else None
                if parcel is None:
                    if not self._is_ready(lane, k):
                        lane.load(k)
                    parcel = lane.prepare(k, self._group)
                if not shares.mine:
                    parcel = replace(parcel, counts=False)
                pending = lane.aggregator.start(parcel, lane.codec, self._group, shares)
            self._flying.append((lane, k, parcel, pending))
            self._count(pending)

    def _send_ahead(self, guess: Shares) -> None:
        self._coming.extend(self._route(self._cargo.weights, guess))
        self._fill()

    def _is_ready(self, lane: Lane, k: int) -> bool:
        if self._cargo.is_whole:
            return True
        return self._is_loaded and not isinstance(lane, Highest) and k < lane.buckets.num_buffers

    def _recall(self) -> None:
        """Let come what was sent too early, and forget it."""
        self._coming.clear()
        while self._flying:
            self._flying.popleft()[3].work.wait()
        self._is_loaded = False

    def _receive(self) -> None:
        lane, k, parcel, pending = self._flying.popleft()
        self._take(lane, k, parcel, pending.wait(), pending.divisor)

    def _take(self, lane: Lane, k: int, parcel: Parcel, result: Tensor, divisor: float) -> None:
        self._arrived.append((lane, k, parcel, result, divisor))
        self._num_arrived += 1
        if isinstance(lane, Anchored):
            self._squares.append(torch.dot(result, result) / divisor**2)

    def _land_one(self) -> None:
        lane, k, parcel, result, divisor = self._arrived.popleft()
        lane.land(k, parcel, result, divisor)
        self._num_landed += 1

    def _confirm(self) -> None:
        """Wait until all ranks have received all buckets, unless all of those have landed or this is known."""
        if self._arrived and not self._is_confirmed and self._group.size > 2:
            mark = torch.zeros(1)
            self._group.meet(mark)
            self.costs.bytes_voting += (self._group.size - 1) * mark.nbytes
            self._is_confirmed = True

    def _clip(self) -> None:
        longest = self._rule.longest
        if self._cargo.is_whole and longest < math.inf and self.norm > longest:
            factor = longest / self.norm
            for lane, _, _, result, _ in self._arrived:
                if lane is self._cargo.weights:
                    result.mul_(factor)
