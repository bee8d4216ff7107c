# SPDX-License-Identifier: Apache-2.0
"""From what each rank brings to what all of them get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from farflung.base.checks import check_whole
from farflung.base.errors import ConfigError, Unsupported
from farflung.base.sizes import CAP_BYTES
from farflung.base.words import counted
from farflung.codec.base import Codec, Identity
from farflung.codec.feedback import ErrorFeedback
from farflung.comm.bucket import Buckets
from farflung.comm.group import Group, Op, Work
from farflung.outer.weighting import Decision


@dataclass(frozen=True)
class Payload:
    """What a rank brings of one bucket.

    Args:
        values: `[n]`. Under error feedback they have become the residual, once there is a wire.
        wire: what goes on the wire, encoded. None: it is encoded when the exchange starts.
        out: `[n]`, where the result goes; it may be `values`.
        weight: this rank's. With 0 nothing of it counts, so error feedback keeps it for a later round.
    """

    values: Tensor
    wire: Tensor | None
    out: Tensor
    weight: float = 1.0


@dataclass(frozen=True)
class Pending:
    """A bucket on its way.

    Args:
        decode: from how much each rank counts to `[n]`, the same bits on every rank, and the divisor that makes it the
            aggregate.
        bytes_sent: what this rank puts on the wire for it.
        bytes_received: what comes to it.
    """

    work: Work
    decode: Callable[[Decision], tuple[Tensor, float]]
    bytes_sent: int
    bytes_received: int

    def wait(self, decision: Decision) -> tuple[Tensor, float]:
        """Return the sum over the ranks and what to divide it by."""
        self.work.wait()
        return self.decode(decision)


class Aggregator(Protocol):
    """Starts the exchange of one bucket; all ranks call it with the same codec.

    A rank knows its own weight when it starts, and those of the others when it decodes: values travel beside the votes.
    """

    @property
    def agrees(self) -> bool:
        """Whether all ranks get the same bits."""

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Payload:
        """Do with `x` `[n]` what does not need this rank's weight."""

    def start(self, payload: Payload, codec: Codec, group: Group, number: int) -> Pending:
        """Send it off; it is used up. `number` is the same on all ranks and grows from round to round."""


@dataclass(frozen=True)
class Mean:
    """The weighted mean: each rank scales its values by its weight, and one all-reduce sums them on the way.

    A weight of 1 scales nothing, so that sums which fit into fp32 stay exact.
    """

    agrees: ClassVar[bool] = True

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Payload:
        """Leave it as it is.

        Raises:
            Unsupported: wires of this codec can't be summed.
        """
        if not codec.linear:
            raise Unsupported(f"Mean uses an all-reduce, but payloads of {codec} can't be summed. Use GatherMean().")
        return Payload(x, None, x)

    def start(self, payload: Payload, codec: Codec, group: Group, number: int) -> Pending:
        """Scale, encode and all-reduce."""
        wire = codec.encode(_scaled(payload.values, payload.weight))
        return _all_reduced(wire, group, "sum", lambda decision: (codec.decode(wire, payload.out), decision.total))


@dataclass(frozen=True)
class GatherMean:
    """The weighted mean of what the wires stand for, gathered whole and summed in rank order in fp32 on every rank."""

    agrees: ClassVar[bool] = True

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Payload:
        """Encode."""
        return _encoded(x, codec, residual)

    def start(self, payload: Payload, codec: Codec, group: Group, number: int) -> Pending:
        """All-gather."""

        def decode(wires: list[Tensor], decision: Decision) -> tuple[Tensor, float]:
            out = payload.out.zero_()
            for factor, wire in zip(decision.factors, wires, strict=True):
                if factor:
                    codec.add(wire, out, factor)
            return out, decision.total

        return _gathered(payload, group, decode)


@dataclass(frozen=True)
class ReduceScatterMean:
    """The weighted mean in two hops: each rank sums the wires of its own part in fp32, and sends the sum encoded again.

    A rank receives 2(M-1)/M wires where `GatherMean` makes it M - 1, and values are rounded twice.
    """

    agrees: ClassVar[bool] = True

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Payload:
        """Encode part by part.

        Raises:
            Unsupported: wires of this codec can be summed on the way.
        """
        if codec.linear:
            raise Unsupported(f"{codec} needs no decoding before the sum: use Mean(), which sends less.")
        parts = _parts(x, group.size)
        rests = [None] * group.size if residual is None else _parts(residual, group.size)
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
        return Payload(x, wire.view(-1), x if residual is None else torch.empty_like(x))

    def start(self, payload: Payload, codec: Codec, group: Group, number: int) -> Pending:
        """Transpose the parts; the second hop begins when the first is over."""
        assert payload.wire is not None
        came = torch.empty_like(payload.wire)
        first = group.all_to_all(came, payload.wire)
        outs = _parts(payload.out, group.size)

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

        hops = 2 * (group.size - 1) * len(payload.wire) // group.size
        return Pending(first, decode, hops, hops)


