# SPDX-License-Identifier: Apache-2.0
"""Other ways to aggregate the values of all ranks; the plain mean is in `agreement.py`."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from farflung.base.checks import check_number, check_whole
from farflung.base.errors import ConfigError, Unsupported
from farflung.base.sizes import saves_by_two_hops
from farflung.codec.base import Codec, Identity
from farflung.codec.feedback import ErrorFeedback
from farflung.comm.bucket import Buckets
from farflung.comm.group import Group
from farflung.methods.agreement import Aggregator, Mean, Payload, Pending, parts_of
from farflung.methods.weighting import Decision
from farflung.votes.ballot import Island


class _Gathering(Aggregator):
    """Gathers all wires whole, from which each rank computes the same."""

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Payload:
        return _encoded(x, codec, residual)

    def start(self, payload: Payload, codec: Codec, group: Group, number: int) -> Pending:
        wire = payload.wire
        assert wire is not None
        everyone = torch.empty(group.size * wire.numel(), dtype=wire.dtype, device=wire.device)
        work, wires = group.all_gather(everyone, wire), list(everyone.view(group.size, -1))
        num_bytes = (group.size - 1) * wire.nbytes
        return Pending(work, lambda decision: self._combined(wires, codec, payload.out, decision), num_bytes)

    @abstractmethod
    def _combined(self, wires: list[Tensor], codec: Codec, out: Tensor, decision: Decision) -> tuple[Tensor, float]:
        """Return `out`, filled, and what to divide it by."""


@dataclass(frozen=True)
class GatherMean(_Gathering):
    """The weighted mean of the decoded wires, which every rank gathers whole and sums in rank order in fp32.

    Args:
        hops: 1: do so in any case. None: of quantized pseudo-gradients that more than two ranks exchange, each rank
            sums a part of a bucket, as `ReduceScatterMean` does, if that saves bytes that are worth a hop.
    """

    hops: int | None = None

    def __post_init__(self) -> None:
        if self.hops not in (None, 1):
            raise ConfigError(f"GatherMean: hops is {self.hops!r}; it is 1 or None. Two hops are ReduceScatterMean().")

    def __repr__(self) -> str:
        return "GatherMean()" if self.hops is None else "GatherMean(hops=1)"

    def rounding_once(self) -> Aggregator:
        return replace(self, hops=1)

    def takes_two(self, codec: Codec) -> bool:
        """Return whether it may take two hops. The sum of sparse values is not encoded again: its cost is unknown."""
        return self.hops is None and not codec.linear and not getattr(codec, "is_sparse", False)

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Payload:
        if self.takes_two(codec) and saves_by_two_hops(codec.wire_bytes(x.numel()), group.size, group.hop_bytes):
            return ReduceScatterMean().prepare(x, codec, group, residual)
        return super().prepare(x, codec, group, residual)

    def start(self, payload: Payload, codec: Codec, group: Group, number: int) -> Pending:
        if payload.num_parts > 1:
            return ReduceScatterMean().start(payload, codec, group, number)
        return super().start(payload, codec, group, number)

    def _combined(self, wires: list[Tensor], codec: Codec, out: Tensor, decision: Decision) -> tuple[Tensor, float]:
        out.zero_()
        for factor, wire in zip(decision.factors, wires, strict=True):
            if factor:
                codec.add(wire, out, factor)
        return out, decision.total


@dataclass(frozen=True)
class ReduceScatterMean(Aggregator):
    """The weighted mean in two hops: each rank sums the wires of its own part in fp32, and sends the sum encoded again.

    A rank receives 2(M-1)/M wires where `GatherMean` makes it M - 1, and values are rounded twice.
    """

    not_eager: ClassVar[str] = "rounds again. Use GatherMean()"

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Payload:
        if codec.linear:
            raise Unsupported(f"{codec} needs no decoding before the sum: use Mean(), which sends less.")
        parts = parts_of(x, group.size)
        rests = [None] * group.size if residual is None else parts_of(residual, group.size)
        wires = [_encoded(part, codec, rest).wire for part, rest in zip(parts, rests, strict=True)]
        size = codec.wire_bytes(parts[0].numel())
        if wires[0] is None or wires[0].dtype != torch.uint8:
            raise Unsupported(
                f"ReduceScatterMean needs a codec that encodes to bytes, and {codec} doesn't. Use GatherMean()."
            )
        wire = torch.zeros(group.size, size, dtype=torch.uint8, device=x.device)
        for row, part in zip(wire, wires, strict=True):  # the last parts may be shorter
            assert part is not None
            row[: part.nbytes] = part
        out = x if residual is None else torch.empty_like(x)
        return Payload(x, wire.view(-1), out, num_parts=group.size)

    def start(self, payload: Payload, codec: Codec, group: Group, number: int) -> Pending:
        """Transpose the parts; the second hop begins when the first is over."""
        assert payload.wire is not None
        came = torch.empty_like(payload.wire)
        first = group.all_to_all(came, payload.wire)
        outs = parts_of(payload.out, group.size)

        def decode(decision: Decision) -> tuple[Tensor, float]:
            mine = torch.zeros_like(outs[group.rank])
            for factor, row in zip(decision.factors, came.view(group.size, -1), strict=True):
                if factor:
                    codec.add(row[: codec.wire_bytes(mine.numel())], mine, factor)
            sent = torch.zeros_like(came[: len(came) // group.size])
            encoded = codec.encode(mine)
            sent[: encoded.nbytes] = encoded
            group.all_gather(came, sent).wait()
            for out, row in zip(outs, came.view(group.size, -1), strict=True):
                codec.decode(row[: codec.wire_bytes(out.numel())], out)
            return payload.out, decision.total

        return Pending(first, decode, 2 * (group.size - 1) * len(payload.wire) // group.size)


@dataclass(frozen=True)
class TrimmedMean(_Gathering):
    """The coordinate-wise trimmed mean: without the `trim` largest and the `trim` smallest values of each element.

    All ranks that count do so alike, whatever work they report: a value is an outlier by its distance from the others.
    In a round in which too few ranks have done anything, as at the end of uneven data, fewer are left out, so that one
    or two remain. Every rank reads the values of all others and trims them itself, so no rank can change the result by
    what it says of its own values. That costs M - 1 payloads per rank, where an all-reduce costs 2(M-1)/M.

    Raises:
        ConfigError: `trim` is no whole number above zero.

    Source: Byzantine-robust distributed learning (arXiv:1803.01498).
    """

    trim: int = 1
    weighs_work: ClassVar[bool] = False
    not_eager: ClassVar[str] = "is no such mean"

    def __post_init__(self) -> None:
        check_whole("TrimmedMean: trim", self.trim, least=1)

    def _combined(self, wires: list[Tensor], codec: Codec, out: Tensor, decision: Decision) -> tuple[Tensor, float]:
        present = [wire for factor, wire in zip(decision.factors, wires, strict=True) if factor]
        rows = [
            codec.decode(wire, torch.empty_like(out)).nan_to_num_(math.inf, math.inf, -math.inf) for wire in present
        ]
        trim = min(self.trim, max(len(rows) - 1, 0) // 2)
        for k in range(trim):  # bubbles the extremes to both ends: 7 times faster than to sort 8 rows
            for low in (*range(k, len(rows) - 1 - k), *reversed(range(k, len(rows) - 2 - k))):
                least = torch.minimum(rows[low], rows[low + 1])
                torch.maximum(rows[low], rows[low + 1], out=rows[low + 1])
                rows[low] = least
        out.zero_()
        for row in rows[trim : len(rows) - trim]:
            out.add_(row)
        return out, len(rows) - 2 * trim


@dataclass(frozen=True)
class TrimmedMax(_Gathering):
    """The largest value of each element but one, for the counters of replicas any one of which may be wrong.

    Of two replicas it is the largest.
    """

    def _combined(self, wires: list[Tensor], codec: Codec, out: Tensor, decision: Decision) -> tuple[Tensor, float]:
        rows = torch.stack([wire for factor, wire in zip(decision.factors, wires, strict=True) if factor])
        return out.copy_(rows.sort(dim=0).values[-2 if len(rows) > 2 else -1]), 1


@dataclass(frozen=True)
class RadialMean(Aggregator):
    """The direction of the mean, and the mean of the replicas' norms as its length, tensor by tensor.

        m = sum_k w_k d_k / sum_k w_k;  result = m / |m| * sum_k w_k |d_k| / sum_k w_k;  of embeddings m itself

    A mean of M deltas that are nearly orthogonal is shorter by a factor of up to sqrt(M), so the outer learning rate
    that suits it depends on M. With this length it doesn't. Equal deltas, and a single one, give their plain mean.
    Norms are of the values that the other replicas decode. A fragment stays in its buffers as a whole until all of it
    has arrived: only then is the length of m known.

    If deltas nearly cancel out, their mean points in a random direction, and is still scaled up.

    Source: Decoupled DiLoCo (arXiv:2604.21428).
    """

    is_radial: ClassVar[bool] = True
    not_eager: ClassVar[str] = "is no such mean"
    needs_anchor: ClassVar[str] = "needs the replicas' pseudo-gradients"

    def lengths(self, buckets: Buckets, embeddings: Sequence[bool]) -> Lengths:
        return Lengths(buckets, embeddings)

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Payload:
        return mean_of(codec).prepare(x, codec, group, residual)

    def start(self, payload: Payload, codec: Codec, group: Group, number: int) -> Pending:
        """Send what the mean needs; a round lengthens that by `Lengths`."""
        return mean_of(codec).start(payload, codec, group, number)


class Lengths:
    """The squared norms of each tensor in one round, by which `RadialMean` lengthens the mean.

    A tensor that is cut into several buckets, or into the shards of an island, has one norm. It is that of the values
    that the other replicas decode: a lossy codec shortens a replica's values and their mean alike, which cancels out.

    Args:
        buckets: of the parameters.
        embeddings: which of them keep the plain mean.
    """

    def __init__(self, buckets: Buckets, embeddings: Sequence[bool]) -> None:
        self._buckets, self._embeddings = buckets, embeddings
        device = buckets.flat(0).device if len(buckets) else None
        self._squares = torch.zeros(2, len(embeddings), dtype=torch.float64, device=device)  # sent, and of the mean
        self._factors = [1.0] * len(embeddings)
        self.num_bytes = self._squares.nbytes  # that `agree` sends to each rank

    def note_sent(self, k: int, sent: Tensor) -> None:
        """Measure the values that the others decode of this rank's bucket `k`, `[sizes[k]]`."""
        self._squares[0, self._buckets.owners(k)] += self._dots(k, sent)

    def note_mean(self, k: int, total: Tensor, divisor: float) -> None:
        """Measure bucket `k` of the mean, `total / divisor`."""
        self._squares[1, self._buckets.owners(k)] += self._dots(k, total) / divisor**2

    def agree(self, group: Group, island: Island, decision: Decision) -> float:
        """Find the factor of each tensor, the same bits on all ranks: a collective. Returns the mean's squared norm."""
        count = len(self._embeddings)
        shares = torch.tensor(self._buckets.shares, dtype=torch.float64, device=self._squares.device)
        mine = island.squares((self._squares * shares).flatten().tolist())
        rows = group.all_gather_small(torch.tensor(mine, dtype=torch.float64)).tolist()
        means = rows[0][count:]  # one rank's, as machines may differ in the last bits of a sum
        for number, square in enumerate(means):
            if not self._embeddings[number] and square > 0:
                sent = zip(decision.factors, rows, strict=True)
                length = sum(factor * math.sqrt(row[number]) for factor, row in sent if factor) / decision.total
                ratio = length / math.sqrt(square)
                self._factors[number] = ratio if math.isfinite(ratio) else 1.0
        return math.fsum(means)

    def lengthen(self, k: int, total: Tensor) -> None:
        """Multiply each tensor's part of bucket `k` by its factor."""
        for number, part in zip(self._buckets.owners(k), self._buckets.cut(k, total), strict=True):
            if self._factors[number] != 1:
                part.mul_(self._factors[number])

    def _dots(self, k: int, flat: Tensor) -> Tensor:
        parts = [part.view(-1) for part in self._buckets.cut(k, flat)]
        return torch.stack([torch.dot(part, part) for part in parts]).double()


