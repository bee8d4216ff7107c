# SPDX-License-Identifier: Apache-2.0
"""Buckets that are treated alike: what is taken from the model for the wire, and what is made of what comes back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from farflung.comm.bucket import Buckets
from farflung.comm.group import Group
from farflung.outer.aggregate import HIGHEST, Aggregator, Parcel
from farflung.outer.anchor import Anchor
from farflung.outer.codec.base import Codec, Identity
from farflung.outer.codec.feedback import ErrorFeedback
from farflung.outer.merge import Merge


class Lane(Protocol):
    """Where the buckets are, and how they travel."""

    @property
    def buckets(self) -> Buckets: ...
    @property
    def aggregator(self) -> Aggregator: ...
    @property
    def codec(self) -> Codec: ...

    def load(self, k: int) -> Tensor:
        """Fill the buffer of bucket `k` with what this rank brings, and return it."""

    def prepare(self, k: int, group: Group) -> Parcel:
        """Encode what the buffer of bucket `k` holds, as far as that can be done before the shares are known."""

    def land(self, k: int, parcel: Parcel, result: Tensor, divisor: float) -> None:
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

    def prepare(self, k: int, group: Group) -> Parcel:
        """Encode."""
        return self.aggregator.prepare(self.buckets.flat(k), self.codec, group, None)

    def land(self, k: int, parcel: Parcel, result: Tensor, divisor: float) -> None:
        """Write back."""
        self.buckets.unpack(k, divisor)


@dataclass(frozen=True)
class Highest:
    """local <- the largest of all ranks: counters."""

    buckets: Buckets
    aggregator: Aggregator = HIGHEST
    codec: Codec = field(default_factory=Identity)

    def load(self, k: int) -> Tensor:
        """Fill the buffer with local values."""
        return self.buckets.pack(k)

    def prepare(self, k: int, group: Group) -> Parcel:
        """Leave them as they are."""
        return self.aggregator.prepare(self.buckets.flat(k), self.codec, group, None)

    def land(self, k: int, parcel: Parcel, result: Tensor, divisor: float) -> None:
        """Write back."""
        self.buckets.unpack(k)


class Anchored:
    """anchor <- outer_opt(anchor, aggregate(codec(anchor - local))); local <- merge(local, anchor)."""

    def __init__(self, buckets: Buckets, aggregator: Aggregator, codec: Codec, anchor: Anchor, merge: Merge) -> None:
        self.buckets = buckets
        self.aggregator = aggregator
        self.codec = codec
        self.anchor = anchor
        self.merge = merge
        remembers = isinstance(codec, ErrorFeedback)
        self.residuals = [torch.zeros_like(chunk) for chunk in anchor.chunks] if remembers else []

    def load(self, k: int) -> Tensor:
        """Fill the buffer with anchor - local."""
        return self.anchor.delta(k)

    def prepare(self, k: int, group: Group) -> Parcel:
        """Encode, with what was left over last time."""
        residual = self.residuals[k] if self.residuals else None
        return self.aggregator.prepare(self.buckets.flat(k), self.codec, group, residual)

    def land(self, k: int, parcel: Parcel, result: Tensor, divisor: float) -> None:
        """Move the anchor, then merge. Only now is what was sent taken out of the residual."""
        if self.residuals and parcel.counts:
            self.residuals[k].copy_(parcel.values)
        self.anchor.advance(k, result if divisor == 1 else result.div_(divisor))
        self.merge(self.buckets.pieces(k), self.anchor.views(k))

    def kept(self) -> dict[str, list[Tensor]]:
        """Return what is kept between rounds, by name: one flat tensor a bucket."""
        rows = {"anchor": [chunk.detach() for chunk in self.anchor.chunks], **self.anchor.optimizer_rows()}
        return rows | ({"residual": self.residuals} if self.residuals else {})

    def go_on_like(self, other: Anchored) -> None:
        """Take over what is not kept by element."""
        self.anchor.go_on_like(other.anchor)

    def begin_here(self) -> None:
        """anchor <- local."""
        for k, chunk in enumerate(self.anchor.chunks):
            chunk.detach().copy_(self.buckets.pack(k))

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the anchor and the residuals."""
        return {"anchor": self.anchor.state_dict(), "residuals": [residual.clone() for residual in self.residuals]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.anchor.load_state_dict(state["anchor"])
        for residual, saved in zip(self.residuals, state["residuals"], strict=True):
            residual.copy_(saved)


class Corrected(Anchored):
    """The mean of the last round, in which this rank's own stale term is replaced by what it has done since.

        g = mean(t-1) + f (delta(t) - sent(t-1));  anchor <- outer_opt(anchor, g);  local <- anchor;  send delta(t)

    f is this rank's share of the mean, 1/M where all did alike; of a term it is the same when it is put in and when it
    is taken out. Anchors differ between ranks.

    Source: eager updates (arXiv:2502.12996).
    """

    def __init__(self, *args: Any, fraction: float) -> None:
        super().__init__(*args)
        self.fraction = fraction
        self.sent = [torch.zeros_like(chunk) for chunk in self.anchor.chunks]

    def load(self, k: int) -> Tensor:
        """Fill the buffer with what `correct` has found a moment ago."""
        return self.buckets.flat(k).copy_(self.sent[k])

    def prepare(self, k: int, group: Group) -> Parcel:
        """Encode, and remember what the others will see of it."""
        parcel = super().prepare(k, group)
        if parcel.wire is not None:
            self.codec.decode(parcel.wire, self.sent[k])
        return parcel

    def begin_here(self) -> None:
        """anchor <- local, and nothing is in the air."""
        super().begin_here()
        self.rest()

    def correct(self, results: list[tuple[Tensor, float]], fraction: float) -> None:
        """Move the anchor, unless this rank's weights are not finite: the vote that follows will say so.

        Args:
            results: of the last round by bucket, and what they have to be divided by; empty where none has come back.
            fraction: this rank's share of it, and of the next one as far as one can tell.
        """
        means = [result / divisor for result, divisor in results]
        if self.fraction:
            for mean, sent in zip(means, self.sent, strict=False):
                mean.sub_(sent, alpha=self.fraction)
        means = means or [torch.zeros_like(sent) for sent in self.sent]
        for k, sent in enumerate(self.sent):
            sent.copy_(self.anchor.delta(k))
        is_finite = all(bool(torch.isfinite(sent).all()) for sent in self.sent)
        self.fraction = fraction if is_finite else 0.0
        if is_finite:
            for k, mean in enumerate(means):
                self.anchor.advance(k, mean.add_(self.sent[k], alpha=fraction))
                self.merge(self.buckets.pieces(k), self.anchor.views(k))

    def kept(self) -> dict[str, list[Tensor]]:
        """Return what is kept, with what is in the air."""
        return super().kept() | {"sent": self.sent}

    def go_on_like(self, other: Anchored) -> None:
        """Take over the fraction too."""
        super().go_on_like(other)
        assert isinstance(other, Corrected)
        self.fraction = other.fraction

    def rest(self) -> None:
        """Send nothing: nothing was done."""
        for sent in self.sent:
            sent.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return copies, with what is in the air."""
        return super().state_dict() | {"sent": [sent.clone() for sent in self.sent], "fraction": self.fraction}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        super().load_state_dict(state)
        self.fraction = state["fraction"]
        for sent, saved in zip(self.sent, state["sent"], strict=True):
            sent.copy_(saved)


def look_over(lane: Averaged | Anchored) -> tuple[float, float]:
    """Return the norm of what this rank brings, and its largest magnitude where the codec has a limit (else 0).

    The norm is finite if and only if all values are; of weights that have no anchor it is 0 or no number at all, found
    by the cheapest pass over memory. The first buckets are loaded afterwards.
    """
    if not len(lane.buckets):
        return 0.0, 0.0
    measure = _square if isinstance(lane, Anchored) else torch.sum
    largest, seen = [], []
    for k in reversed(range(len(lane.buckets))):
        if lane.codec.limit < math.inf:
            low, high = torch.aminmax(lane.load(k))
            largest.append(torch.maximum(-low, high))
            seen.append(measure(lane.buckets.flat(k)))
        elif measure is torch.sum and k >= lane.buckets.num_buffers and lane.buckets.is_coarse(k):
            seen += [piece.sum(dtype=lane.buckets.dtype) for piece in lane.buckets.pieces(k)]
        else:
            seen.append(measure(lane.load(k)))
    total = float(torch.stack(seen).sum(dtype=torch.float64))
    if not math.isfinite(total):
        total = 1e300 if _is_finite(lane.buckets) else math.nan
    norm = math.sqrt(total) if isinstance(lane, Anchored) else 0.0 * total
    return norm, float(torch.stack(largest).max()) if largest else 0.0


def _square(x: Tensor) -> Tensor:
    return torch.dot(x, x)


def _is_finite(buckets: Buckets) -> bool:
    """Look at element by element: a sum of large finite values can overflow."""
    return all(bool(torch.isfinite(piece).all()) for k in range(len(buckets)) for piece in buckets.pieces(k))
