# SPDX-License-Identifier: Apache-2.0
"""How one kind of value is combined: what each rank sends, how the values are summed, and how the result is applied.

This is the plain case; other ways to sum are in `aggregate.py`, weights with an anchor in `anchored.py`, and agreement
one round late in `eager.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.base.checks import check_number
from farflung.base.errors import ConfigError, Unsupported
from farflung.base.sizes import CAP_BYTES
from farflung.base.torch_internals import foreach_copy_, foreach_lerp
from farflung.codec.base import Codec, Identity
from farflung.comm.bucket import Buckets
from farflung.comm.group import Group, Op, Work
from farflung.methods.momentum import OuterSGD
from farflung.methods.weighting import Decision

Ways: TypeAlias = "tuple[Aggregator, Aggregator]"  # of floating values and of whole numbers
MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Payload:
    """A rank's part of one bucket."""

    values: Tensor  # `[n]`; under error feedback they have become the residual, once there is a wire
    wire: Tensor | None  # the encoded bytes to send. None: they are encoded when the exchange starts
    out: Tensor  # `[n]`, where the result goes; it may be `values`
    weight: float = 1.0  # this rank's; with 0 nothing of it counts, so error feedback keeps it for a later round
    anchor: Tensor | None = None  # `[n]`, what the values are deltas from, where they are; maybe in the host's memory
    num_parts: int = 1  # of the wire, one for each rank if these sum a part each; they have as many bytes, padded


@dataclass(frozen=True)
class Pending:
    """A bucket on its way."""

    work: Work
    # From how much each rank counts to `[n]`, the same bits on every rank, and the divisor that makes it the aggregate.
    decode: Callable[[Decision], tuple[Tensor, float]]
    num_bytes: int  # that this rank puts on the wire for it; as many come

    def wait(self, decision: Decision) -> tuple[Tensor, float]:
        """Return the sum over the ranks and what to divide it by."""
        self.work.wait()
        return self.decode(decision)


class Aggregator(Protocol):
    """Starts the exchange of one bucket; all ranks call it with the same codec.

    A rank knows its own weight when it starts, and those of the others when it decodes: values travel with the votes.
    """

    agrees: ClassVar[bool] = True  # all ranks get the same bits
    weighs_work: ClassVar[bool] = True  # a rank that has done more counts for more
    is_radial: ClassVar[bool] = False  # the mean of each tensor gets the mean norm of the replicas' values
    not_eager: ClassVar[str] = ""  # why a rank's term in it can't be replaced a round later; empty if it can

    @property
    def trim(self) -> int:
        """How many of the largest values of each element don't count, and of the smallest."""
        return 0

    @property
    def needs_anchor(self) -> str:
        """Why it can't average weights; empty if it can."""
        return ""

    def rounding_once(self) -> Aggregator:
        """Return it with one hop, so that a codec rounds each value once."""
        return self

    def lengths(self, buckets: Buckets, embeddings: Sequence[bool]) -> Any:
        """Return the `Lengths` of a round; None if the mean keeps its own length."""
        return None

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Payload:
        """Do the part of the work on `x` `[n]` that does not need this rank's weight."""

    def start(self, payload: Payload, codec: Codec, group: Group, number: int) -> Pending:
        """Start sending a payload, which is used up. `number` is the same on all ranks and grows with each round."""


@dataclass(frozen=True)
class Mean(Aggregator):
    """The weighted mean: each rank scales its values by its weight, and one all-reduce sums them on the way.

    A weight of 1 scales nothing, so that sums which fit into fp32 stay exact.
    """

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Payload:
        if not codec.linear:
            raise Unsupported(f"Mean uses an all-reduce, but payloads of {codec} can't be summed. Use GatherMean().")
        return Payload(x, None, x)

    def start(self, payload: Payload, codec: Codec, group: Group, number: int) -> Pending:
        x = payload.values
        if payload.weight == 0:
            x.zero_()  # not a product, which would keep a NaN
        elif payload.weight != 1:
            x.mul_(payload.weight)
        wire = codec.encode(x)
        return _all_reduced(wire, group, "sum", lambda decision: (codec.decode(wire, payload.out), decision.total))


@dataclass(frozen=True)
class Max(Aggregator):
    """The largest value of each element, for counters; codec and weight have no effect."""

    def prepare(self, x: Tensor, codec: Codec, group: Group, residual: Tensor | None) -> Payload:
        return Payload(x, x, x)

    def start(self, payload: Payload, codec: Codec, group: Group, number: int) -> Pending:
        return _all_reduced(payload.values, group, "max", lambda decision: (payload.values, 1))