@dataclass(frozen=True)
class Gossip(Aggregator):
    """Push-sum with one peer: each rank gives half of its values away and keeps the other half.

        x_i <- x_i - Q(x_i) / 2 + Q(x_j) / 2

    In round r the rank i gives to i + 2**r (modulo M, r modulo log2 M), so without training in between the ranks of a
    power of two agree after log2 M rounds. As every rank gives and is given to once a round, push-sum's own weights
    stay 1 and are not sent; the sum over all ranks is kept, also under a codec Q that rounds.

    If values are deltas from anchors, replicas have anchors of their own, and `pull` brings these together at no
    more bytes. A rank then sends x - pull anchor in place of x, so that after the exchange

        x_i <- (x_i + x_j) / 2 + pull (anchor_i - anchor_j) / 2

    With pull 1 that is anchor_i - (local_i + local_j) / 2: replicas exchange their weights.

    Args:
        pull: from 0 to 1; with 0 only deltas are exchanged.

    Raises:
        ConfigError: `pull` is out of its range.

    Source: stochastic gradient push (arXiv:1811.10792); `pull` is of NoLoCo (arXiv:2506.10911).
    """

    pull: float = 0.0
    agrees: ClassVar[bool] = False
    weighs_work: ClassVar[bool] = False
    not_eager: ClassVar[str] = "is no such mean"

    def __post_init__(self) -> None:
        check_number("pull", self.pull, least=0, most=1)

    @property
    def needs_anchor(self) -> str:
        return "pulls anchors together" if self.pull else ""

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Payload:
        if residual is not None:
            raise Unsupported(f"Gossip has a different peer in each round, so it can't use {codec}.")
        if self.pull and not isinstance(codec, Identity):
            raise Unsupported(
                f"{self} sends anchors with what has changed since, and {codec} would round them as coarsely as the "
                "weights are large. Use pull=0, which sends the change alone, or no codec."
            )
        return Payload(x, None if self.pull else codec.encode(x), x)

    def start(self, payload: Payload, codec: Codec, group: Group, number: int) -> Pending:
        if self.pull:
            assert payload.anchor is not None
            wire = torch.sub(payload.values, payload.anchor.to(payload.values.device), alpha=self.pull)
        else:
            assert payload.wire is not None
            wire = payload.wire if payload.wire is not payload.values else payload.wire.clone()
        step = 1 << number % max(1, (group.size - 1).bit_length())
        came = torch.empty_like(wire)
        work = group.swap(came, wire, (group.rank + step) % group.size, (group.rank - step) % group.size)

        def decode(decision: Decision) -> tuple[Tensor, float]:
            codec.add(wire, payload.values, -0.5)
            return codec.add(came, payload.values, 0.5), 1

        return Pending(work, decode, wire.nbytes)


def mean_of(codec: Codec) -> Aggregator:
    """Return the plainest mean that can carry `codec`: summed on the way if that is possible."""
    return Mean() if codec.linear else GatherMean()


def _encoded(x: Tensor, codec: Codec, residual: Tensor | None) -> Payload:
    if residual is None:
        return Payload(x, codec.encode(x), x)
    assert isinstance(codec, ErrorFeedback)
    return Payload(x, codec.encode_with(x, residual), torch.empty_like(x))
