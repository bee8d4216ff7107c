# SPDX-License-Identifier: Apache-2.0
"""Eager updates: a rank applies its own moves to its anchor before the others have received them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from farflung.comm.group import Group
from farflung.methods.agreement import Averaged, Payload
from farflung.methods.anchored import Anchored
from farflung.votes.ballot import Island


class Eager(Anchored):
    """The mean of the last round, in which a rank replaces its own stale term by its current one.

        g = mean(t-1) + f (delta(t) - sent(t-1));  anchor <- outer_opt(anchor, g);  local <- anchor;  send delta(t)

    f is this rank's share of the mean, 1/M if all did alike; of a term it is the same when it is put in and when it
    is taken out. Anchors differ between ranks.

    Args:
        parts: of `Anchored`.
        num_ranks: M, the number of members; it changes when replicas come or go.

    Source: eager updates (arXiv:2502.12996).
    """

    def __init__(self, *parts: Any, num_ranks: int) -> None:
        super().__init__(*parts)
        self.num_ranks = num_ranks
        self._share = 1 / num_ranks  # f of what was sent last; 0 if that was nothing that could count
        self._sent = [torch.zeros_like(chunk) for chunk in self._chunks]
        self._means: dict[int, Tensor] = {}  # of the round that has come back, by bucket
        self._next_share = 0.0

    def bring(self, k: int) -> Tensor:
        """Fill the buffer with the pseudo-gradient that `finish` has just computed."""
        return self.buckets.flat(k).copy_(self._sent[k])

    def prepare(self, k: int, group: Group) -> Payload:
        """Encode, and keep the values that the others will decode."""
        payload = super().prepare(k, group)
        if payload.wire is not None:
            self._sent[k].copy_(self.sent(payload))
        return payload

    def apply(self, k: int, payload: Payload, result: Tensor, divisor: float) -> None:
        """Keep it for `finish`, which has all buckets."""
        self._means[k] = result / divisor
        self._next_share = payload.weight / divisor

    def finish(self, has_worked: bool, island: Island) -> None:
        """Move the anchor by the mean that has arrived and by this rank's own steps, at the end of a round's time.

        If neither is new, momentum alone would move it, so it stays. It also stays if this rank's weights are not
        finite: the next vote reports that.

        Args:
            has_worked: this rank has done something since the last round.
            island: the ranks that train this replica, which must all move or all stay: a collective of theirs.
        """
        means, self._means = self._means, {}
        if not has_worked and (not means or self.num_ranks == 1):
            self._send_nothing()
            return
        share = self._next_share if means else self._share or 1 / self.num_ranks
        for k, mean in means.items() if self._share else ():
            mean.sub_(self._sent[k].to(mean.device), alpha=self._share)
        for k, sent in enumerate(self._sent):
            sent.copy_(super().bring(k))
        mine = all(bool(torch.isfinite(sent).all()) for sent in self._sent)
        is_finite = all(said for (said,) in island.gathered(mine))
        self._share = share if is_finite else 0.0
        if is_finite:
            for k, sent in enumerate(self._sent):
                mean = means[k] if k in means else torch.zeros_like(sent)
                self._advance(k, mean.add_(sent.to(mean.device), alpha=share))

    def reset_anchor(self, is_set: bool = True) -> None:
        super().reset_anchor(is_set)
        self._send_nothing()

    def rows(self) -> dict[str, list[Tensor]]:
        return super().rows() | {"sent": self._sent}

    def continue_from(self, other: Averaged) -> None:
        super().continue_from(other)
        assert isinstance(other, Eager)
        self._share = other._share

    def _send_nothing(self) -> None:
        for sent in self._sent:
            sent.zero_()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"sent": [sent.clone() for sent in self._sent], "share": self._share}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self._share = state["share"]
        for sent, saved in zip(self._sent, state["sent"], strict=True):
            sent.copy_(saved)
