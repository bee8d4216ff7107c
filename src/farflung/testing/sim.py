# SPDX-License-Identifier: Apache-2.0
"""Replicas as threads of one process: the whole of an outer loop without a network, the same bits each time.

One replica runs at a time. It passes the turn on if it has to wait for the others, so runs are deterministic, and
a wait that no one can end is an error at once instead of a hang. In a `TimedGroup` collectives take time, on a virtual
line and virtual clocks.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

from farflung.base.causes import Cause
from farflung.base.checks import check_number, check_whole
from farflung.base.errors import CollectiveMismatch, RankFailure, Unsupported
from farflung.base.words import numbered
from farflung.comm.group import COMBINE, Group, Op, Work
from farflung.cost.model import copies, hops


def run_replicas(function: Callable[..., Any], num_replicas: int, *args: Any, seed: int | None = None) -> list[Any]:
    """Call `function(group, *args)` on `num_replicas` threads, each with its own `SimGroup`; return values by rank.

    All replicas share this process: its memory, and without a `seed` torch's default generator, so that what one draws
    changes what the next one draws.

    Args:
        seed: gives each replica a default generator of its own (of the CPU), seeded with `seed + rank`; the caller's is
            left as it was.

    Raises:
        Exception: the error of the lowest rank that failed by itself, rather than because another one had failed.
    """
    check_whole("num_replicas", num_replicas, least=1)
    before = torch.get_rng_state()
    stage = _Stage(num_replicas, seed)
    values: list[Any] = [None] * num_replicas
    errors: dict[int, BaseException] = {}

    def play(rank: int) -> None:
        group = SimGroup(stage, rank)
        stage.await_turn(rank)
        try:
            values[rank] = function(group, *args)
            stage.exit(rank, "it returned")
        except BaseException as error:  # handed to the caller below
            errors[rank] = error
            stage.exit(rank, f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(num_replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if seed is not None:
        torch.set_rng_state(before)
    if errors:
        raise min(errors.items(), key=lambda item: (isinstance(item[1], RankFailure), item[0]))[1]
    return values


@dataclass
class _Collective:
    """One collective: what each rank has brought to it so far."""

    kind: str
    members: tuple[int, ...]
    brought: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    done: bool = False
    error: str = ""


class _Stage:
    """Whose turn it is, what the replicas wait for, and the collectives under way."""

    def __init__(self, size: int, seed: int | None) -> None:
        self.size = size
        self.calls: dict[tuple[tuple[int, ...], int, int], _Collective] = {}
        self.departures: list[list[str]] = [[] for _ in range(size)]  # reasons, by rank
        self.regroups = [0] * size
        self.exited: set[int] = set()
        self._turns = [threading.Semaphore(int(rank == 0)) for rank in range(size)]
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._draws: list[Tensor] = []  # states of the default generator, by rank
        if seed is not None:
            self._draws = [torch.Generator().manual_seed(seed + rank).get_state() for rank in range(size)]

    def await_turn(self, rank: int) -> None:
        self._turns[rank].acquire()
        if self._draws:
            torch.set_rng_state(self._draws[rank])

    def wait_until(self, rank: int, ready: Callable[[], bool]) -> bool:
        """Run others until `ready()`; return False if that can never be, as all of them wait or have ended."""
        if ready():
            return True
        self._waiting[rank] = ready
        self._pass_on(rank)
        self.await_turn(rank)
        del self._waiting[rank]
        return ready()

    def exit(self, rank: int, reason: str) -> None:
        self.departures[rank].append(reason)
        self.exited.add(rank)
        self._pass_on(rank)

    def _pass_on(self, rank: int) -> None:
        if self._draws:
            self._draws[rank] = torch.get_rng_state()
        others = [(rank + step) % self.size for step in range(1, self.size + 1)]
        alive = [other for other in others if other not in self.exited]
        able = (other for other in alive if other not in self._waiting or self._waiting[other]())
        if alive:
            self._turns[next(able, alive[0])].release()  # if all wait, one is woken to find that out

    def missing(self, call: _Collective, rank: int) -> dict[int, str]:
        """Return the ranks that have not come to `call` and never will, with their reasons."""
        mine = len(self.departures[rank])
        absent = [other for other in call.members if other not in call.brought]
        return {other: self.departures[other][mine] for other in absent if len(self.departures[other]) > mine}


@dataclass(frozen=True)
class _SimWork:
    """A collective of a `SimGroup` under way."""

    stage: _Stage
    call: _Collective
    rank: int

    def wait(self) -> None:
        call, stage = self.call, self.stage

        def over() -> bool:
            return call.done or bool(call.error) or bool(stage.missing(call, self.rank))

        could = stage.wait_until(self.rank, over)
        if call.error:
            raise CollectiveMismatch(call.error)
        if call.done:
            return
        gone = stage.missing(call, self.rank)
        why = "; ".join(f"rank {rank} left ({reason})" for rank, reason in gone.items())
        if not could:
            absent = [rank for rank in call.members if rank not in call.brought]
            why = f"waiting for something else: {numbered('rank', absent)}"
        raise RankFailure(f"Rank {self.rank} is blocked in {call.kind}: {why}.")


class SimGroup(Group):
    """The group of one replica that `run_replicas` made. Sums are made in rank order.

    Its `duplicate` is the group itself: collectives are compared by number and kind, so none is taken for another.
    """

    def __init__(
        self, stage: _Stage, rank: int, members: tuple[int, ...] | None = None, is_block: bool = False
    ) -> None:
        self.members = members or tuple(range(stage.size))  # by the ranks that `run_replicas` gave them
        self.rank = self.members.index(rank)
        self.size = len(self.members)
        self.age = stage.regroups[rank]  # how often the replicas have regrouped
        self._is_block = is_block  # part of a larger group, and left together with it
        self._me = rank
        self._stage = stage
        self._number = 0

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        return self._join(f"all_reduce({op})", x, x, lambda xs: [reduce(COMBINE[op], xs)] * self.size)

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        return self._join("all_gather", out, x, lambda xs: [torch.cat([x.reshape(-1) for x in xs])] * self.size)

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        def columns(xs: list[Tensor]) -> list[Tensor]:
            return list(map(torch.cat, zip(*(x.view(-1).chunk(self.size) for x in xs), strict=True)))

        return self._join("all_to_all", out, x, columns)

    def broadcast(self, x: Tensor, src: int) -> Work:
        return self._join(f"broadcast({src})", x, x, lambda xs: [xs[src]] * self.size)

    def swap(self, out: Tensor, x: Tensor, to: int, source: int) -> Work:
        step = (to - self.rank) % self.size
        if (self.rank - source) % self.size != step:
            raise Unsupported("swap needs a ring: every replica must send to the rank at the same distance.")
        return self._join(f"swap({step})", out, x, lambda xs: [xs[rank - step] for rank in range(self.size)])

    def _block(self, begin: int, end: int) -> SimGroup:
        block = self.members[begin:end]
        return self if block == self.members else SimGroup(self._stage, self._me, block, is_block=True)

    def across(self, size: int) -> SimGroup:
        """Return the replicas that have this one's place in the other blocks of `size`: a column, if those are rows."""
        return SimGroup(self._stage, self._me, self.members[self.rank % size :: size])

    def regroup(self) -> SimGroup:
        """Wait until each replica has come here too or has ended; return the group of those that have come.

        Raises RankFailure if some wait for something else.
        """
        stage = self._stage
        stage.regroups[self._me] += 1
        age = stage.regroups[self._me]
        absent = [rank for rank in self.members if stage.regroups[rank] < age]
        if not stage.wait_until(
            self._me, lambda: all(stage.regroups[rank] >= age or rank in stage.exited for rank in absent)
        ):
            raise RankFailure(f"Rank {self.rank} is blocked by {numbered('rank', absent)}, waiting for something else.")
        return SimGroup(stage, self._me, tuple(rank for rank in self.members if stage.regroups[rank] >= age))

    def leave(self, reason: str, for_good: bool = False, cause: Cause = Cause.OWN) -> None:
        if not self._is_block:
            self._stage.departures[self._me].append(reason)

    def _join(self, kind: str, out: Tensor, x: Tensor, results: Callable[[list[Tensor]], Iterable[Tensor]]) -> Work:
        """Bring `x` and `out` to the collective whose turn it is; the last rank to come does the work for all."""
        key = (self.members, self.age, self._number)
        call = self._stage.calls.setdefault(key, _Collective(kind, self.members))
        what = (kind, x.dtype, x.numel())
        first = next(iter(call.brought.values()), (what,))[0]
        if first != what:
            call.error = f"Rank {self.rank} brought {what} to a collective that others brought {first} to."
        call.brought[self._me] = (what, x, out)
        if len(call.brought) == self.size and not call.error:
            rows = [call.brought[rank] for rank in self.members]
            with torch.no_grad():
                for value, (_, _, place) in zip(results([sent for _, sent, _ in rows]), rows, strict=True):
                    place.view(-1).copy_(value.reshape(-1))
            call.done = True
            del self._stage.calls[key]
        self._number += 1
        return _SimWork(self._stage, call, self._me)


