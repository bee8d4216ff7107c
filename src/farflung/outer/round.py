# SPDX-License-Identifier: Apache-2.0
"""Rounds: a vote, an exchange, and then all of it is applied or nothing.

Bucket after bucket is copied while others are on the wire, and the first ones travel beside the votes: a rank scales
what it sends by its own weight, and all divide by the sum of weights that the votes bring. A bucket is applied only
when every rank is known to have received it, so ranks that survive another one's death in the middle of a round have
moved the same buckets. Where replicas are islands of several ranks, each bucket waits for all of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from farflung.base.errors import CollectiveMismatch, StateError
from farflung.outer.aggregate import Lengths
from farflung.outer.agreement import Payload, Pending
from farflung.outer.background import Job
from farflung.outer.ballot import BALLOT_BYTES, Ballot, Tally, odd_among
from farflung.outer.membership import ALL, Generation, OddMembers
from farflung.outer.recipe import Recipe
from farflung.outer.replica import BoundFragment
from farflung.outer.schedule import Launch
from farflung.outer.stats import Meter, Round
from farflung.outer.weighting import Decision, in_proportion

_AHEAD = 2  # buckets on the wire at a time
_LAG = 2  # of two buckets that follow each other so, the second is sent only after the first has arrived


@dataclass(frozen=True)
class Request:
    """What was asked of a round: enough to open it again, in another generation."""

    action: Launch
    position: int  # this rank's, when the fragment was sent off
    finished: bool = False  # this rank has no more data
    is_empty: bool = False  # it brings nothing but a ballot
    is_saved: bool = False  # it comes out of a checkpoint, with all that has arrived


class OpenRound:
    """A round of one fragment that has not been applied yet.

    Args:
        generation: who takes part.
        ballot: of this rank; of its island, once that has met.
        claimed: what was done since the last round, by level.

    Attributes:
        group: those who meet in it.
    """

    def __init__(
        self,
        fragment: BoundFragment,
        generation: Generation,
        recipe: Recipe,
        ballot: Ballot,
        request: Request,
        claimed: list[float],
    ) -> None:
        self.ballot, self.request, self.level = ballot, request, request.action.level
        self._claimed = claimed
        self.job: Job | None = None
        self.has_begun = request.is_saved
        self.meter = Meter()
        self.tally: Tally | None = None
        self.decision = self._of_buffers = Decision((), 0.0)
        self._fragment = fragment
        self._voters, self._members = generation.levels[self.level], generation.ids
        self._island, self._may_lose = generation.in_round, generation.may_lose
        self.group = self._voters.group
        self._lengths: Lengths | None = None  # and none again once they were used
        if recipe.is_radial and self.group.size > 1:
            embeddings = [place.is_embedding for place in fragment.cut.parameters]
            self._lengths = Lengths(fragment.weights.buckets, embeddings)
        self._recipe = recipe
        self._votes_first = recipe.votes_first or self.group.size == 1
        self._is_sent = False
        self._encoded: dict[int, Payload] = {}  # of the weights, before the vote
        self._squares: list[Tensor] = []  # of the weights' aggregate here, by bucket
        self._square: float | None = None  # of the whole island's
        self._mean_square: float | None = None  # the same before it was lengthened
        self._queue: deque[tuple[str, int, float]] = deque()  # kind of values, bucket, this rank's weight
        self._under_way: deque[tuple[str, int, Payload, Pending]] = deque()
        self._arrived: deque[tuple[str, int, Payload, Tensor, float]] = deque()
        self._num_arrived = self._num_applied = fragment.num_landed  # in a try of this round before
        self._is_confirmed = False

    @property
    def is_dropped(self) -> bool:
        """Whether nothing may be made of it, as some rank's values were unfit."""
        return bool(self.decision.unfit)

    @property
    def is_empty(self) -> bool:
        """Whether nobody had anything to bring."""
        return not self.is_dropped and self.decision.total == 0

    @property
    def norm(self) -> float:
        """The norm of what the replicas agreed to move by; 0 where weights have no anchor."""
        return math.sqrt(self._square_here() if self._square is None else self._square)

    def start(self) -> None:
        """Vote, and send the first buckets off.

        They go beside the votes, unless these decide what to send. A rank that has no more data hears first whether the
        others still have some, and then sends what they expect.
        """
        if self._recipe.policy.norm == "sent":
            self._encode_all()
        with self.meter.timed("voting"):
            self.ballot = self._island.ballot(self.ballot)
            votes = self._voters.begin(self.ballot)
        self.meter.add("bytes_voting", (self.group.size - 1) * BALLOT_BYTES)
        if not self._votes_first and not self.ballot.finished:
            self._send(self.ballot.weight, self.ballot.weight * self.ballot.sound)
        with self.meter.timed("voting"):
            self.tally = votes()
        if not self._votes_first and not self.tally.finished and not self._is_sent:
            self._send(self.ballot.weight, self.ballot.weight * self.ballot.sound)
        self.decision = self._decide(self.tally)
        if self.is_dropped or self.is_empty:
            self._queue.clear()
            while self._under_way:  # buckets that were sent early
                self._under_way.popleft()[3].work.wait()
        elif not self._is_sent:
            rank = self.group.rank
            self._send(self.decision.factors[rank], self._of_buffers.factors[rank])
        self._check_agreement(self.tally.digests)

    def _check_agreement(self, digests: tuple[int, ...]) -> None:
        """Compare what all have agreed on before; where others can go on without the odd ones, say who these are."""
        try:
            self._fragment.check_agreement(digests, self._voters)
        except CollectiveMismatch as error:
            if not self._may_lose:
                raise
            why = str(error).partition(". ")[0]
            raise OddMembers({self._members[rank]: why for rank in odd_among(digests)}) from None

    def wait(self) -> None:
        """Wait for all buckets, and for every rank to have all of them. The model is not touched.

        In a grid of islands that takes two steps: first those that have the same values tell each other, then those of
        an island. A rank that has heard from its island's last rank has heard from all.
        """
        while self._under_way:
            self._receive()
            self._fill()
        if self._is_confirmed or self.is_dropped or self.is_empty:
            return
        self._lengthen()
        if self._changes_norm:  # whoever has to apply it without the others must know the norm before anyone applies
            (self._square,) = self._island.squares([self._square_here()])
        if self._arrived and self.group.size > (1 if self._may_lose or self._island.size > 1 else 2):
            mark = torch.zeros(1)
            self.group.all_gather_small(mark)
            self.meter.add("bytes_voting", (self.group.size - 1) * mark.nbytes)
        if self._island.size > 1:
            (self._square,) = self._island.squares([self._square_here()])
        self._is_confirmed = True

    def apply(self) -> None:
        """Bring everything into the model."""
        with self.meter.timed("landing"):
            while self._under_way and not self._fragment.is_whole:
                self._receive()
                # Where one of two ranks dies the other one has nobody to differ from; one that is late lives.
                if (self.group.size == 2 and not self._may_lose) or len(self._arrived) > _LAG:
                    self._apply_one()
                self._fill()
            self.wait()
            self._clip()
            while self._arrived:
                self._apply_one()
            self._fragment.num_landed = 0

    def give_back(self) -> None:
        """Nothing comes of it: what was done counts as not sent. (An eager anchor has moved by it already.)"""
        if not self._recipe.eager:
            self._fragment.give_back(self._claimed)

    @property
    def num_complete(self) -> int:
        """How many buckets could be applied, if others have them too: of a whole fragment all or none."""
        if self.tally is not None and (self.is_dropped or self.is_empty):
            return ALL
        has_all = self.tally is not None and self._is_sent and not (self._under_way or self._queue)
        if has_all and (self._square is not None or not self._changes_norm):
            return ALL
        return 0 if self._fragment.is_whole or self._recipe.eager else self._num_arrived

    def abort(self, common: int) -> bool:
        """End in the same state as all others that are left, as ranks were lost.

        Args:
            common: how many buckets all of them apply.

        Returns:
            whether it has come to its end with that. Otherwise what was done counts as not sent, and the buckets that
            were applied are left out when it is tried again.

        Raises:
            StateError: this rank doesn't have so many.
        """
        if self.num_complete == common == ALL:
            if self.is_dropped:
                self.give_back()
            elif not self.is_empty:
                with torch.no_grad():
                    self._clip()
                    while self._arrived:
                        self._apply_one()
            self._fragment.num_landed = 0
            return True
        if common > self.num_complete:
            raise StateError(f"Others have applied {common} buckets of a round, of which {self.num_complete} are here.")
        with torch.no_grad():
            while self._arrived and self._num_applied < common:
                self._apply_one()
        self.give_back()
        self._fragment.num_landed = self._num_applied
        return False

    def state_dict(self) -> dict[str, Any]:
        return {
            "ballot": _kept(self.ballot),
            "step": self.request.position,
            "level": self.level,
            "claimed_weight": list(self._claimed),
            "tally": None if self.tally is None else _kept(self.tally),
            "decision": asdict(self.decision),
            "square": self._square,
            "stats": replace(self.meter.stats(), seconds_total=0.0).saved(),
            "arrived": [
                (kind, k, payload.weight, payload.values.clone(), result.clone(), divisor)
                for kind, k, payload, result, divisor in self._arrived
            ],
            **({} if self._mean_square is None else {"mean_square": self._mean_square}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.decision = Decision(**state["decision"])
        self.tally = None if state["tally"] is None else Tally(**state["tally"])
        self.meter.load(state["stats"])
        self._square, self._mean_square = state.get("square"), state.get("mean_square")
        self._lengths = None
        for kind, k, weight, values, result, divisor in state["arrived"]:
            flat = self._fragment.agreements[kind].buckets.flat(k).copy_(values)
            result = result.to(flat.device)
            self._take(kind, k, Payload(flat, None, result, weight), result, divisor)
        self._is_confirmed = True

    @property
    def hidden_s(self) -> float:
        """How many seconds it took beside training."""
        return 0.0 if self.job is None else max(0.0, self.job.seconds - self.job.waited)

    def record(self, number: int, lost: Mapping[int, str], joined: tuple[int, ...]) -> Round:
        """Say what happened in it."""
        assert self.tally is not None
        decision, stats = self.decision, self.meter.stats()
        busy = stats.seconds_voting + stats.seconds_encoding + stats.seconds_landing
        return Round(
            number=self.ballot.number,
            members=self._members,
            step=self.request.position,
            fragment=number,
            dropped=self.is_dropped,
            weights=tuple(factor / decision.total for factor in decision.factors) if decision.total else (),
            norms=self.tally.norms,
            norm=self.norm,
            cosine=self._cosine(self.tally.norms),
            bytes_sent=stats.bytes_sent,
            bytes_received=stats.bytes_received,
            seconds_exposed=busy if self.job is None else self.job.waited,
            seconds_hidden=self.hidden_s,
            lost=lost,
            joined=joined,
        )

    def _decide(self, tally: Tally) -> Decision:
        decision = self._recipe.policy(tally.weights, tally.norms, self._fragment.history)
        self._of_buffers = in_proportion(tally.sound_weights)
        if self._is_sent:  # before weights could be compared
            decision = replace(decision, factors=tally.weights, total=sum(tally.weights))
            self._of_buffers = Decision(tally.sound_weights, sum(tally.sound_weights))
        too_large = tally.too_large(decision.factors, self._recipe.codec.limit)
        return replace(decision, unfit=too_large) if too_large and not decision.unfit else decision

    def _encode_all(self) -> None:
        """Encode all weights, and put the norm of what the other ranks will decode into the ballot."""
        weights, total = self._fragment.weights, 0.0
        if math.isfinite(self.ballot.norm):
            with self.meter.timed("encoding"):
                for k in range(len(weights.buckets)):
                    payload = self._encoded[k] = weights.prepare(k, self.group)
                    assert payload.wire is not None
                    sent = weights.sent(payload)
                    total += float(torch.dot(sent, sent))
            self.ballot = replace(self.ballot, norm=math.sqrt(total))

    def _send(self, weight: float, of_buffers: float) -> None:
        """Queue all buckets, to count by these weights; alone only those that an outer optimizer waits for."""
        self._is_sent = True
        mine = {"weights": weight, "buffers": of_buffers, "counters": 1.0}
        for kind, agreement in self._fragment.agreements.items():
            if self.group.size > 1 or agreement.is_anchored:
                self._queue.extend((kind, k, mine[kind]) for k in range(len(agreement.buckets)))
        for _ in range(min(self._fragment.num_landed, len(self._queue))):
            self._queue.popleft()
        self._fill()

    def _fill(self) -> None:
        while self._queue and len(self._under_way) < _AHEAD:
            with self.meter.timed("encoding"):
                kind, k, weight = self._queue.popleft()
                agreement = self._fragment.agreements[kind]
                payload = self._encoded.pop(k, None) if kind == "weights" else None
                payload = replace(payload or agreement.prepare(k, self.group), weight=weight)
                if self._lengths is not None and kind == "weights":
                    self._lengths.note_sent(k, agreement.sent(payload))
                pending = agreement.aggregator.start(payload, agreement.codec, self.group, self.ballot.number)
            self._under_way.append((kind, k, payload, pending))
            self.meter.add_exchanged(pending.num_bytes)

    def _receive(self) -> None:
        kind, k, payload, pending = self._under_way[0]
        result, divisor = pending.wait(self._of_buffers if kind == "buffers" else self.decision)
        self._under_way.popleft()  # not before: what never arrives stays under way
        if divisor:  # else no rank has floating buffers that can be used, and each keeps its own
            self._take(kind, k, payload, result, divisor)

    def _take(self, kind: str, k: int, payload: Payload, result: Tensor, divisor: float) -> None:
        self._arrived.append((kind, k, payload, result, divisor))
        self._num_arrived += 1
        if kind == "weights" and self._fragment.weights.is_anchored:
            self._squares.append(torch.dot(result, result) / divisor**2)
            if self._lengths is not None:
                self._lengths.note_mean(k, result, divisor)

    def _lengthen(self) -> None:
        """Give the mean the length that `RadialMean` wants: a collective."""
        lengths, contributors = self._lengths, sum(map(bool, self.decision.factors))
        if lengths is None or contributors == 1:  # whose values have their length already
            return
        self._mean_square = lengths.agree(self.group, self._island, self.decision)
        self.meter.add("bytes_voting", (self.group.size - 1) * lengths.num_bytes)
        self._squares.clear()
        for kind, k, _, result, divisor in self._arrived:
            if kind == "weights":
                lengths.lengthen(k, result)
                self._squares.append(torch.dot(result, result) / divisor**2)
        self._lengths = None

    def _apply_one(self) -> None:
        kind, k, payload, result, divisor = self._arrived.popleft()
        self._fragment.agreements[kind].apply(k, payload, result, divisor)
        self._num_applied += 1

    @property
    def _changes_norm(self) -> bool:
        return self._recipe.is_radial or self._recipe.policy.max_norm < math.inf

    def _square_here(self) -> float:
        return float(torch.stack(self._squares).sum()) if self._squares else 0.0

    def _clip(self) -> None:
        max_norm = self._recipe.policy.max_norm
        if max_norm < math.inf and self.norm > max_norm:
            for kind, _, _, result, _ in self._arrived:
                if kind == "weights":
                    result.mul_(max_norm / self.norm)

    def _cosine(self, norms: tuple[float, ...]) -> float:
        """From |sum f_i d_i|^2 = sum f_i^2 |d_i|^2 + the products of different replicas."""
        norm = self.norm if self._mean_square is None else math.sqrt(self._mean_square)
        ways = [factor * norm for factor, norm in zip(self.decision.factors, norms, strict=True) if factor]
        squares = sum(way * way for way in ways)
        between = sum(ways) ** 2 - squares
        return ((norm * self.decision.total) ** 2 - squares) / between if between > 0 else 0.0


def _kept(said: Ballot | Tally) -> dict[str, Any]:
    """Return the fields that a checkpoint keeps: all but those that are of this run alone."""
    return {name: value for name, value in asdict(said).items() if name not in ("awaited", "mark", "marks")}