@dataclass(frozen=True)
class TrimmedMean:
    """The mean without the `trim` largest and the `trim` smallest values of each element.

    All ranks that count do so alike, whatever they have done: an outlier is what is far from the others. In a round in
    which too few ranks have done anything, as at the end of uneven data, no more are left out than leave one or two.

    Raises:
        ConfigError: `trim` is no whole number above zero, or (in a round) the group leaves nothing to average.
    """

    trim: int = 1
    agrees: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("TrimmedMean: trim", self.trim, least=1)

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Payload:
        """Encode."""
        return _encoded(x, codec, residual)

    def start(self, payload: Payload, codec: Codec, group: Group, number: int) -> Pending:
        """All-gather.

        Raises:
            ConfigError: the group is too small.
        """
        if group.size <= 2 * self.trim:
            raise ConfigError(f"TrimmedMean({self.trim}) of {counted(group.size, 'rank')} leaves nothing to average.")

        def decode(wires: list[Tensor], decision: Decision) -> tuple[Tensor, float]:
            present = [wire for factor, wire in zip(decision.factors, wires, strict=True) if factor]
            trim = min(self.trim, (len(present) - 1) // 2)
            rows = torch.stack([codec.decode(wire, torch.empty_like(payload.out)) for wire in present])
            kept = rows.sort(dim=0).values[trim : len(present) - trim]
            return torch.sum(kept, dim=0, out=payload.out), len(present) - 2 * trim

        return _gathered(payload, group, decode)


@dataclass(frozen=True)
class Gossip:
    """Push-sum with one peer: each rank gives half of its values away and keeps the other half.

        x_i <- x_i - Q(x_i) / 2 + Q(x_j) / 2

    In round r the rank i gives to i + 2**r (modulo M, r modulo log2 M), so without training in between the ranks of a
    power of two agree after log2 M rounds. As every rank gives and is given to once a round, push-sum's own weights
    stay 1 and are not sent; the sum over all ranks is kept, also under a codec Q that rounds.

    Source: stochastic gradient push (arXiv:1811.10792).
    """

    agrees: ClassVar[bool] = False

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Payload:
        """Encode.

        Raises:
            Unsupported: under error feedback a rank would owe its peers different things.
        """
        if residual is not None:
            raise Unsupported(f"Gossip has a different peer in each round, so it can't use {codec}.")
        return Payload(x, codec.encode(x), x)

    def start(self, payload: Payload, codec: Codec, group: Group, number: int) -> Pending:
        """Send to one, receive from one."""
        assert payload.wire is not None
        wire = payload.wire if payload.wire is not payload.values else payload.wire.clone()
        step = 1 << number % max(1, (group.size - 1).bit_length())
        came = torch.empty_like(wire)
        work = group.swap(came, wire, (group.rank + step) % group.size, (group.rank - step) % group.size)

        def decode(decision: Decision) -> tuple[Tensor, float]:
            codec.add(wire, payload.values, -0.5)
            return codec.add(came, payload.values, 0.5), 1

        return Pending(work, decode, wire.nbytes, wire.nbytes)


@dataclass(frozen=True)
class Max:
    """The largest value of each element, as of counters; no codec and no weight has a say in it."""

    agrees: ClassVar[bool] = True

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Payload:
        """Leave it as it is."""
        return Payload(x, x, x)

    def start(self, payload: Payload, codec: Codec, group: Group, number: int) -> Pending:
        """All-reduce."""
        return _all_reduced(payload.values, group, "max", lambda decision: (payload.values, 1))


def mean_of(codec: Codec) -> Aggregator:
    """Return the plainest mean that can carry `codec`: summed on the way if that is possible."""
    return Mean() if codec.linear else GatherMean()


def average(tensors: Sequence[Tensor], group: Group, decision: Decision, cap_bytes: int = CAP_BYTES) -> int:
    """Replace `tensors` by their weighted mean over the ranks, at once: a collective outside of rounds.

    Args:
        tensors: floating ones of any shapes, the same on every rank.
        cap_bytes: how much is copied and sent at a time.

    Returns:
        The bytes that this rank sent, which are as many as it received.
    """
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    buckets, identity, sent = Buckets(tensors, dtype, cap_bytes=cap_bytes), Identity(), 0
    for k in range(len(buckets)):
        flat = buckets.pack(k)
        pending = Mean().start(Payload(flat, None, flat, decision.factors[group.rank]), identity, group, 0)
        buckets.unpack(k, pending.wait(decision)[1])
        sent += pending.bytes_sent
    return sent


def _scaled(x: Tensor, weight: float) -> Tensor:
    if weight == 0:
        return x.zero_()  # not a product, which would let a NaN through
    return x if weight == 1 else x.mul_(weight)


def _encoded(x: Tensor, codec: Codec, residual: Tensor | None) -> Payload:
    if residual is None:
        return Payload(x, codec.encode(x), x)
    assert isinstance(codec, ErrorFeedback)
    return Payload(x, codec.encode_with(x, residual), torch.empty_like(x))


def _all_reduced(wire: Tensor, group: Group, op: Op, decode: Callable[[Decision], tuple[Tensor, float]]) -> Pending:
    there_and_back = 2 * (group.size - 1) * wire.nbytes // group.size
    return Pending(group.all_reduce(wire, op), decode, there_and_back, there_and_back)


def _gathered(
    payload: Payload, group: Group, decode: Callable[[list[Tensor], Decision], tuple[Tensor, float]]
) -> Pending:
    wire = payload.wire
    assert wire is not None
    everyone = torch.empty(group.size * wire.numel(), dtype=wire.dtype, device=wire.device)
    work, nbytes = group.all_gather(everyone, wire), (group.size - 1) * wire.nbytes
    wires = list(everyone.view(group.size, -1))
    return Pending(work, lambda decision: decode(wires, decision), nbytes, nbytes)


def _parts(x: Tensor, count: int) -> list[Tensor]:
    """Cut `x` into `count` parts of the same size, the last ones shorter or empty."""
    size = -(-x.numel() // count)
    return [x[min(k * size, x.numel()) : min((k + 1) * size, x.numel())] for k in range(count)]