@dataclass
class VirtualClock:
    """The virtual seconds of one replica."""

    now: float = 0.0


@dataclass
class Line:
    """What goes from replica to replica, one thing after the other."""

    free: float = 0.0
    ends: dict[int, float] = field(default_factory=dict)  # of each collective that all have joined, by its number
    _starts: dict[int, list[float]] = field(default_factory=dict)

    def join(self, number: int, now: float, size: int, sending_s: float, waiting_s: float) -> None:
        """Bring a replica to a collective. The line is busy while it sends, not while what was sent is on its way."""
        starts = self._starts.setdefault(number, [])
        starts.append(now)
        if len(starts) == size:
            self.free = max(self.free, *self._starts.pop(number)) + sending_s
            self.ends[number] = self.free + waiting_s


@dataclass
class Network:
    """All replicas' lines, which are alike."""

    bandwidth_bps: float = math.inf  # bits a second of a line, each way at the same time
    latency_s: float = 0.0  # seconds from one replica to another
    _lines: dict[tuple[tuple[int, ...], int], Line] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_number("bandwidth_bps", self.bandwidth_bps, above=0, finite=False)
        check_number("latency_s", self.latency_s, least=0)

    def line(self, group: SimGroup) -> Line:
        return self._lines.setdefault((group.members, group.age), Line())

    @cached_property
    def near(self) -> Network:
        """The network of neighbours, who are on one machine, so that nothing but waiting takes time."""
        return Network()


