# SPDX-License-Identifier: Apache-2.0
"""From what each rank brings to what all of them get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from farflung.base.checks import check_whole
from farflung.base.errors import ConfigError, Unsupported
from farflung.base.words import counted
from farflung.comm.group import Group, Work
from farflung.outer.codec.base import Codec
from farflung.outer.codec.feedback import ErrorFeedback


@dataclass(frozen=True)
class Shares:
    """How much each rank's values count: by its factor, in a sum that is divided by `total` at the end.

    Args:
        rank: whose shares these are.
        round: a number that all ranks agree on and that grows.
    """

    factors: tuple[float, ...]
    total: float
    rank: int
    round: int = 0

    @property
    def mine(self) -> float:
        """The factor of this rank."""
        return self.factors[self.rank]

    @property
    def is_plain(self) -> bool:
        """Whether all ranks count alike, so that a sum may begin before anyone knows it."""
        return self.total == len(self.factors) and all(factor == 1 for factor in self.factors)


@dataclass(frozen=True)
class Pending:
    """A bucket on its way.

    Args:
        decode: returns `[n]`, which holds `divisor` times the aggregate, the same bits on every rank.
        bytes_sent: what this rank puts on the wire for it.
        bytes_received: what comes to it.
    """

    work: Work
    decode: Callable[[], Tensor]
    divisor: float
    bytes_sent: int
    bytes_received: int

    def wait(self) -> Tensor:
        """Return what came of it."""
        self.work.wait()
        return self.decode()


@dataclass(frozen=True)
class Parcel:
    """What a rank brings of one bucket: its values, and their wire where that does not depend on the shares.

    Args:
        values: `[n]`. Under error feedback they have become the residual, once there is a wire.
        out: `[n]`, where the result goes; it may be `values`.
        counts: whether this rank has a share in the result. Where it has none, what it sent is still to be sent.
    """

    values: Tensor
    wire: Tensor | None
    out: Tensor
    counts: bool = True


class Aggregator(Protocol):
    """Starts the exchange of one bucket; all ranks call it with the same codec and shares."""

    @property
    def agrees(self) -> bool:
        """Whether all ranks get the same bits."""

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Parcel:
        """Do with `x` `[n]` what does not need the shares."""

    def start(self, parcel: Parcel, codec: Codec, group: Group, shares: Shares) -> Pending:
        """Send it off; it is used up."""


@dataclass(frozen=True)
class Mean:
    """The weighted mean: wires are summed on the way, by one all-reduce.

    Equal shares are summed as they are and divided once, so that sums which fit into fp32 stay exact.
    """

    agrees: ClassVar[bool] = True

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Parcel:
        """Leave it as it is.

        Raises:
            Unsupported: wires of this codec can't be summed.
        """
        if not codec.linear:
            raise Unsupported(f"Mean uses an all-reduce, but payloads of {codec} can't be summed. Use GatherMean().")
        return Parcel(x, None, x)

    def start(self, parcel: Parcel, codec: Codec, group: Group, shares: Shares) -> Pending:
        """Scale, encode and all-reduce."""
        x = _scaled(parcel.values, shares.mine)
        wire = codec.encode(x)
        there_and_back = 2 * (group.size - 1) * wire.nbytes // group.size
        work = group.all_reduce(wire)
        return Pending(work, lambda: codec.decode(wire, parcel.out), shares.total, there_and_back, there_and_back)


@dataclass(frozen=True)
class GatherMean:
    """The weighted mean of what the wires stand for, gathered whole and summed in rank order in fp32 on every rank."""

    agrees: ClassVar[bool] = True

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Parcel:
        """Encode."""
        return _encoded(x, codec, residual)

    def start(self, parcel: Parcel, codec: Codec, group: Group, shares: Shares) -> Pending:
        """All-gather."""
        wires, work, one = _gathered(parcel, group)

        def decode() -> Tensor:
            out = parcel.out.zero_()
            for factor, wire in zip(shares.factors, wires, strict=True):
                if factor:
                    codec.add(wire, out, factor)
            return out

        return Pending(work, decode, shares.total, (group.size - 1) * one, (group.size - 1) * one)


@dataclass(frozen=True)
class ReduceScatterMean:
    """The weighted mean in two hops: each rank sums the wires of its own part in fp32, and sends the sum encoded again.

    A rank receives 2(M-1)/M wires where `GatherMean` makes it M - 1, and values are rounded twice.
    """

    agrees: ClassVar[bool] = True

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Parcel:
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
        return Parcel(x, wire.view(-1), x if residual is None else torch.empty_like(x))

    def start(self, parcel: Parcel, codec: Codec, group: Group, shares: Shares) -> Pending:
        """Transpose the parts; the second hop begins when the first is over."""
        assert parcel.wire is not None
        came = torch.empty_like(parcel.wire)
        first = group.all_to_all(came, parcel.wire)
        outs = _parts(parcel.out, group.size)

        def decode() -> Tensor:
            mine = torch.zeros_like(outs[group.rank])
            for factor, row in zip(shares.factors, came.view(group.size, -1), strict=True):
                if factor:
                    codec.add(row[: codec.wire_bytes(mine.numel())], mine, factor)
            sent = torch.zeros_like(came[: len(came) // group.size])
            encoded = codec.encode(mine)
            sent[: encoded.nbytes] = encoded
            group.all_gather(came, sent).wait()
            for out, row in zip(outs, came.view(group.size, -1), strict=True):
                codec.decode(row[: codec.wire_bytes(out.numel())], out)
            return parcel.out

        hops = 2 * (group.size - 1) * len(parcel.wire) // group.size
        return Pending(first, decode, shares.total, hops, hops)


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

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Parcel:
        """Encode."""
        return _encoded(x, codec, residual)

    def start(self, parcel: Parcel, codec: Codec, group: Group, shares: Shares) -> Pending:
        """All-gather.

        Raises:
            ConfigError: the group is too small.
        """
        if group.size <= 2 * self.trim:
            raise ConfigError(f"TrimmedMean({self.trim}) of {counted(group.size, 'rank')} leaves nothing to average.")
        present = [rank for rank, factor in enumerate(shares.factors) if factor]
        trim = min(self.trim, (len(present) - 1) // 2)
        wires, work, one = _gathered(parcel, group)

        def decode() -> Tensor:
            rows = torch.stack([codec.decode(wires[rank], torch.empty_like(parcel.out)) for rank in present])
            kept = rows.sort(dim=0).values[trim : len(present) - trim]
            return torch.sum(kept, dim=0, out=parcel.out)

        return Pending(work, decode, len(present) - 2 * trim, (group.size - 1) * one, (group.size - 1) * one)


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

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Parcel:
        """Encode.

        Raises:
            Unsupported: under error feedback a rank would owe its peers different things.
        """
        if residual is not None:
            raise Unsupported(f"Gossip has a different peer in each round, so it can't use {codec}.")
        return Parcel(x, codec.encode(x), x)

    def start(self, parcel: Parcel, codec: Codec, group: Group, shares: Shares) -> Pending:
        """Send to one, receive from one."""
        assert parcel.wire is not None
        wire = parcel.wire if parcel.wire is not parcel.values else parcel.wire.clone()
        step = 1 << shares.round % max(1, (group.size - 1).bit_length())
        came = torch.empty_like(wire)
        work = group.swap(came, wire, (group.rank + step) % group.size, (group.rank - step) % group.size)

        def decode() -> Tensor:
            codec.add(wire, parcel.values, -0.5)
            return codec.add(came, parcel.values, 0.5)

        return Pending(work, decode, 1, wire.nbytes, wire.nbytes)


def mean_of(codec: Codec) -> Aggregator:
    """Return the plainest mean that can carry `codec`: summed on the way if that is possible."""
    return Mean() if codec.linear else GatherMean()


@dataclass(frozen=True)
class _Highest:
    """The largest value of each element."""

    agrees: ClassVar[bool] = True

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Parcel:
        return Parcel(x, x, x)

    def start(self, parcel: Parcel, codec: Codec, group: Group, shares: Shares) -> Pending:
        x = parcel.values
        there_and_back = 2 * (group.size - 1) * x.nbytes // group.size
        return Pending(group.all_reduce(x, "max"), lambda: x, 1, there_and_back, there_and_back)


HIGHEST: Aggregator = _Highest()


def _scaled(x: Tensor, factor: float) -> Tensor:
    if factor == 0:
        return x.zero_()  # not a product, which would let a NaN through
    return x if factor == 1 else x.mul_(factor)


def _encoded(x: Tensor, codec: Codec, residual: Tensor | None) -> Parcel:
    if residual is None:
        return Parcel(x, codec.encode(x), x)
    assert isinstance(codec, ErrorFeedback)
    return Parcel(x, codec.encode_with(x, residual), torch.empty_like(x))


def _gathered(parcel: Parcel, group: Group) -> tuple[list[Tensor], Work, int]:
    wire = parcel.wire
    assert wire is not None
    everyone = torch.empty(group.size * wire.numel(), dtype=wire.dtype, device=wire.device)
    work = group.all_gather(everyone, wire)
    return list(everyone.view(group.size, -1)), work, wire.nbytes


def _parts(x: Tensor, count: int) -> list[Tensor]:
    """Cut `x` into `count` parts of the same size, the last ones shorter or empty."""
    size = -(-x.numel() // count)
    return [x[min(k * size, x.numel()) : min((k + 1) * size, x.numel())] for k in range(count)]
