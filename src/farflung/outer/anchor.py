# SPDX-License-Identifier: Apache-2.0
"""The point that all replicas agree on, in fp32, and the outer optimizer that moves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.base.errors import ConfigError
from farflung.comm.bucket import Buckets

MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]


class Anchor:
    """One flat tensor a bucket, so that the outer optimizer can go on bucket by bucket, as they land.

    That needs no memory but the anchor, the optimizer's state and the buffers of the buckets.

    Args:
        buckets: of the trainable parameters; their values now are the first anchor.
        make_optimizer: any `torch.optim` optimizer, such as `functools.partial(torch.optim.SGD, lr=0.7)`.
        on_cpu: keep anchor and optimizer state in the host's memory (pinned, where the buckets are on a GPU).

    Raises:
        ConfigError: the optimizer made more than one group of the parameters it was given.
    """

    def __init__(self, buckets: Buckets, make_optimizer: MakeOptimizer, on_cpu: bool = False) -> None:
        self._buckets = buckets
        self._is_away = on_cpu and any(not buckets.flat(k).is_cpu for k in range(len(buckets)))
        self.chunks = [nn.Parameter(self._kept(buckets.pack(k))) for k in range(len(buckets))]
        self._views = [] if self._is_away else [buckets.cut(k, c.detach()) for k, c in enumerate(self.chunks)]
        self.optimizer = make_optimizer(self.chunks) if self.chunks else None
        if self.optimizer is not None and len(self.optimizer.param_groups) != 1:
            raise ConfigError("The outer optimizer must keep its parameters in one parameter group.")

    def _kept(self, flat: Tensor) -> Tensor:
        return flat.cpu().pin_memory() if self._is_away else flat.clone()

    def views(self, k: int) -> list[Tensor]:
        """Return bucket `k` of the anchor cut as the parameters are, where these are."""
        if not self._is_away:
            return self._views[k]
        return self._buckets.cut(k, self.chunks[k].detach().to(self._buckets.flat(k).device, non_blocking=True))

    def delta(self, k: int) -> Tensor:
        """Fill the buffer of bucket `k` with anchor - local and return it."""
        local = self._buckets.pack(k)
        point = self.chunks[k].detach()
        return torch.sub(point.to(local.device, non_blocking=True) if self._is_away else point, local, out=local)

    def advance(self, k: int, delta: Tensor) -> None:
        """Let the outer optimizer move bucket `k` of the anchor, with `delta` `[sizes[k]]` as its gradient."""
        assert self.optimizer is not None
        chunk = self.chunks[k]
        group = self.optimizer.param_groups[0]
        chunk.grad = delta.cpu() if self._is_away else delta
        group["params"] = [chunk]  # or each step would look at all chunks to find the one that has a gradient
        try:
            self.optimizer.step()
        finally:
            group["params"] = self.chunks
            chunk.grad = None

    def optimizer_rows(self) -> dict[str, list[Tensor]]:
        """Return what the outer optimizer keeps of each element, by name: one flat tensor a bucket."""
        if self.optimizer is None:
            return {}
        states = [self.optimizer.state.get(chunk, {}) for chunk in self.chunks]
        names = [name for name, value in states[0].items() if isinstance(value, Tensor) and value.dim() == 1]
        return {name: [state[name] for state in states] for name in names if all(name in state for state in states)}

    def go_on_like(self, other: Anchor) -> None:
        """Take over the settings of another anchor's optimizer, and what it keeps, 0 for each element as yet."""
        if self.optimizer is None or other.optimizer is None:
            return
        (mine,), (theirs,) = self.optimizer.param_groups, other.optimizer.param_groups
        mine.update({name: value for name, value in theirs.items() if name != "params"})
        state = other.optimizer.state.get(other.chunks[0], {})
        for chunk in self.chunks:
            for name, value in state.items():
                is_row = isinstance(value, Tensor) and value.dim() == 1
                self.optimizer.state[chunk][name] = torch.zeros_like(chunk) if is_row else _cloned(value)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the anchor and of the optimizer's state."""
        optimizer = None if self.optimizer is None else _cloned(self.optimizer.state_dict())
        return {"chunks": [chunk.detach().clone() for chunk in self.chunks], "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        with torch.no_grad():
            for chunk, saved in zip(self.chunks, state["chunks"], strict=True):
                chunk.copy_(saved)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(_cloned(state["optimizer"]))


def _cloned(node: Any) -> Any:
    if isinstance(node, Tensor):
        return node.detach().clone()
    if isinstance(node, dict):
        return {key: _cloned(value) for key, value in node.items()}
    return [_cloned(value) for value in node] if isinstance(node, list) else node