class Averaged:
    """local <- aggregate(local): the weights themselves, or buffers. Nothing is kept between rounds.

    Attributes:
        buckets: of the values; their buffers hold this rank's values, then the aggregate.
        is_anchored: ranks exchange deltas from an anchor, whose norm tells how far this rank has moved.
    """

    is_anchored = False

    def __init__(self, buckets: Buckets, aggregator: Aggregator, codec: Codec) -> None:
        self.buckets = buckets
        self.aggregator = aggregator
        self.codec = codec
        self._residuals: list[Tensor] = []  # of error feedback, one for each bucket
        self._num_loaded = 0  # of the first buckets, whose buffers hold what this rank brings

    def bring(self, k: int) -> Tensor:
        """Fill the buffer of bucket `k` with this rank's values, and return it."""
        return self.buckets.pack(k)

    def load(self) -> None:
        """Fill as many buffers as there are, beginning with the first bucket."""
        self._num_loaded = min(len(self.buckets), self.buckets.num_buffers)
        for k in range(self._num_loaded):
            self.bring(k)

    def measure(self) -> tuple[float, float]:
        """Fill the buffers, and check all values.

        Returns:
            The norm of this rank's values, which is finite if and only if all of them are; without an anchor it is 0 or
            NaN, which takes the cheapest pass over memory. And the largest magnitude if the codec has a limit, else 0.
        """
        largest, seen = [], []
        for k in reversed(range(len(self.buckets))):
            if self.codec.limit < math.inf:
                low, high = torch.aminmax(self.bring(k))
                largest.append(torch.maximum(-low, high))
                seen.append(self.buckets.square(k, self.buckets.flat(k)))
            elif not self.is_anchored and k >= self.buckets.num_buffers and self.buckets.is_coarse(k):
                seen += [piece.sum(dtype=self.buckets.dtype) for piece in self.buckets.pieces(k)]
            else:
                seen.append(self.buckets.square(k, self.bring(k)))
        self._num_loaded = min(len(self.buckets), self.buckets.num_buffers)
        total = float(torch.stack(seen).sum(dtype=torch.float64)) if seen else 0.0
        if not math.isfinite(total):  # perhaps a sum of large finite values
            pieces = chain.from_iterable(map(self.buckets.pieces, range(len(self.buckets))))
            total = 1e300 if all(bool(torch.isfinite(piece).all()) for piece in pieces) else math.nan
        norm = math.sqrt(total) if self.is_anchored else 0.0 * total
        return norm, float(torch.stack(largest).max()) if largest else 0.0

    def prepare(self, k: int, group: Group) -> Payload:
        """Encode bucket `k`, with the residual of the last round, as far as this rank's weight is not needed."""
        if k >= self._num_loaded:
            self.bring(k)
        flat = self.buckets.flat(k)
        residual = self._residuals[k].to(flat.device) if self._residuals else None
        return self.aggregator.prepare(flat, self.codec, group, residual)

    def sent(self, payload: Payload) -> Tensor:
        """Return what the other ranks decode of a payload that is not on its way yet, `[n]`."""
        wire = self.codec.encode(payload.values) if payload.wire is None else payload.wire
        if wire is payload.values:
            return wire
        sent = torch.empty_like(payload.values)
        for part, row in zip(parts_of(sent, payload.num_parts), wire.chunk(payload.num_parts), strict=True):
            self.codec.decode(row if payload.num_parts == 1 else row[: self.codec.wire_bytes(part.numel())], part)
        return sent

    def forget(self) -> None:
        """Mark the buffers as used up."""
        self._num_loaded = 0

    def apply(self, k: int, payload: Payload, result: Tensor, divisor: float) -> None:
        self.buckets.unpack(k, divisor)

    def agreed(self, k: int) -> Sequence[Tensor]:
        """Return bucket `k` of the agreed values, tensor by tensor; call it right after a round was applied."""
        return self.buckets.pieces(k)

    def tune(self, settings: OuterSGD) -> None:
        """Give the outer optimizer other settings, if there is one."""

    def adopt(self) -> None:
        """local <- anchor, if there is one."""

    def lend(self) -> None:
        """local <- the values to evaluate between rounds, if they are kept."""

    def keep(self) -> None:
        """Keep the values to evaluate, right after a round, if they don't follow from the rest of the state."""

    def mix(self, share: float) -> None:
        """mean <- mean + share * (values of the last round - mean), if a running mean is kept; 1 begins it."""

    def is_adopted(self) -> bool:
        """Return whether the local weights are those of the anchor, if there is one."""
        return True

    def reset_anchor(self, is_set: bool = True) -> None:
        """anchor <- local, if there is one.

        Args:
            is_set: somebody has set the weights; otherwise they are where the outer optimizer has led.
        """

    def rows(self) -> dict[str, list[Tensor]]:
        """Return the state that each element has between rounds, by name: one flat tensor per bucket."""
        return {}

    def continue_from(self, other: Averaged) -> None:
        """Take over the state of another agreement that does not belong to single elements."""

    def replicated(self) -> Any:
        """Return copies of the state that a newcomer begins with: here the values, equal on all right after a round."""
        return [[piece.clone() for piece in self.buckets.pieces(k)] for k in range(len(self.buckets))]

    def join(self, replicated: Any, keeps: bool = False) -> None:
        """Take over the state that `replicated` returned on another rank, including the values.

        Args:
            keeps: if there is an anchor, continue as far from the new one as from the one before.
        """
        check_cut([*chain(*replicated)], [*chain(*map(self.buckets.pieces, range(len(self.buckets))))])
        for k, pieces in enumerate(replicated):
            foreach_copy_(self.buckets.pieces(k), pieces)

    def state_dict(self) -> dict[str, Any] | None:
        return None

    def load_state_dict(self, state: Any) -> None:
        """Take over a state that `state_dict` returned."""


