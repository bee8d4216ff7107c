# SPDX-License-Identifier: Apache-2.0
"""A fragment on its way: bucket after bucket, copied while others are on the wire."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from laconic.comm.bucket import Buckets
from laconic.comm.group import Group
from laconic.outer.aggregate import Aggregator, Pending, Share, highest
from laconic.outer.anchor import Anchor
from laconic.outer.codec.base import Codec
from laconic.outer.merge import Merge
from laconic.outer.report import Meter


class Lane(Protocol):
    """Buckets that are treated alike."""

    @property
    def buckets(self) -> Buckets: ...

    def load(self, k: int) -> Tensor:
        """Fill the buffer of bucket `k` with what this rank brings, and return it."""

    def start(self, k: int, group: Group, share: Share) -> Pending:
        """Send off the buffer of bucket `k`."""

    def land(self, k: int, result: Tensor, divisor: float) -> None:
        """Bring `result` / `divisor` into the model."""


@dataclass(frozen=True)
class Averaged:
    """local <- aggregate(local): the weights themselves, or floating buffers. Nothing is kept between rounds."""

    buckets: Buckets
    aggregator: Aggregator
    codec: Codec

    def load(self, k: int) -> Tensor:
        """Fill the buffer with local values."""
        return self.buckets.pack(k)

    def start(self, k: int, group: Group, share: Share) -> Pending:
        """Aggregate."""
        return self.aggregator.start(self.buckets.flat(k), self.codec, group, share)

    def land(self, k: int, result: Tensor, divisor: float) -> None:
        """Write back."""
        self.buckets.unpack(k, divisor)


@dataclass(frozen=True)
class Anchored:
    """anchor <- outer_opt(anchor, aggregate(codec(anchor - local))); local <- merge(local, anchor)."""

    buckets: Buckets
    aggregator: Aggregator
    codec: Codec
    anchor: Anchor
    merge: Merge

    def load(self, k: int) -> Tensor:
        """Fill the buffer with anchor - local."""
        return self.anchor.delta(k)

    def start(self, k: int, group: Group, share: Share) -> Pending:
        """Aggregate."""
        return self.aggregator.start(self.buckets.flat(k), self.codec, group, share)

    def land(self, k: int, result: Tensor, divisor: float) -> None:
        """Move the anchor, then merge."""
        self.anchor.advance(k, result if divisor == 1 else result.div_(divisor))
        self.merge(self.buckets.pieces(k), self.anchor.views[k])


@dataclass(frozen=True)
class Highest:
    """local <- the largest of all ranks: counters."""

    buckets: Buckets

    def load(self, k: int) -> Tensor:
        """Fill the buffer with local values."""
        return self.buckets.pack(k)

    def start(self, k: int, group: Group, share: Share) -> Pending:
        """Take the maximum."""
        return highest(self.buckets.flat(k), group)

    def land(self, k: int, result: Tensor, divisor: float) -> None:
        """Write back."""
        self.buckets.unpack(k)


def look_over(lane: Averaged | Anchored) -> float:
    """Return a number that is finite if and only if all that this rank brings is; load the first buckets on the way.

    Under a codec with a limit it is the largest magnitude. Without one it is 0 or no number at all, found by the
    cheapest pass over memory: no NaN and no infinity survives a sum.
    """
    if not len(lane.buckets):
        return 0.0
    exact = lane.codec.limit < math.inf
    seen = []
    for k in reversed(range(len(lane.buckets))):
        if not exact and k >= lane.buckets.num_buffers and lane.buckets.is_coarse(k):
            seen += [piece.sum(dtype=lane.buckets.dtype) for piece in lane.buckets.pieces(k)]
        else:
            seen.append(_magnitude(lane.load(k)) if exact else lane.load(k).sum())
    if exact:
        return float(torch.stack(seen).max())
    return 0.0 if math.isfinite(torch.stack(seen).sum()) or _is_finite(lane.buckets) else math.nan


def _magnitude(x: Tensor) -> Tensor:
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high)


def _is_finite(buckets: Buckets) -> bool:
    """Look at element by element: a sum of large finite values can overflow."""
    return all(bool(torch.isfinite(piece).all()) for k in range(len(buckets)) for piece in buckets.pieces(k))


class Flight:
    """The buckets of some lanes under way, two at a time: one is copied while the other is on the wire.

    Args:
        lanes: what travels, and how this rank counts in it.
        is_loaded: the first buckets of lanes that were looked over are in their buffers already.
    """

    def __init__(self, lanes: Sequence[tuple[Lane, Share]], is_loaded: bool, group: Group, meter: Meter) -> None:
        self._coming = deque((lane, share, k) for lane, share in lanes for k in range(len(lane.buckets)))
        self._is_loaded = is_loaded
        self._flying: deque[tuple[Lane, int, Pending]] = deque()
        self._group = group
        self._meter = meter
        self._send()
        self._send()

    def land(self) -> None:
        """Bring everything into the model, and send off what has not been sent yet."""
        while self._flying:
            with self._meter.timed("landing"):
                lane, k, pending = self._flying.popleft()
                lane.land(k, pending.wait(), pending.divisor)
            self._send()

    def _send(self) -> None:
        if not self._coming:
            return
        with self._meter.timed("packing"):
            lane, share, k = self._coming.popleft()
            if not (self._is_loaded and isinstance(lane, (Averaged, Anchored)) and k < lane.buckets.num_buffers):
                lane.load(k)
            pending = lane.start(k, self._group, share)
        self._flying.append((lane, k, pending))
        self._meter.add("bytes_sent", pending.bytes_sent)
