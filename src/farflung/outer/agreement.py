# SPDX-License-Identifier: Apache-2.0
"""How one kind of values comes together: what a rank brings of them, and what it makes of what comes back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from farflung.base.torch_internals import foreach_copy_
from farflung.codec.base import Codec
from farflung.codec.feedback import ErrorFeedback
from farflung.comm.bucket import Buckets
from farflung.comm.group import Group
from farflung.outer.aggregate import Aggregator, Payload
from farflung.outer.anchor import Anchor
from farflung.outer.merge import Merge


class Averaged:
    """local <- aggregate(local): the weights themselves, or buffers. Nothing is kept between rounds.

    Attributes:
        buckets: of the values; their buffers hold what this rank brings, then what comes back.
        is_anchored: deltas from an anchor are exchanged, whose norm says how far this rank has moved.
        is_eager: a rank's own moves are in its anchor before anyone else has seen them.
    """

    is_anchored: ClassVar[bool] = False
    is_eager: ClassVar[bool] = False

    def __init__(self, buckets: Buckets, aggregator: Aggregator, codec: Codec) -> None:
        self.buckets = buckets
        self.aggregator = aggregator
        self.codec = codec
        self._residuals: list[Tensor] = []  # of error feedback, one for each bucket
        self._num_loaded = 0  # of the first buckets, whose buffers hold what this rank brings

    def bring(self, k: int) -> Tensor:
        """Fill the buffer of bucket `k` with what this rank brings, and return it."""
        return self.buckets.pack(k)

    def load(self) -> None:
        """Fill as many buffers as there are, beginning with the first bucket."""
        self._num_loaded = min(len(self.buckets), self.buckets.num_buffers)
        for k in range(self._num_loaded):
            self.bring(k)

    def measure(self) -> tuple[float, float]:
        """Fill the buffers, and look at all values.

        Returns:
            The norm of what this rank brings, which is finite if and only if all values are; of values without an
            anchor it is 0 or no number at all, found by the cheapest pass over memory. And the largest magnitude where
            the codec has a limit, else 0.
        """
        largest, seen = [], []
        for k in reversed(range(len(self.buckets))):
            if self.codec.limit < math.inf:
                low, high = torch.aminmax(self.bring(k))
                largest.append(torch.maximum(-low, high))
                seen.append(self._sum(self.buckets.flat(k)))
            elif not self.is_anchored and k >= self.buckets.num_buffers and self.buckets.is_coarse(k):
                seen += [piece.sum(dtype=self.buckets.dtype) for piece in self.buckets.pieces(k)]
            else:
                seen.append(self._sum(self.bring(k)))
        self._num_loaded = min(len(self.buckets), self.buckets.num_buffers)
        total = float(torch.stack(seen).sum(dtype=torch.float64)) if seen else 0.0
        if not math.isfinite(total):
            total = 1e300 if self._is_finite() else math.nan
        norm = math.sqrt(total) if self.is_anchored else 0.0 * total
        return norm, float(torch.stack(largest).max()) if largest else 0.0

    def prepare(self, k: int, group: Group) -> Payload:
        """Encode bucket `k`, with what was left over last time, as far as this rank's weight is not needed."""
        if k >= self._num_loaded:
            self.bring(k)
        residual = self._residuals[k] if self._residuals else None
        return self.aggregator.prepare(self.buckets.flat(k), self.codec, group, residual)

    def forget(self) -> None:
        """The buffers are used up."""
        self._num_loaded = 0

    def apply(self, k: int, payload: Payload, result: Tensor, divisor: float) -> None:
        """Bring `result / divisor` into the model."""
        self.buckets.unpack(k, divisor)

    def finish(self, has_worked: bool) -> None:
        """Do what is due at the end of a round's time, whether or not anything has come back.

        Args:
            has_worked: this rank has done something since the last round.
        """

    def agreed(self, k: int) -> Sequence[Tensor]:
        """Return bucket `k` of what was agreed on, tensor by tensor; call it right after a round was applied."""
        return self.buckets.pieces(k)

    def adopt(self) -> None:
        """local <- anchor, where there is one."""

    def reset_anchor(self) -> None:
        """anchor <- local, where there is one."""

    def rows(self) -> dict[str, list[Tensor]]:
        """Return what is kept of each element between rounds, by name: one flat tensor a bucket."""
        return {}

    def continue_from(self, other: Averaged) -> None:
        """Take over what another agreement keeps that is not of single elements."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return copies of what is kept between rounds."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Take over what `state_dict` returned."""

    def _sum(self, x: Tensor) -> Tensor:
        return torch.dot(x, x) if self.is_anchored else x.sum()

    def _is_finite(self) -> bool:
        """Look at element by element: a sum of large finite values can overflow."""
        pieces = [piece for k in range(len(self.buckets)) for piece in self.buckets.pieces(k)]
        return all(bool(torch.isfinite(piece).all()) for piece in pieces)


