# SPDX-License-Identifier: Apache-2.0
"""The buckets of a round on their way: a few are on the wire at a time, and they land in their order."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farflung.comm.group import Group
from farflung.exchanged.bound import BoundFragment
from farflung.methods.agreement import Averaged, NewParameters, Payload, Pending
from farflung.methods.weighting import Decision
from farflung.outer.stats import Meter
from farflung.votes.ballot import Island

if TYPE_CHECKING:
    from farflung.methods.aggregate import Lengths

_AHEAD = 2  # buckets on the wire at a time
COMING = "coming"  # parameters that are exchanged for the first time


@dataclass
class Bucket:
    """One bucket of one kind of values."""

    agreement: Averaged  # of whose values
    kind: str  # as in `BoundFragment.agreements`, or `COMING`
    k: int
    weight: float  # this rank's
    payload: Payload = field(init=False)  # once it is encoded
    pending: Pending = field(init=False)  # once it is sent
    result: Tensor = field(init=False)  # `[n]`, the sum over the ranks, once it has arrived
    divisor: float = field(init=False)  # that makes it the aggregate


class Pipeline:
    """The buckets of one fragment in one round.

    Attributes:
        under_way: on the wire.
        arrived: in the buffers, and not in the model yet.
        num_arrived, num_landed: how many there were, those of tries before among them.
        of_buffers, of_others: how much each rank counts, which no bucket needs before it has arrived.
        mean_square: the squared norm of a radial mean before it was lengthened.
    """

    def __init__(self, fragment: BoundFragment, group: Group, number: int, meter: Meter) -> None:
        self._fragment, self._group, self._number, self.meter = fragment, group, number, meter
        self._queue: deque[Bucket] = deque()
        self._encoded: dict[int, Payload] = {}  # of the weights, before the vote
        self._squares: list[Tensor] = []  # of the weights' aggregate here, by bucket
        self.of_buffers = self.of_others = Decision((), 0.0)
        self.under_way: deque[Bucket] = deque()
        self.arrived: deque[Bucket] = deque()
        self.num_arrived = self.num_landed = fragment.num_landed
        self._lengths: Lengths | None = None
        if group.size > 1:
            embeddings = [place.is_embedding for place in fragment.cut.parameters]
            self._lengths = fragment.weights.aggregator.lengths(fragment.weights.buckets, embeddings)
        self.mean_square: float | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.under_way or self._queue)

    @property
    def square(self) -> float:
        """The squared norm of the weights that have arrived here."""
        return float(torch.stack(self._squares).sum()) if self._squares else 0.0

    def encode_weights(self) -> float:
        """Encode all weights; return the norm of the values that the other ranks will decode."""
        weights, total = self._fragment.weights, 0.0
        for k in range(len(weights.buckets)):
            payload = self._encoded[k] = weights.prepare(k, self._group)
            assert payload.wire is not None
            sent = weights.sent(payload)
            total += float(weights.buckets.square(k, sent))
        return math.sqrt(total)

    def send(self, weight: float, of_buffers: float) -> None:
        """Queue all buckets, to count by these weights; with one rank only those that an outer optimizer waits for."""
        mine = {"weights": weight, "buffers": of_buffers, "counters": 1.0}
        for kind, agreement in self._fragment.agreements.items():
            if self._group.size > 1 or agreement.is_anchored:
                self._queue.extend(Bucket(agreement, kind, k, mine[kind]) for k in range(len(agreement.buckets)))
        for _ in range(min(self._fragment.num_landed, len(self._queue))):
            self._queue.popleft()
        self.fill()

    def extend(self, coming: NewParameters, weight: float) -> None:
        """Queue parameters that are exchanged for the first time, after all others."""
        self._queue.extend(Bucket(coming, COMING, k, weight) for k in range(len(coming.buckets)))
        self.fill()

    def fill(self) -> None:
        """Send as many buckets as may be on the wire."""
        while self._queue and len(self.under_way) < _AHEAD:
            with self.meter.timed("encoding"):
                bucket = self._queue.popleft()
                agreement = bucket.agreement
                encoded = self._encoded.pop(bucket.k, None) if bucket.kind == "weights" else None
                encoded = encoded or agreement.prepare(bucket.k, self._group)
                bucket.payload = replace(encoded, weight=bucket.weight)
                if self._lengths is not None and bucket.kind == "weights":
                    self._lengths.note_sent(bucket.k, agreement.sent(bucket.payload))
                start, codec = agreement.aggregator.start, agreement.codec
                bucket.pending = start(bucket.payload, codec, self._group, self._number)
            self.under_way.append(bucket)
            self.meter.add_exchanged(bucket.pending.num_bytes)

    def receive(self) -> None:
        """Wait for the next bucket."""
        bucket = self.under_way[0]
        decision = self.of_buffers if bucket.kind == "buffers" else self.of_others
        bucket.result, bucket.divisor = bucket.pending.wait(decision)
        self.under_way.popleft()  # not before: what never arrives stays under way
        if bucket.divisor:  # else no rank has floating buffers that can be used, and each keeps its own
            self._take(bucket)

    def discard(self) -> None:
        """Wait for the buckets that were sent early, and discard them."""
        self._queue.clear()
        while self.under_way:
            self.under_way.popleft().pending.work.wait()

    def _take(self, bucket: Bucket) -> None:
        self.arrived.append(bucket)
        self.num_arrived += 1
        if bucket.kind == "weights" and self._fragment.weights.is_anchored:
            self._squares.append(self._square_of(bucket))
            if self._lengths is not None:
                self._lengths.note_mean(bucket.k, bucket.result, bucket.divisor)

    def lengthen(self, island: Island, decision: Decision) -> None:
        """Give the mean the length that `RadialMean` defines: a collective."""
        lengths = self._lengths
        if lengths is None or sum(map(bool, decision.factors)) == 1:  # whose values have their length already
            return
        self.mean_square = lengths.agree(self._group, island, decision)
        self.meter.add("bytes_voting", (self._group.size - 1) * lengths.num_bytes)
        for bucket in self._weights():
            lengths.lengthen(bucket.k, bucket.result)
        self._squares, self._lengths = [self._square_of(bucket) for bucket in self._weights()], None

    def scale(self, factor: float) -> None:
        for bucket in self._weights():
            bucket.result.mul_(factor)

    def _square_of(self, bucket: Bucket) -> Tensor:
        """Return this rank's part of the squared norm of an aggregate."""
        return self._fragment.weights.buckets.square(bucket.k, bucket.result) / bucket.divisor**2

    def _weights(self) -> Sequence[Bucket]:
        return [bucket for bucket in self.arrived if bucket.kind == "weights"]

    def land(self, until: float = math.inf) -> None:
        """Apply the buckets that have arrived to the model, up to so many of this round."""
        while self.arrived and self.num_landed < until:
            bucket = self.arrived.popleft()
            agreement = bucket.agreement
            if bucket.result.is_cuda:  # a worker's stream, which may have made it, must not use its memory too early
                bucket.result.record_stream(torch.cuda.current_stream(bucket.result.device))
            agreement.apply(bucket.k, bucket.payload, bucket.result, bucket.divisor)
            self.num_landed += 1

    def state_dict(self) -> list[tuple[Any, ...]]:
        """Return copies of the buckets that have arrived."""
        found = []
        for one in self.arrived:
            values = one.agreement.before[one.k] if isinstance(one.agreement, NewParameters) else one.payload.values
            found.append((one.kind, one.k, one.payload.weight, values.clone(), one.result.clone(), one.divisor))
        return found

    def load_state_dict(
        self, state: list[tuple[Any, ...]], mean_square: float | None, coming: NewParameters | None = None
    ) -> None:
        self.mean_square, self._lengths = mean_square, None
        for kind, k, weight, values, result, divisor in state:
            agreement = coming if coming is not None and kind == COMING else self._fragment.agreements[kind]
            bucket = Bucket(agreement, kind, k, weight)
            flat = agreement.buckets.flat(k).copy_(values)
            if isinstance(agreement, NewParameters):
                agreement.before[k] = flat.clone()
            bucket.result, bucket.divisor = result.to(flat.device), divisor
            bucket.payload = Payload(flat, None, bucket.result, weight)
            self._take(bucket)
