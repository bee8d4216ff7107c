# SPDX-License-Identifier: Apache-2.0
"""The collectives of a c10d process group as a `Group`, whose waits check now and then for lost ranks."""

from __future__ import annotations

import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farflung.base.errors import CollectiveMismatch, RankFailure
from farflung.comm.group import Group, Op, Work

# torch 2.13 gave the flat collectives new names; older releases know the old ones only.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_NAP_S = 5e-5  # how long `all_gather_small` sleeps between two looks where a wait would not block the caller
_UNUSED_TAG = 0x1ACC  # of messages between two ranks; a script's own usually count from 0
_SOURCE_LINE = re.compile(r"\[\S+:\d+\] ")  # of gloo's, before what it says
WATCH_S = 0.2  # how often a waiting rank asks whether another one has left


def transport_said(error: RuntimeError | OSError) -> str:
    """Return what gloo or NCCL says of an error, in a few words."""
    return _SOURCE_LINE.sub("", str(error).split(". ", 1)[0])


def close_connections(pg: dist.ProcessGroup) -> None:
    """Close gloo's connections of a process group."""
    # A time-out is what closes them, all of them. Nobody sends what is waited for here, while a collective could meet
    # one that the other ranks are in. At a connection that is closed already the wait does not even begin, so each is
    # tried.
    for peer in [rank for rank in range(pg.size()) if rank != pg.rank()]:
        with suppress(RuntimeError):
            pg.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


def check_peers(pg: dist.ProcessGroup, proof: Callable[[int, int], bytes], timeout_s: float) -> None:
    """Have each rank prove who it is, over gloo's own connection to it, as whoever comes first may take its place.

    Args:
        proof: what one rank sends another one; both can tell it, and nobody else.

    Raises:
        RuntimeError: a rank has sent something else, or nothing for `timeout_s`.
    """

    def sent(sender: int, receiver: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(proof(sender, receiver)), dtype=torch.uint8)

    mine, peers = pg.rank(), [rank for rank in range(pg.size()) if rank != pg.rank()]
    proofs = [sent(mine, peer) for peer in peers]
    received = [torch.zeros_like(one) for one in proofs]
    works = [pg.send([one], peer, _UNUSED_TAG) for peer, one in zip(peers, proofs, strict=True)]
    works += [pg.recv([one], peer, _UNUSED_TAG) for peer, one in zip(peers, received, strict=True)]
    for work in works:
        work.wait(timedelta(seconds=timeout_s))
    if wrong := [peer for peer, one in zip(peers, received, strict=True) if not torch.equal(one, sent(peer, mine))]:
        raise RuntimeError(f"what has connected as rank {wrong[0]} does not have the run's key")