class Anchored(Averaged):
    """anchor <- outer_opt(anchor, aggregate(codec(anchor - local))); local <- merge(local, anchor)."""

    is_anchored = True

    def __init__(self, buckets: Buckets, aggregator: Aggregator, codec: Codec, anchor: Anchor, merge: Merge) -> None:
        super().__init__(buckets, aggregator, codec)
        self._anchor = anchor
        self._merge = merge
        if isinstance(codec, ErrorFeedback):
            self._residuals = [torch.zeros_like(chunk) for chunk in anchor.chunks]

    def bring(self, k: int) -> Tensor:
        """Fill the buffer with anchor - local."""
        return self._anchor.delta(k)

    def apply(self, k: int, payload: Payload, result: Tensor, divisor: float) -> None:
        """Move the anchor, then merge. Only now is what was sent taken out of the residual."""
        if self._residuals and payload.weight:
            self._residuals[k].copy_(payload.values)
        self._advance(k, result if divisor == 1 else result.div_(divisor))

    def _advance(self, k: int, mean: Tensor) -> None:
        self._anchor.advance(k, mean)
        self._merge(self.buckets.pieces(k), self._anchor.views(k))

    def agreed(self, k: int) -> Sequence[Tensor]:
        """Return the anchor."""
        return self._anchor.views(k)

    def adopt(self) -> None:
        """local <- anchor."""
        for k in range(len(self.buckets)):
            foreach_copy_(self.buckets.pieces(k), self._anchor.views(k))

    def reset_anchor(self) -> None:
        """anchor <- local."""
        for k, chunk in enumerate(self._anchor.chunks):
            chunk.detach().copy_(self.buckets.pack(k))

    def rows(self) -> dict[str, list[Tensor]]:
        """Return the anchor, what the outer optimizer keeps, and the residuals."""
        rows = {"anchor": [chunk.detach() for chunk in self._anchor.chunks], **self._anchor.optimizer_rows()}
        return rows | ({"residual": self._residuals} if self._residuals else {})

    def continue_from(self, other: Averaged) -> None:
        """Take over the outer optimizer's settings."""
        assert isinstance(other, Anchored)
        self._anchor.go_on_like(other._anchor)

    def state_dict(self) -> dict[str, Any] | None:
        """Return copies of the anchor and the residuals."""
        return {"anchor": self._anchor.state_dict(), "residuals": [residual.clone() for residual in self._residuals]}

    def load_state_dict(self, state: Any) -> None:
        """Take over what `state_dict` returned."""
        self._anchor.load_state_dict(state["anchor"])
        for residual, saved in zip(self._residuals, state["residuals"], strict=True):
            residual.copy_(saved)


class Eager(Anchored):
    """The mean of the last round, in which this rank's own stale term is replaced by what it has done since.

        g = mean(t-1) + f (delta(t) - sent(t-1));  anchor <- outer_opt(anchor, g);  local <- anchor;  send delta(t)

    f is this rank's share of the mean, 1/M where all did alike; of a term it is the same when it is put in and when it
    is taken out. Anchors differ between ranks.

    Args:
        num_ranks: M.

    Source: eager updates (arXiv:2502.12996).
    """

    is_eager = True

    def __init__(
        self,
        buckets: Buckets,
        aggregator: Aggregator,
        codec: Codec,
        anchor: Anchor,
        merge: Merge,
        num_ranks: int,
    ) -> None:
        super().__init__(buckets, aggregator, codec, anchor, merge)
        self._num_ranks = num_ranks
        self._share = 1 / num_ranks  # f of what was sent last; 0 where that was nothing that could count
        self._sent = [torch.zeros_like(chunk) for chunk in anchor.chunks]
        self._means: dict[int, Tensor] = {}  # of the round that has come back, by bucket
        self._next_share = 0.0

    def bring(self, k: int) -> Tensor:
        """Fill the buffer with what `finish` has found a moment ago."""
        return self.buckets.flat(k).copy_(self._sent[k])

    def prepare(self, k: int, group: Group) -> Payload:
        """Encode, and remember what the others will see of it."""
        payload = super().prepare(k, group)
        if payload.wire is not None:
            self.codec.decode(payload.wire, self._sent[k])
        return payload

    def apply(self, k: int, payload: Payload, result: Tensor, divisor: float) -> None:
        """Keep it for `finish`, which has all buckets."""
        self._means[k] = result / divisor
        self._next_share = payload.weight / divisor

    def finish(self, has_worked: bool) -> None:
        """Move the anchor by what has come back and by what this rank has done.

        If nothing is new, of this rank or of others, momentum alone would move it, so it stays. So it does if this
        rank's weights are not finite: the vote that follows will say so.
        """
        means, self._means = self._means, {}
        if not has_worked and (not means or self._num_ranks == 1):
            self._send_nothing()
            return
        share = self._next_share if means else self._share or 1 / self._num_ranks
        for k, mean in means.items() if self._share else ():
            mean.sub_(self._sent[k], alpha=self._share)
        for k, sent in enumerate(self._sent):
            sent.copy_(self._anchor.delta(k))
        is_finite = all(bool(torch.isfinite(sent).all()) for sent in self._sent)
        self._share = share if is_finite else 0.0
        if is_finite:
            for k, sent in enumerate(self._sent):
                mean = means[k] if k in means else torch.zeros_like(sent)
                self._advance(k, mean.add_(sent, alpha=share))

    def reset_anchor(self) -> None:
        """anchor <- local, and nothing is under way."""
        super().reset_anchor()
        self._send_nothing()

    def rows(self) -> dict[str, list[Tensor]]:
        """Return what is kept, with what is under way."""
        return super().rows() | {"sent": self._sent}

    def continue_from(self, other: Averaged) -> None:
        """Take over the share too."""
        super().continue_from(other)
        assert isinstance(other, Eager)
        self._share = other._share

    def _send_nothing(self) -> None:
        for sent in self._sent:
            sent.zero_()

    def state_dict(self) -> dict[str, Any] | None:
        """Return copies, with what is under way."""
        state = super().state_dict() or {}
        return state | {"sent": [sent.clone() for sent in self._sent], "share": self._share}

    def load_state_dict(self, state: Any) -> None:
        """Take over what `state_dict` returned."""
        super().load_state_dict(state)
        self._share = state["share"]
        for sent, saved in zip(self._sent, state["sent"], strict=True):
            sent.copy_(saved)