class Evaluated(Averaged):
    """Values that are evaluated as they were after the last round, or by their running mean over rounds."""

    _averages: Sequence[Tensor] = ()  # one flat tensor per bucket; none: no mean is kept

    def latest(self, k: int) -> Tensor:
        """Return bucket `k` of the values of the last round, `[sizes[k]]`, on the buckets' device."""
        raise NotImplementedError

    def lend(self) -> None:
        for k in range(len(self.buckets)):
            values = self._averages[k].to(self.buckets.flat(k).device) if self._averages else self.latest(k)
            foreach_copy_(self.buckets.pieces(k), self.buckets.cut(k, values))

    def mix(self, share: float) -> None:
        for k, mean in enumerate(self._averages):
            here = mean.to(self.buckets.flat(k).device)  # whose bits those of other replicas are
            self.blend(here, k, share)
            mean.copy_(here)

    def blend(self, mean: Tensor, k: int, share: float) -> None:
        """Bring `mean` a share of the way to `latest(k)`, in place."""
        mean.lerp_(self.latest(k), share)

    def load_averages(self, means: Sequence[Tensor] | None) -> None:
        """Take over saved means, if any are kept here; None: they begin here."""
        for mean, saved in zip(self._averages, means or (), strict=False):
            mean.copy_(saved)
        if means is None:
            self.mix(1.0)


class AgreedBuffers(Evaluated):
    """Buffers, to be evaluated with weights of the same round."""

    def __init__(self, buckets: Buckets, aggregator: Aggregator, codec: Codec, has_mean: bool) -> None:
        super().__init__(buckets, aggregator, codec)
        self._agreed = [buckets.pack(k).clone() for k in range(len(buckets))]
        self._averages = [values.clone() for values in self._agreed] if has_mean else []

    def latest(self, k: int) -> Tensor:
        return self._agreed[k]

    def keep(self) -> None:
        for k, values in enumerate(self._agreed):
            foreach_copy_(self.buckets.cut(k, values), self.buckets.pieces(k))

    def reset_anchor(self, is_set: bool = True) -> None:
        self.keep()
        if is_set:
            self.mix(1.0)

    def rows(self) -> dict[str, list[Tensor]]:
        return {"agreed": self._agreed} | ({"average": [*self._averages]} if self._averages else {})

    def replicated(self) -> Any:
        if self._averages:
            return {"chunks": [x.clone() for x in self._agreed], "average": [x.clone() for x in self._averages]}
        return [[piece.clone() for piece in self.buckets.cut(k, values)] for k, values in enumerate(self._agreed)]

    def join(self, replicated: Any, keeps: bool = False) -> None:
        is_cut = not isinstance(replicated, Mapping)
        cut = replicated if is_cut else [self.buckets.cut(k, x) for k, x in enumerate(replicated["chunks"])]
        super().join(cut, keeps)
        self.keep()
        self.load_averages(None if is_cut else replicated["average"])

    def state_dict(self) -> dict[str, Any] | None:
        return {name: [value.clone() for value in values] for name, values in self.rows().items()}

    def load_state_dict(self, state: Any) -> None:
        for value, saved in zip(self._agreed, state["agreed"], strict=True):
            value.copy_(saved)
        self.load_averages(state.get("average"))


