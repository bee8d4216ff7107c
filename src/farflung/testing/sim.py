# SPDX-License-Identifier: Apache-2.0
"""Replicas as threads of one process: the whole of an outer loop without a network, the same bits each time.

One replica runs at a time. It passes the turn on where it has to wait for the others, so runs are deterministic, and
a wait that no one can end is an error at once instead of a hang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from farflung.base.checks import check_whole
from farflung.base.errors import CollectiveMismatch, RankFailure, Unsupported
from farflung.base.words import numbered
from farflung.comm.group import Group, Op, Work, check_blocks

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


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
class _Call:
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
        self.calls: dict[tuple[tuple[int, ...], int, int], _Call] = {}
        self.departures: list[list[str]] = [[] for _ in range(size)]  # reasons, by rank
        self.regroups = [0] * size
        self.exited: set[int] = set()
        self.waiting_to_join: list[int] = []
        self.admitted: dict[int, tuple[tuple[int, ...], list[int]]] = {}  # members and newcomers, by newcomer
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
        """Let others run until `ready()`; return False if that can never be, as all of them wait or have ended."""
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
            self._turns[next(able, alive[0])].release()  # where all wait, one is woken to find that out

    def missing(self, call: _Call, rank: int) -> dict[int, str]:
        """Return the ranks that have not come to `call` and never will, with their reasons."""
        mine = len(self.departures[rank])
        absent = [other for other in call.members if other not in call.brought]
        return {other: self.departures[other][mine] for other in absent if len(self.departures[other]) > mine}


class _SimWork:
    """A collective of a `SimGroup` under way."""

    def __init__(self, stage: _Stage, call: _Call, rank: int) -> None:
        self._stage = stage
        self._call = call
        self._rank = rank

    def wait(self) -> None:
        call, stage = self._call, self._stage

        def over() -> bool:
            return call.done or bool(call.error) or bool(stage.missing(call, self._rank))

        could = stage.wait_until(self._rank, over)
        if call.error:
            raise CollectiveMismatch(call.error)
        if call.done:
            return
        gone = stage.missing(call, self._rank)
        why = "; ".join(f"rank {rank} left ({reason})" for rank, reason in gone.items())
        if not could:
            absent = [rank for rank in call.members if rank not in call.brought]
            why = f"waiting for something else: {numbered('rank', absent)}"
        raise RankFailure(f"Rank {self._rank} is blocked in {call.kind}: {why}.")


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
        def finish(xs: list[Tensor], outs: list[Tensor]) -> None:
            total = reduce(_COMBINE[op], xs)
            for mine in outs:
                mine.copy_(total)

        return self._join(f"all_reduce({op})", x, x, finish)

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        def finish(xs: list[Tensor], outs: list[Tensor]) -> None:
            everything = torch.cat([x.reshape(-1) for x in xs])
            for mine in outs:
                mine.view(-1).copy_(everything)

        return self._join("all_gather", out, x, finish)

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        def finish(xs: list[Tensor], outs: list[Tensor]) -> None:
            parts = [x.view(-1).chunk(self.size) for x in xs]
            for rank, mine in enumerate(outs):
                mine.view(-1).copy_(torch.cat([row[rank] for row in parts]))

        return self._join("all_to_all", out, x, finish)

    def broadcast(self, x: Tensor, src: int) -> Work:
        def finish(xs: list[Tensor], outs: list[Tensor]) -> None:
            for mine in outs:
                mine.copy_(xs[src])

        return self._join(f"broadcast({src})", x, x, finish)

    def scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int) -> Work:
        def finish(xs: list[Tensor], outs: list[Tensor]) -> None:
            for part, mine in zip(xs[src].view(self.size, -1), outs, strict=True):
                mine.view(-1).copy_(part)

        sent = torch.cat([part.reshape(-1) for part in parts]) if parts is not None else out
        return self._join(f"scatter({src})", out, sent, finish, alike=False)

    def barrier(self) -> None:
        nothing = torch.empty(0)
        self._join("barrier", nothing, nothing, lambda xs, outs: None).wait()

    def swap(self, out: Tensor, x: Tensor, to: int, source: int) -> Work:
        step = (to - self.rank) % self.size
        if (self.rank - source) % self.size != step:
            raise Unsupported("swap needs a ring: every replica must send to the rank at the same distance.")

        def finish(xs: list[Tensor], outs: list[Tensor]) -> None:
            for rank, mine in enumerate(outs):
                mine.copy_(xs[rank - step])

        return self._join(f"swap({step})", out, x, finish)

    def split(self, size: int) -> SimGroup:
        if self.size == 1:
            return self
        check_blocks(self.size, size)
        begin = self.rank - self.rank % size
        block = self.members[begin : begin + size]
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

    def join(self) -> tuple[SimGroup, list[int]]:
        """Wait until the members of another group admit this replica; return it and the ranks of the newcomers.

        Raises RankFailure if nobody does, as all wait for something else or have ended.
        """
        stage = self._stage
        stage.waiting_to_join.append(self._me)
        if not stage.wait_until(self._me, lambda: self._me in stage.admitted):
            raise RankFailure(f"Replica {self._me} waits to join, but nobody is left who could admit it.")
        members, newcomers = stage.admitted.pop(self._me)
        return SimGroup(stage, self._me, members), [members.index(one) for one in newcomers]

    def admit(self) -> tuple[SimGroup, list[int]]:
        """Return the group with those that wait to join, or this one, and the ranks of the newcomers: a collective."""
        stage = self._stage
        mine = torch.tensor([float(one in stage.waiting_to_join) for one in range(stage.size)])
        newcomers = [one for one, waits in enumerate(self.all_gather_small(mine)[0]) if waits]  # as the first sees it
        if not newcomers:
            return self, []
        members = tuple(sorted({*self.members, *newcomers}))
        stage.regroups[self._me] += 1
        for one in set(newcomers).intersection(stage.waiting_to_join):  # the first member to come here lets it in
            stage.waiting_to_join.remove(one)
            stage.admitted[one] = members, newcomers
            stage.regroups[one] = stage.regroups[self._me]
            stage.departures[one] = list(stage.departures[self._me])
        return SimGroup(stage, self._me, members), [members.index(one) for one in newcomers]

    def leave(self, reason: str, for_good: bool = False) -> None:
        """Let the others know that this rank will not come."""
        if not self._is_block:
            self._stage.departures[self._me].append(reason)

    def _join(
        self,
        kind: str,
        out: Tensor,
        x: Tensor,
        finish: Callable[[list[Tensor], list[Tensor]], None],
        alike: bool = True,
    ) -> Work:
        """Bring `x` and `out` to the collective whose turn it is; the last rank to come does the work for all."""
        key = (self.members, self.age, self._number)
        call = self._stage.calls.setdefault(key, _Call(kind, self.members))
        what = (kind, x.dtype, x.numel()) if alike else (kind, x.dtype)
        first = next(iter(call.brought.values()), (what,))[0]
        if first != what:
            call.error = f"Rank {self.rank} brought {what} to a collective that others brought {first} to."
        call.brought[self._me] = (what, x, out)
        if len(call.brought) == self.size and not call.error:
            rows = [call.brought[rank] for rank in self.members]
            with torch.no_grad():
                finish([row[1] for row in rows], [row[2] for row in rows])
            call.done = True
            del self._stage.calls[key]
        self._number += 1
        return _SimWork(self._stage, call, self._me)
