# SPDX-License-Identifier: Apache-2.0
"""What a set of ranks can do together: one protocol, and its two plain forms.

Every collective starts at once and returns a `Work`; nothing may be read before `wait()`. On CUDA `wait()` makes the
current stream wait, on gloo it blocks the caller.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.base.errors import RankFailure

Op = Literal["sum", "max", "min"]

# torch 2.13 gave the flat collectives new names; older releases know the old ones only.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_NAP_S = 5e-5  # how long `meet` sleeps between two looks; a gloo collective on loopback takes 100 us and more
_WATCH_S = 0.2  # how often a waiting rank asks whether another one has left


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Block (or make the current stream wait) until the result may be read."""


class Group(Protocol):
    """Ranks that talk to each other. All tensors are contiguous; every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        """Reduce `x` in place; every rank ends with the same bits."""

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        """Fill `out` `[size * n]` with each rank's `x` `[n]`, in rank order."""

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum") -> Work:
        """Fill `out` `[n]` with this rank's part of the reduced `x` `[size * n]`."""

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        """Send part k of `x` `[size * n]` to rank k; `out` `[size * n]` holds what came, in rank order."""

    def broadcast(self, x: Tensor, src: int) -> Work:
        """Overwrite `x` with the one of rank `src`."""

    def scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int) -> Work:
        """Fill `out` with `parts[rank]` of rank `src`; the others pass None."""

    def barrier(self) -> None:
        """Return when every rank has come here."""

    def meet(self, x: Tensor) -> Tensor:
        """Gather a few numbers, `[n]` on the CPU, as `[size, n]`, and look out for ranks that left while waiting.

        Raises:
            RankFailure: a rank called `leave`; the message names it and gives its reason.
        """

    def leave(self, reason: str) -> None:
        """Tell the ranks that wait in `meet`, now or later, that this one will not come. Never blocks."""


class Done:
    """A collective that needed no one else."""

    def wait(self) -> None:
        return None


class SoloGroup:
    """One rank alone: every collective is a copy."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        return Done()

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        return self._copied(out, x)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum") -> Work:
        return self._copied(out, x)

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        return self._copied(out, x)

    def broadcast(self, x: Tensor, src: int) -> Work:
        return Done()

    def scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int) -> Work:
        assert parts is not None
        return self._copied(out, parts[0])

    def barrier(self) -> None:
        return None

    def meet(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0).clone()

    def leave(self, reason: str) -> None:
        return None

    @staticmethod
    def _copied(out: Tensor, x: Tensor) -> Work:
        out.view(-1).copy_(x.view(-1))
        return Done()


class TorchGroup:
    """The ranks of a c10d process group (the default one when none is given)."""

    def __init__(self, pg: dist.ProcessGroup | None = None) -> None:
        self.pg = pg if pg is not None else dist.group.WORLD
        assert self.pg is not None, "TorchGroup needs torch.distributed to be initialized"
        self.rank = dist.get_rank(self.pg)
        self.size = dist.get_world_size(self.pg)
        self._key = f"laconic/left/{self.pg.group_name}"
        self._speaks_cpu = "gloo" in str(dist.get_backend_config(self.pg)) or "mpi" in str(dist.get_backend(self.pg))

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        return self._started(dist.all_reduce(x, op=_REDUCE[op], group=self.pg, async_op=True))

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        return self._started(_all_gather_flat(out, x, group=self.pg, async_op=True))

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum") -> Work:
        return self._started(_reduce_scatter_flat(out, x, op=_REDUCE[op], group=self.pg, async_op=True))

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        return self._started(dist.all_to_all_single(out, x, group=self.pg, async_op=True))

    def broadcast(self, x: Tensor, src: int) -> Work:
        return self._started(dist.broadcast(x, group_src=src, group=self.pg, async_op=True))

    def scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int) -> Work:
        listed = None if parts is None else list(parts)
        return self._started(dist.scatter(out, listed, group_src=src, group=self.pg, async_op=True))

    def barrier(self) -> None:
        dist.barrier(group=self.pg)

    def meet(self, x: Tensor) -> Tensor:
        device = torch.device("cpu") if self._speaks_cpu else torch.device("cuda", torch.cuda.current_device())
        mine = x.to(device)
        everyone = mine.new_empty(self.size * mine.numel())
        work = _all_gather_flat(everyone, mine, group=self.pg, async_op=True)
        looked = time.monotonic()
        while not work.is_completed():
            time.sleep(_NAP_S)
            if time.monotonic() - looked > _WATCH_S:
                self._raise_if_left()
                looked = time.monotonic()
        work.wait()
        return everyone.cpu().view(self.size, -1)

    def leave(self, reason: str) -> None:
        dist.distributed_c10d._get_default_store().set(self._key, f"rank {self.rank} left: {reason}")

    def _raise_if_left(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        if store.check([self._key]):
            raise RankFailure(store.get(self._key).decode())

    @staticmethod
    def _started(work: Any) -> Work:
        assert work is not None, "this process is not a member of the group"
        return work
