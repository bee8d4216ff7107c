# SPDX-License-Identifier: Apache-2.0
"""What a set of ranks can do together: one protocol, and its two plain forms.

Every collective starts at once and returns a `Work`; nothing may be read before `wait()`. On CUDA `wait()` makes the
current stream wait, on gloo it blocks the caller. A wait that can not end, because a rank left or died, raises
`RankFailure` within seconds and says what is known of that rank; the group is of no use from then on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
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
_NAP_S = 5e-5  # how long `meet` sleeps between two looks where a wait would not block the caller
_WATCH_S = 0.2  # how often a waiting rank asks whether another one has left
_ROLL_CALL_S = 1.0  # how long the ranks of a broken group wait for each other's sign of life


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Block (or make the current stream wait) until the result may be read.

        Raises:
            RankFailure: a rank left or died, so that the collective can not end.
        """


class Group(Protocol):
    """Ranks that talk to each other. All tensors are contiguous; every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def speaks(self, device: str) -> bool:
        """Say whether tensors on this kind of device, `cpu` or `cuda`, can travel as they are."""

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

    def speaks(self, device: str) -> bool:
        return True

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
        group = pg if pg is not None else dist.group.WORLD
        assert group is not None, "TorchGroup needs torch.distributed to be initialized"
        self.pg = group
        self.rank = dist.get_rank(self.pg)
        self.size = dist.get_world_size(self.pg)
        backends = dict(part.split(":") for part in str(dist.get_backend_config(self.pg)).split(","))
        # gloo moves tensors from a GPU too, but not in every collective.
        self._spoken = {device for device, backend in backends.items() if device == "cpu" or backend != "gloo"}
        self._register = _Register(f"laconic/{self.pg.group_name}", self.rank, self.size)

    def speaks(self, device: str) -> bool:
        return device in self._spoken

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        return self._started(x, dist.all_reduce(x, op=_REDUCE[op], group=self.pg, async_op=True))

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        return self._started(x, _all_gather_flat(out, x, group=self.pg, async_op=True))

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum") -> Work:
        return self._started(x, _reduce_scatter_flat(out, x, op=_REDUCE[op], group=self.pg, async_op=True))

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        return self._started(x, dist.all_to_all_single(out, x, group=self.pg, async_op=True))

    def broadcast(self, x: Tensor, src: int) -> Work:
        return self._started(x, dist.broadcast(x, group_src=src, group=self.pg, async_op=True))

    def scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int) -> Work:
        listed = None if parts is None else list(parts)
        return self._started(out, dist.scatter(out, listed, group_src=src, group=self.pg, async_op=True))

    def barrier(self) -> None:
        dist.barrier(group=self.pg)

    def meet(self, x: Tensor) -> Tensor:
        device = torch.device("cpu") if self.speaks("cpu") else torch.device("cuda", torch.cuda.current_device())
        mine = x.to(device)
        everyone = mine.new_empty(self.size * mine.numel())
        work = _all_gather_flat(everyone, mine, group=self.pg, async_op=True)
        if not mine.is_cpu:
            self._look_out(work)
        self._started(mine, work).wait()
        return everyone.cpu().view(self.size, -1)

    def leave(self, reason: str) -> None:
        self._register.sign_out(reason)

    def _started(self, x: Tensor, work: Any) -> Work:
        assert work is not None, "this process is not a member of the group"
        return _Watched(work, self) if x.is_cpu else work

    def _look_out(self, work: Any) -> None:
        """Wait on the host for a collective whose own `wait` only makes the stream wait."""
        looked = time.monotonic()
        while not work.is_completed():
            time.sleep(_NAP_S)
            if time.monotonic() - looked > _WATCH_S:
                self.raise_if_broken()
                looked = time.monotonic()

    def raise_if_broken(self) -> None:
        """Raise RankFailure when a rank of this group has called `leave`, or has found that another one is dead."""
        known = self._register.signed_out() or (self._register.call_roll() if self._register.alarmed() else "")
        if known:
            self._break_off()
            raise RankFailure(f"Rank {self.rank} waits in vain: {known}.")

    def failure(self, error: RuntimeError) -> RankFailure:
        """Say in one error what is known about the ranks of this group, in which a collective ended with `error`."""
        known = self._register.signed_out() or self._register.call_roll()
        self._break_off()
        said = str(error).split(". ", 1)[0]
        return RankFailure(f"A collective of rank {self.rank} broke off: {known}. The transport said: {said}.")

    def _break_off(self) -> None:
        """Close the connections: a gloo operation that can never end would hold up the exit of this process."""
        if self.speaks("cpu"):
            options = dist.AllreduceOptions()
            options.timeout = timedelta(milliseconds=1)
            with suppress(RuntimeError):  # its timeout is what closes the connections
                self.pg.allreduce([torch.zeros(1)], options).wait(timedelta(seconds=_WATCH_S))


class _Watched:
    """A gloo collective under way, whose wait looks up now and then to see whether all ranks are still there."""

    __slots__ = ("_group", "_work")

    def __init__(self, work: Any, group: TorchGroup) -> None:
        self._work = work
        self._group = group

    def wait(self) -> None:
        try:
            self._work.wait(timedelta(seconds=_WATCH_S))
        except RuntimeError:  # the time was up, or the collective broke: `is_completed` tells which
            self._wait_on()

    def _wait_on(self) -> None:
        while not self._work.is_completed():
            self._group.raise_if_broken()
            with suppress(RuntimeError):
                self._work.wait(timedelta(seconds=_WATCH_S))
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._group.failure(error) from error


class _Register:
    """Who left a group, and why, written down in the store of the default process group."""

    def __init__(self, prefix: str, rank: int, size: int) -> None:
        self._prefix = prefix
        self._rank = rank
        self._size = size

    def sign_out(self, reason: str) -> None:
        # A rank may leave, come back and leave again. Only those that left more often than this one are gone.
        with suppress(dist.DistError):  # where the store is gone, there is nobody to tell
            store = _store()
            times = store.add(f"{self._prefix}/left/{self._rank}", 1)
            store.set(f"{self._prefix}/left/{self._rank}/{times}", reason)
            store.set(f"{self._prefix}/left/any/{times}", "")

    def signed_out(self) -> str:
        """Name the ranks that have left more often than this one, with their reasons; empty when there is none."""
        with suppress(dist.DistError):  # without a store the collective itself ends with an error
            store = _store()
            times = store.add(f"{self._prefix}/left/{self._rank}", 0) + 1
            if store.check([f"{self._prefix}/left/any/{times}"]):
                keys = {rank: f"{self._prefix}/left/{rank}/{times}" for rank in range(self._size)}
                gone = {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
                return "; ".join(f"rank {rank} left ({reason})" for rank, reason in gone.items())
        return ""

    def alarmed(self) -> bool:
        """Say whether a rank has called the roll, because a collective of its own broke off."""
        with suppress(dist.DistError):
            return bool(_store().check([f"{self._prefix}/alarm"]))
        return False

    def call_roll(self) -> str:
        """Give a sign of life, wait a moment for those of the other ranks, and name those that gave none."""
        try:
            store = _store()
            store.set(f"{self._prefix}/alarm", "")
            store.set(f"{self._prefix}/alive/{self._rank}", "")
            silent = [rank for rank in range(self._size) if rank != self._rank]
            deadline = time.monotonic() + _ROLL_CALL_S
            while silent and time.monotonic() < deadline:
                time.sleep(_ROLL_CALL_S / 50)
                silent = [rank for rank in silent if not store.check([f"{self._prefix}/alive/{rank}"])]
        except dist.DistError:
            return "the store is gone too, so the process that serves it (rank 0, or the launcher) has probably died"
        if silent:
            return f"ranks {silent} gave no sign of life for {_ROLL_CALL_S:g} s, so they died or are busy elsewhere"
        return "every rank is alive, so they brought different sizes to one collective, or the network broke down"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
