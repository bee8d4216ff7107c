# SPDX-License-Identifier: Apache-2.0
"""The ranks of a c10d process group as a `Group`: its collectives, with waits that hear of ranks that left or died."""

from __future__ import annotations

import pickle
import re
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait as wait_for
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farflung.base.errors import CollectiveMismatch, RankFailure, StateError
from farflung.base.torch_internals import num_groups
from farflung.comm.group import Group, Op, Work, check_blocks
from farflung.comm.presence import PresenceStore
from farflung.comm.waits import Wait, Waits, handed_over

# torch 2.13 gave the flat collectives new names; older releases know the old ones only.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_SOURCE_LINE = re.compile(r"\[\S+:\d+\] ")  # of gloo's, before what it says
_NAP_S = 5e-5  # how long `all_gather_small` sleeps between two looks where a wait would not block the caller
_UNUSED_TAG = 0x1ACC  # of messages between two ranks; a script's own usually count from 0
_WATCH_S = 0.2  # how often a waiting rank asks whether another one has left


@dataclass(frozen=True)
class SharedState:
    """What a process group shares with its duplicates, and with groups of some of its ranks.

    Attributes:
        presence: what the ranks tell each other beside their collectives.
        ranks: those of the process group, in the numbers of all.
        waits: what this process has entered, and waits for.
        spare: groups that were made of it and given back, by what they are.
    """

    presence: PresenceStore
    waits: Waits
    ranks: list[int]
    spare: dict[tuple[int | bool, ...], list[TorchGroup]] = field(default_factory=dict)
    serials: Iterator[int] = field(default_factory=count)  # one for each use of a group, the same on all ranks
    parts: dict[str, TorchGroup] = field(default_factory=dict)  # what `within` made, by name


@cache
def _shared_state_of(group: weakref.ref[dist.ProcessGroup]) -> SharedState:
    """Return the one object for a process group, whoever asks; a reference to a group that is gone equals no other."""
    pg = group()
    assert pg is not None
    presence = PresenceStore(f"farflung/{pg.group_name}", dist.get_rank(pg), dist.get_world_size(pg))
    return SharedState(presence, Waits(presence), dist.get_process_group_ranks(pg))


@cache
def _closed_groups() -> list[str]:
    """Return the one list of the names of groups that were closed, and whose keys are still in the store."""
    return []