class TimedGroup(SimGroup):
    """A `SimGroup` in which whoever waits for a collective has its clock moved on to the collective's end."""

    def __init__(self, group: SimGroup, network: Network, clock: VirtualClock) -> None:
        super().__init__(group._stage, group._me, group.members, group._is_block)
        self._network = network
        self._line = network.line(group)
        self._clock = clock
        self._num_timed = 0
        self._is_free = False

    @contextmanager
    def for_free(self) -> Iterator[None]:
        """Make what all replicas do within this block cost nothing but waiting for each other."""
        before, self._is_free = self._is_free, True
        try:
            yield
        finally:
            self._is_free = before

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Work:
        sent = copies("reduced", self.size) * x.nbytes
        return self._under_way(super().all_reduce(x, op), sent, hops("reduced", self.size))

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        sent = copies("gathered", self.size) * x.nbytes
        return self._under_way(super().all_gather(out, x), sent, hops("gathered", self.size))

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        sent = copies("reduced", self.size) / 2 * x.nbytes
        return self._under_way(super().all_to_all(out, x), sent, int(self.size > 1))

    def swap(self, out: Tensor, x: Tensor, to: int, source: int) -> Work:
        sent = copies("paired", self.size) * x.nbytes
        return self._under_way(super().swap(out, x, to, source), sent, hops("paired", self.size))

    def _block(self, begin: int, end: int) -> TimedGroup:
        return TimedGroup(super()._block(begin, end), self._network.near, self._clock)

    def _under_way(self, work: Work, num_bytes: float, num_hops: int) -> Work:
        sending_s = 0.0 if self._is_free else 8 * num_bytes / self._network.bandwidth_bps
        waiting_s = 0.0 if self._is_free else num_hops * self._network.latency_s
        number = self._num_timed
        self._num_timed += 1
        self._line.join(number, self._clock.now, self.size, sending_s, waiting_s)
        return _TimedWork(work, self._line, number, self._clock)


@dataclass(frozen=True)
class _TimedWork:
    work: Work
    line: Line
    number: int
    clock: VirtualClock

    def wait(self) -> None:
        self.work.wait()
        self.clock.now = max(self.clock.now, self.line.ends[self.number])