class C10dGroup(Group):
    """Collectives over a c10d process group. Subclasses differ in how a wait learns that ranks are gone."""

    num_probes = 0  # receives that were begun to see whether a connection is closed, which count as collectives
    supported: set[str]  # the kinds of device whose tensors can travel as they are

    @property
    @abstractmethod
    def pg(self) -> dist.ProcessGroup:
        """The process group."""

    @abstractmethod
    def enter(self, kind: str, nbytes: int) -> Any:
        """Record that this rank starts a collective; return what identifies it."""

    @abstractmethod
    def watching(self, entered: Any) -> AbstractContextManager[Callable[[], None]]:
        """Yield, for the length of a wait, a function to call now and then: it raises if the wait can't end."""

    @abstractmethod
    def failure(self, error: RuntimeError) -> RankFailure | CollectiveMismatch:
        """Return an error with all that is known of this group's ranks, after a collective ended with `error`."""

    def supports(self, device: str) -> bool:
        return device in self.supported

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        return self._started(x, "all_reduce", dist.all_reduce(x, op=_REDUCE[op], group=self.pg, async_op=True))

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        return self._started(out, "all_gather", _all_gather_flat(out, x, group=self.pg, async_op=True))

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        return self._started(x, "all_to_all", dist.all_to_all_single(out, x, group=self.pg, async_op=True))

    def broadcast(self, x: Tensor, src: int) -> Work:
        return self._started(x, "broadcast", dist.broadcast(x, group_src=src, group=self.pg, async_op=True))

    def scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int) -> Work:
        listed = None if parts is None else list(parts)
        return self._started(out, "scatter", dist.scatter(out, listed, group_src=src, group=self.pg, async_op=True))

    def barrier(self) -> None:
        work = dist.barrier(group=self.pg, async_op=True)
        self._finish(self.supported == {"cpu"}, self.enter("barrier", 0), work)

    def swap(self, out: Tensor, x: Tensor, to: int, source: int) -> Work:
        # Not two messages: gloo closes a connection on which a wait for a message runs out of time.
        sent, received = [0] * self.size, [0] * self.size
        sent[to], received[source] = x.numel(), out.numel()
        work = dist.all_to_all_single(out, x, received, sent, group=self.pg, async_op=True)
        return self._started(x, "all_to_all", work)

    def begin_all_gather_small(self, x: Tensor) -> Callable[[], Tensor]:
        mine = x.to(self.wire_device)
        everyone = mine.new_empty(self.size * mine.numel())
        work = _all_gather_flat(everyone, mine, group=self.pg, async_op=True)
        entered = self.enter("all_gather", everyone.nbytes)

        def end() -> Tensor:
            self._finish(mine.is_cpu, entered, work)
            return everyone.cpu().view(self.size, -1)

        return end

    def await_connections(self) -> None:
        """Return when every rank is connected: one that ended before would break what another still waits for."""
        self.all_gather_small(torch.zeros(1))

    def abort(self) -> None:
        """Close the connections: a gloo operation that can never end would hold up the exit of this process."""
        if self.supports("cpu"):
            close_connections(self.pg)

    def closed_by(self) -> list[int]:
        closed = []
        for peer in range(self.size if self.supports("cpu") else 0):
            if peer != self.rank:
                try:
                    self.pg.recv([torch.empty(1)], peer, _UNUSED_TAG)  # only begun: over a closed one it can't even be
                    self.num_probes += 1
                except RuntimeError:
                    closed.append(peer)
        return closed

    def _started(self, x: Tensor, kind: str, work: Any) -> Work:
        assert work is not None, "this process is not a member of the group"
        entered = self.enter(kind, x.nbytes)
        return _WatchedWork(work, self, entered) if x.is_cpu else work

    def _finish(self, is_gloo: bool, entered: Any, work: Any) -> None:
        """End a collective on the host, also if its own `wait` only makes the stream wait."""
        assert work is not None, "this process is not a member of the group"
        if is_gloo:
            _WatchedWork(work, self, entered).wait()
        else:
            with self.explained():
                self._look_out(entered, work)
                work.wait()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise what is known of this group's ranks in place of the transport's own error."""
        try:
            yield
        except (RankFailure, CollectiveMismatch):
            raise
        except RuntimeError as error:
            raise self.failure(error) from error

    def _look_out(self, entered: Any, work: Any) -> None:
        looked, look = time.monotonic(), None
        with ExitStack() as around:
            while not work.is_completed():
                time.sleep(_NAP_S)
                if time.monotonic() - looked > WATCH_S:
                    look = look or around.enter_context(self.watching(entered))
                    look()
                    looked = time.monotonic()


@dataclass(eq=False, slots=True)
class _WatchedWork:
    """A gloo collective under way, whose wait checks now and then that all ranks are still there."""

    work: Any
    group: C10dGroup
    entered: Any

    def wait(self) -> None:
        try:
            self.work.wait(timedelta(seconds=WATCH_S))
        except RuntimeError:  # the time was up, or the collective broke: `is_completed` tells which
            self._wait_on()

    def _wait_on(self) -> None:
        with self.group.explained():
            with self.group.watching(self.entered) as look:
                while not self.work.is_completed():
                    look()
                    with suppress(RuntimeError):
                        self.work.wait(timedelta(seconds=WATCH_S))
            self.work.wait()
