# SPDX-License-Identifier: Apache-2.0
"""Weights with an anchor: the point that all replicas agree on, in fp32, and the outer optimizer that moves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from farflung.base.errors import ConfigError
from farflung.base.torch_internals import foreach_copy_
from farflung.codec.base import Codec
from farflung.codec.feedback import ErrorFeedback
from farflung.comm.bucket import Buckets
from farflung.comm.group import Group
from farflung.methods.agreement import Aggregator, Averaged, Evaluated, MakeOptimizer, Merge, Payload, check_cut
from farflung.methods.momentum import OuterSGD, lead_of, look_ahead

_CACHED = 2**16  # values of several tensors that stay in a processor's cache from one operation to the next


class Anchored(Evaluated):
    """anchor <- outer_opt(anchor, aggregate(codec(anchor - local))); local <- merge(local, anchor).

    The anchor is one flat tensor per bucket, so that the outer optimizer can step bucket by bucket, as they land. That
    needs no memory but the anchor, the optimizer's state and the buffers of the buckets.

    Args:
        buckets: of the trainable parameters; their values now are the first anchor.
        make_optimizer: any `torch.optim` optimizer, such as `functools.partial(torch.optim.SGD, lr=0.7)`.
        on_cpu: keep anchor, optimizer state and mean in the host's memory (pinned, if the buckets are on a GPU).
        has_mean: a running mean of the slow weights is kept.

    Raises:
        ConfigError: the optimizer made more than one group of the parameters it was given.
    """

    is_anchored = True

    def __init__(
        self,
        buckets: Buckets,
        aggregator: Aggregator,
        codec: Codec,
        make_optimizer: MakeOptimizer,
        merge: Merge,
        on_cpu: bool,
        has_mean: bool,
    ) -> None:
        super().__init__(buckets, aggregator, codec)
        self._merge = merge
        self._is_away = on_cpu and any(not buckets.flat(k).is_cpu for k in range(len(buckets)))
        self._chunks = [nn.Parameter(self._kept(buckets.pack(k))) for k in range(len(buckets))]
        self._views = [] if self._is_away else [buckets.cut(k, c.detach()) for k, c in enumerate(self._chunks)]
        self._optimizer = make_optimizer(self._chunks) if self._chunks else None
        if self._optimizer is not None and len(self._optimizer.param_groups) != 1:
            raise ConfigError("The outer optimizer must keep its parameters in one parameter group.")
        self._averages = [self._kept(chunk.detach()) for chunk in self._chunks] if has_mean else []
        if isinstance(codec, ErrorFeedback):
            self._residuals = [torch.zeros_like(chunk) for chunk in self._chunks]

    def _kept(self, flat: Tensor) -> Tensor:
        return flat.cpu().pin_memory() if self._is_away else flat.clone()

    def tune(self, settings: OuterSGD) -> None:
        if self._optimizer is not None:
            settings.give(self._optimizer)

    def bring(self, k: int) -> Tensor:
        """Fill the buffer with anchor - local."""
        local = self.buckets.pack(k)
        point = self._chunks[k].detach()
        return torch.sub(point.to(local.device, non_blocking=True) if self._is_away else point, local, out=local)

    def prepare(self, k: int, group: Group) -> Payload:
        return replace(super().prepare(k, group), anchor=self._chunks[k].detach())

    def apply(self, k: int, payload: Payload, result: Tensor, divisor: float) -> None:
        """Move the anchor, then merge. Only now subtract the values that were sent from the residual."""
        if self._residuals and payload.weight:
            self._residuals[k].copy_(payload.values)
        self._advance(k, result if divisor == 1 else result.div_(divisor))

    def _advance(self, k: int, mean: Tensor) -> None:
        """Step the outer optimizer on bucket `k` of the anchor, with `mean` `[sizes[k]]` as its gradient; merge."""
        assert self._optimizer is not None
        group = self._optimizer.param_groups[0]
        with self._beside_buckets(k) as chunk:
            chunk.grad = mean.to(chunk.device)
            group["params"] = [chunk]  # or each step would look at all chunks to find the one that has a gradient
            try:
                self._optimizer.step()
                group["look_ahead"] = look_ahead(group)
            finally:
                group["params"] = self._chunks
                chunk.grad = None
            self._merge(self.buckets.pieces(k), self.agreed(k))

    @contextmanager
    def _beside_buckets(self, k: int) -> Iterator[nn.Parameter]:
        """Yield bucket `k` of the anchor; with its optimizer's state it is on the buckets' device within the block.

        So an anchor that is kept in the host's memory moves by the same bits, and by the device's speed.
        """
        chunk = self._chunks[k]
        if not self._is_away or self._optimizer is None:
            yield chunk
            return
        home, state, device = chunk.data, self._optimizer.state[chunk], self.buckets.flat(k).device
        rows = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.dim() == 1}
        chunk.data = home.to(device, non_blocking=True)
        state.update({name: row.to(device, non_blocking=True) for name, row in rows.items()})
        try:
            yield chunk
        finally:
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() == 1:
                    state[name] = rows[name].copy_(value) if name in rows else self._kept(value)
            chunk.data = home.copy_(chunk.data)

    def agreed(self, k: int) -> list[Tensor]:
        if not self._is_away:
            return self._views[k]
        return self.buckets.cut(k, self._chunks[k].detach().to(self.buckets.flat(k).device, non_blocking=True))

    def adopt(self) -> None:
        for k in range(len(self.buckets)):
            foreach_copy_(self.buckets.pieces(k), self.agreed(k))

    def latest(self, k: int) -> Tensor:
        """Return the slow weights; without a momentum that looks ahead, the anchor."""
        point, momentum, ahead = self._lead(k)
        return point if momentum is None else torch.add(point, momentum, alpha=ahead)

    def blend(self, mean: Tensor, k: int, share: float) -> None:
        point, momentum, ahead = self._lead(k)
        momentum = point if momentum is None else momentum  # which then counts nothing
        size = _CACHED if mean.is_cpu else max(1, mean.numel())
        for part, target, lead in zip(*(torch.split(x, size) for x in (mean, point, momentum)), strict=True):
            part.lerp_(target, share).add_(lead, alpha=share * ahead)

    def _lead(self, k: int) -> tuple[Tensor, Tensor | None, float]:
        """Return bucket `k` of the anchor and of the momentum, on the buckets' device, and how far it looks ahead."""
        assert self._optimizer is not None
        chunk, device, (group,) = self._chunks[k], self.buckets.flat(k).device, self._optimizer.param_groups
        momentum, ahead = lead_of(self._optimizer.state.get(chunk, {}), group)
        point = chunk.detach().to(device, non_blocking=True)
        return point, None if momentum is None else momentum.to(device, non_blocking=True), ahead

    def is_adopted(self) -> bool:
        pairs = [zip(self.buckets.pieces(k), self.agreed(k), strict=True) for k in range(len(self.buckets))]
        return all(torch.equal(own, agreed.to(own)) for pair in pairs for own, agreed in pair)

    def reset_anchor(self, is_set: bool = True) -> None:
        """anchor <- local; residuals are 0."""
        if is_set and self._optimizer is not None:
            self._optimizer.param_groups[0]["look_ahead"] = 0.0
        for k, chunk in enumerate(self._chunks):
            chunk.detach().copy_(self.buckets.pack(k))
        for residual in self._residuals:
            residual.zero_()
        if is_set:
            self.mix(1.0)

    def rows(self) -> dict[str, list[Tensor]]:
        rows = {"anchor": [chunk.detach() for chunk in self._chunks]}
        if self._optimizer is not None:
            states = [self._optimizer.state.get(chunk, {}) for chunk in self._chunks]
            names = [name for name, value in states[0].items() if isinstance(value, Tensor) and value.dim() == 1]
            rows |= {
                name: [state[name] for state in states] for name in names if all(name in state for state in states)
            }
        rows |= {"average": [*self._averages]} if self._averages else {}
        return rows | ({"residual": self._residuals} if self._residuals else {})

    def continue_from(self, other: Averaged) -> None:
        """Take over the settings of another outer optimizer, and its state, with 0 for each element."""
        assert isinstance(other, Anchored)
        if self._optimizer is None or other._optimizer is None:
            return
        (mine,), (theirs,) = self._optimizer.param_groups, other._optimizer.param_groups
        mine.update({name: value for name, value in theirs.items() if name != "params"})
        state = other._optimizer.state.get(other._chunks[0], {})
        for chunk in self._chunks:
            for name, value in state.items():
                is_row = isinstance(value, Tensor) and value.dim() == 1
                self._optimizer.state[chunk][name] = torch.zeros_like(chunk) if is_row else deepcopy(value)

    def replicated(self) -> dict[str, Any]:
        optimizer = None if self._optimizer is None else deepcopy(self._optimizer.state_dict())
        shared = {"chunks": [chunk.detach().clone() for chunk in self._chunks], "optimizer": optimizer}
        return shared | ({"average": [mean.clone() for mean in self._averages]} if self._averages else {})

    def join(self, replicated: Any, keeps: bool = False) -> None:
        """Residuals go with what this rank keeps: of what it doesn't, others may have applied a part."""
        check_cut(replicated["chunks"], self._chunks)
        for k, (chunk, saved) in enumerate(zip(self._chunks, replicated["chunks"], strict=True) if keeps else ()):
            way = saved.to(chunk.device) - chunk.detach()
            local = self.buckets.pack(k)
            local.add_(way.to(local.device))
            self.buckets.unpack(k)
        self._load_anchor(replicated)
        if not keeps:
            self.adopt()
            for residual in self._residuals:
                residual.zero_()

    def _load_anchor(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for chunk, saved in zip(self._chunks, state["chunks"], strict=True):
                chunk.copy_(saved)
        if self._optimizer is not None:
            self._optimizer.load_state_dict(deepcopy(state["optimizer"]))
        self.load_averages(state.get("average"))

    def state_dict(self) -> dict[str, Any]:
        return {"anchor": self.replicated(), "residuals": [residual.clone() for residual in self._residuals]}

    def load_state_dict(self, state: Any) -> None:
        self._load_anchor(state["anchor"])
        for residual, saved in zip(self._residuals, state["residuals"], strict=True):
            residual.copy_(saved)