class TorchGroup:
    """The ranks of a c10d process group (the default one when none is given).

    Args:
        shared: of the group that this is a duplicate or a part of. None: of this process group.
        in_background: only threads use it that work on behalf of others.

    Attributes:
        presence, waits: see `SharedState`.
        pickled_as: finds the group where it is unpickled; None: it can't be pickled.
    """

    pickled_as: Callable[[], TorchGroup] | None = None

    def __init__(
        self, pg: dist.ProcessGroup | None = None, shared: SharedState | None = None, in_background: bool = False
    ) -> None:
        group = pg if pg is not None else dist.group.WORLD
        assert group is not None, "TorchGroup needs torch.distributed to be initialized"
        # Weakly, for a group that is destroyed must be gone: threads of one that someone still holds may run into the
        # interpreter's end, which then aborts.
        self._pg = weakref.ref(group)
        self.rank = dist.get_rank(self.pg)
        self.size = dist.get_world_size(self.pg)
        config = str(dist.get_backend_config(self.pg))
        backends = dict(part.split(":") for part in config.split(","))
        self._backend = next(iter(backends.values())) if len(set(backends.values())) == 1 else config
        # gloo moves tensors from a GPU too, but not in every collective.
        self._supported = {device for device, backend in backends.items() if device == "cpu" or backend != "gloo"}
        self.shared = shared or _shared_state_of(self._pg)
        self.presence, self.waits = self.shared.presence, self.shared.waits
        self.in_background = in_background
        self._name = self.pg.group_name
        self.waits.join(self._name)
        self._serial = 0
        self._is_block = False  # within a group: who leaves that one has left this one too
        self._spare: list[TorchGroup] | None = None  # where it goes when it is given back

    def __reduce__(self) -> tuple[Callable[[], TorchGroup], tuple[()]]:
        if self.pickled_as is None:
            raise pickle.PicklingError("A group of some of the ranks can't be pickled. Pickle what uses all ranks.")
        return self.pickled_as, ()

    @property
    def pg(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            StateError: it has been destroyed.
        """
        group = self._pg()
        if group is None:
            raise StateError("The process group of these ranks has been destroyed.")
        return group

    @property
    def ranks(self) -> list[int]:
        """Its ranks, in the numbers of all."""
        return dist.get_process_group_ranks(self.pg)

    @property
    def is_destroyed(self) -> bool:
        """Whether the process group is gone."""
        return self._pg() is None

    def supports(self, device: str) -> bool:
        return device in self._supported

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        return self._started(x.is_cpu, "all_reduce", dist.all_reduce(x, op=_REDUCE[op], group=self.pg, async_op=True))

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        return self._started(x.is_cpu, "all_gather", _all_gather_flat(out, x, group=self.pg, async_op=True))

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op = "sum") -> Work:
        work = _reduce_scatter_flat(out, x, op=_REDUCE[op], group=self.pg, async_op=True)
        return self._started(x.is_cpu, "reduce_scatter", work)

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        return self._started(x.is_cpu, "all_to_all", dist.all_to_all_single(out, x, group=self.pg, async_op=True))

    def broadcast(self, x: Tensor, src: int) -> Work:
        return self._started(x.is_cpu, "broadcast", dist.broadcast(x, group_src=src, group=self.pg, async_op=True))

    def scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int) -> Work:
        listed = None if parts is None else list(parts)
        work = dist.scatter(out, listed, group_src=src, group=self.pg, async_op=True)
        return self._started(out.is_cpu, "scatter", work)

    def barrier(self) -> None:
        work = dist.barrier(group=self.pg, async_op=True)
        self._finish(self._supported == {"cpu"}, self.waits.enter(self._name, "barrier"), work)

    def swap(self, out: Tensor, x: Tensor, to: int, source: int) -> Work:
        # Not two messages: gloo closes a connection on which a wait for a message runs out of time.
        sent, received = [0] * self.size, [0] * self.size
        sent[to], received[source] = x.numel(), out.numel()
        work = dist.all_to_all_single(out, x, received, sent, group=self.pg, async_op=True)
        return self._started(x.is_cpu, "all_to_all", work)

    def all_gather_small(self, x: Tensor) -> Tensor:
        return self.begin_all_gather_small(x)()

    def begin_all_gather_small(self, x: Tensor) -> Callable[[], Tensor]:
        device = torch.device("cpu") if self.supports("cpu") else torch.device("cuda", torch.cuda.current_device())
        mine = x.to(device)
        everyone = mine.new_empty(self.size * mine.numel())
        work = _all_gather_flat(everyone, mine, group=self.pg, async_op=True)
        wait = self.waits.enter(self._name, "all_gather")

        def end() -> Tensor:
            self._finish(mine.is_cpu, wait, work)
            return everyone.cpu().view(self.size, -1)

        return end

    is_concurrent = True

    def duplicate(self, in_background: bool = False) -> Group:
        return self._among(dist.get_process_group_ranks(self.pg), self.shared, in_background)

    def within(self, pg: dist.ProcessGroup) -> TorchGroup:
        """Return the group of some of these ranks, as of a mesh: its waits hear of all of them, in their numbers."""
        self.shared.parts[pg.group_name] = part = TorchGroup(pg, self.shared)
        part.await_connections()
        return part

    def with_parts(self) -> list[TorchGroup]:
        """Return this group and those that `within` made, as far as they have not been destroyed."""
        return [group for group in (self, *self.shared.parts.values()) if not group.is_destroyed]

    def await_connections(self) -> None:
        """Return when every rank is connected: one that ended before would break what another still waits for."""
        self.all_gather_small(torch.zeros(1))

    def free(self, reusable: bool = True) -> None:
        if self._spare is None:
            return
        if reusable:
            self._spare.append(self)
            return
        self.abort()
        # Its name may come again, and whoever connects under it must not read where these ranks listened.
        if self.presence.can_list_keys():
            _closed_groups().append(self._name)
            self.waits.part(self._name)
            dist.destroy_process_group(self.pg)

    def hand_over(self) -> Callable[[Future[None]], None]:
        wait = self.waits.enter(handed_over(self._name), "")

        def end(future: Future[None]) -> None:
            if wait_for([future], _WATCH_S).not_done:
                with self.waits.noted(wait) as check:
                    while wait_for([future], _WATCH_S).not_done:
                        check()  # what it publishes ends the other thread's wait, and so this one

        return end

    def split(self, size: int) -> Group:
        if self.size == 1:
            return self
        check_blocks(self.size, size)
        begin = self.rank - self.rank % size
        is_block = self.size != self.presence.size  # else what is made of all ranks, as for checkpoints, is apart
        shared = self.shared if is_block else None
        block = self._among(dist.get_process_group_ranks(self.pg)[begin : begin + size], shared, False)
        block._is_block = is_block
        return block

    def _among(self, members: list[int], shared: SharedState | None, in_background: bool) -> TorchGroup:
        """Return a group that was given back; or make one, once all ranks have come: that wait would never look up."""
        spare = self.shared.spare.setdefault((*members, shared is None, in_background), [])
        if spare:
            spare[-1]._serial = next(self.shared.serials)
            return spare.pop()
        self.barrier()  # of a kind of its own, so that ranks which are elsewhere hear of it
        self.presence.forget(_closed_groups())
        _closed_groups().clear()
        most = int(self.all_gather_small(torch.tensor([num_groups()])).max())
        while num_groups() < most:  # one that nobody uses, on ranks that a script's own group left out
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        pg = dist.new_group(members, backend=self._backend, use_local_synchronization=True)
        made = TorchGroup(pg, shared, in_background)
        made._spare, made._serial = spare, next(self.shared.serials)
        made.await_connections()
        return made

    def agree_min(self, number: int, name: str) -> int:
        return self.presence.agree_min(number, f"{self._serial}/{name}")  # not the name: other islands take part

    def leave(self, reason: str, for_good: bool = False) -> None:
        if not self._is_block:
            self.presence.mark_left(reason)
        for group in self.with_parts() if for_good else ():
            group.abort()

    def raise_if_broken(self) -> None:
        if self.presence.describe_left() or self.presence.has_alarm():
            raise self._broken(f"Rank {self.presence.rank} stopped waiting")

    def failure(self, error: RuntimeError) -> RankFailure | CollectiveMismatch:
        """Say in one error what is known about the ranks of this group, in which a collective ended with `error`."""
        said = _SOURCE_LINE.sub("", str(error).split(". ", 1)[0])
        return self._broken(f"A collective of rank {self.presence.rank} failed", f" The transport said: {said}.")

    def _broken(self, what: str, said: str = "") -> RankFailure | CollectiveMismatch:
        """Close the connections, and say why: a rank that is late comes before those that left because of it."""
        mismatch = self.presence.mismatch()
        known = mismatch or self.presence.hang_report() or self.presence.describe_left()
        known = known or self.presence.check_alive(self._closed)
        self.abort()
        return CollectiveMismatch(mismatch) if mismatch else RankFailure(f"{what}: {known}.{said}")

    def _closed(self) -> set[int]:
        """Return the ranks, in the numbers of `presence`, that have closed their connection with this one."""
        numbers, closed = self.shared.ranks, set()
        for peer, rank in enumerate(self.ranks if self.supports("cpu") and not self.is_destroyed else ()):
            if rank in numbers and peer != self.rank:
                try:
                    self.pg.recv([torch.empty(1)], peer, _UNUSED_TAG)  # only begun: over a closed one it can't even be
                except RuntimeError:
                    closed.add(numbers.index(rank))
        return closed

    def abort(self) -> None:
        """Close the connections: a gloo operation that can never end would hold up the exit of this process."""
        if self.supports("cpu") and not self.is_destroyed:
            # A time-out is what closes gloo's connections, all of them. Nobody sends what is waited for here, while a
            # collective could meet one that the other ranks are in. At a connection that is closed already the wait
            # does not even begin, so each is tried.
            for peer in [rank for rank in range(self.size) if rank != self.rank]:
                with suppress(RuntimeError):
                    self.pg.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))

    def _started(self, is_gloo: bool, kind: str, work: Any) -> Work:
        assert work is not None, "this process is not a member of the group"
        wait = self.waits.enter(self._name, kind)
        return _WatchedWork(work, self, wait) if is_gloo else work

    def _finish(self, is_gloo: bool, wait: Wait, work: Any) -> None:
        """End a collective on the host, also where its own `wait` only makes the stream wait."""
        assert work is not None, "this process is not a member of the group"
        if is_gloo:
            _WatchedWork(work, self, wait).wait()
        else:
            self._look_out(wait, work)
            work.wait()

    def _look_out(self, wait: Wait, work: Any) -> None:
        looked, check = time.monotonic(), None
        with ExitStack() as noted:
            while not work.is_completed():
                time.sleep(_NAP_S)
                if time.monotonic() - looked > _WATCH_S:
                    check = check or noted.enter_context(self.waits.noted(wait, self.in_background))
                    check()
                    self.raise_if_broken()
                    looked = time.monotonic()


class _WatchedWork:
    """A gloo collective under way, whose wait looks up now and then to see whether all ranks are still there."""

    __slots__ = ("_group", "_wait", "_work")

    def __init__(self, work: Any, group: TorchGroup, wait: Wait) -> None:
        self._work = work
        self._group = group
        self._wait = wait

    def wait(self) -> None:
        try:
            self._work.wait(timedelta(seconds=_WATCH_S))
        except RuntimeError:  # the time was up, or the collective broke: `is_completed` tells which
            self._wait_on()

    def _wait_on(self) -> None:
        group = self._group
        try:
            with group.waits.noted(self._wait, group.in_background) as check:
                while not self._work.is_completed():
                    check()
                    group.raise_if_broken()
                    with suppress(RuntimeError):
                        self._work.wait(timedelta(seconds=_WATCH_S))
            self._work.wait()
        except (RankFailure, CollectiveMismatch):
            raise
        except RuntimeError as error:
            raise group.failure(error) from error