class NewParameters(Averaged):
    """local <- local + (mean - what was sent): parameters in their first round, whose mean becomes their anchor."""

    def __init__(self, buckets: Buckets, aggregator: Aggregator) -> None:
        super().__init__(buckets, aggregator, Identity())
        self.before: dict[int, Tensor] = {}  # what was sent, by bucket
        self.means: dict[int, Tensor] = {}  # that were applied, by bucket

    def prepare(self, k: int, group: Group) -> Payload:
        payload = super().prepare(k, group)
        self.before[k] = payload.values.clone()
        return payload

    def apply(self, k: int, payload: Payload, result: Tensor, divisor: float) -> None:
        mean = self.means[k] = result / divisor
        sent = self.buckets.cut(k, self.before.pop(k))
        for local, value, before in zip(self.buckets.pieces(k), self.buckets.cut(k, mean), sent, strict=True):
            local.copy_(torch.where(local == before, value, local + (value - before)))  # with the steps made meanwhile


class Merge(Protocol):
    """Merges the new anchor into the local weights, in place."""

    def __call__(self, local: Sequence[Tensor], anchor: Sequence[Tensor]) -> None:
        """Change `local`; `anchor` has as many tensors of the same shapes, in fp32."""


@dataclass(frozen=True)
class Replace:
    """local <- anchor."""

    def __call__(self, local: Sequence[Tensor], anchor: Sequence[Tensor]) -> None:
        foreach_copy_(local, anchor)


@dataclass(frozen=True)
class Blend:
    """local <- alpha * local + (1 - alpha) * anchor, which keeps part of the steps done while the round was in flight.

    Args:
        alpha: 0 discards those steps, 1 discards the anchor.

    Raises:
        ConfigError: `alpha` is not from 0 to 1.

    Source: Streaming DiLoCo (arXiv:2501.18512), with alpha 0.5.
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha, least=0, most=1)

    def __call__(self, local: Sequence[Tensor], anchor: Sequence[Tensor]) -> None:
        """Interpolate in fp32 and round once; alpha 0 copies, alpha 1 changes nothing."""
        if self.alpha == 0:
            foreach_copy_(local, anchor)
        elif self.alpha < 1:
            blended = [piece.to(point.dtype) for piece, point in zip(local, anchor, strict=True)]
            foreach_copy_(local, foreach_lerp(list(anchor), blended, self.alpha))


def check_cut(given: Sequence[Tensor], here: Sequence[Tensor]) -> None:
    """Raise ConfigError unless both are cut into the same pieces: values are copied by position."""
    if [x.shape for x in given] != [x.shape for x in here]:
        raise ConfigError(
            f"The given state is cut into {[x.numel() for x in given[:5]]} values, and so on, here it would be "
            f"{[x.numel() for x in here[:5]]}. Continue with the version of Farflung that wrote it."
        )


def average(
    tensors: Sequence[Tensor], group: Group, decision: Decision, cap_bytes: int = CAP_BYTES, how: Ways = (Mean(), Max())
) -> int:
    """Replace `tensors` by their weighted mean over the ranks, at once: a collective outside of rounds.

    Args:
        tensors: floating ones of any shapes, the same on every rank; or whole numbers, whose largest are taken instead.
        cap_bytes: how much is copied and sent at a time.
        how: the values are aggregated, if not so.

    Returns:
        The bytes that this rank sent, which are as many as it received.
    """
    is_float = all(tensor.is_floating_point() for tensor in tensors)
    widest = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    dtype, aggregator = (widest, how[0]) if is_float else (torch.int64, how[1])
    buckets, sent = Buckets(tensors, dtype, cap_bytes=cap_bytes), 0
    for k in range(len(buckets)):
        flat = buckets.pack(k)
        payload = aggregator.prepare(flat, Identity(), group, None)
        pending = aggregator.start(replace(payload, weight=decision.factors[group.rank]), Identity(), group, 0)
        buckets.unpack(k, pending.wait(decision)[1])
        sent += pending.num_bytes
    return sent


def _all_reduced(wire: Tensor, group: Group, op: Op, decode: Callable[[Decision], tuple[Tensor, float]]) -> Pending:
    return Pending(group.all_reduce(wire, op), decode, 2 * (group.size - 1) * wire.nbytes // group.size)


def parts_of(x: Tensor, count: int) -> list[Tensor]:
    """Cut `x` into `count` parts of the same size, the last ones shorter or empty."""
    size = -(-x.numel() // count)
    return [x[min(k * size, x.numel()) : min((k + 1) * size, x.numel())] for k in range(count)]
