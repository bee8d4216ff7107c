# SPDX-License-Identifier: Apache-2.0
"""A group of simulated replicas whose collectives take time, on a virtual line and virtual clocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from farflung.base.checks import check_number
from farflung.comm.group import Op, Work
from farflung.cost.model import copies, hops
from farflung.testing.sim import SimGroup


@dataclass
class Clock:
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
    _near: Network | None = None

    def __post_init__(self) -> None:
        check_number("bandwidth_bps", self.bandwidth_bps, above=0, finite=False)
        check_number("latency_s", self.latency_s, least=0)

    def line(self, group: SimGroup) -> Line:
        return self._lines.setdefault((group.members, group.age), Line())

    def near(self) -> Network:
        """Return the network of neighbours, who are on one machine, so that nothing but waiting takes time."""
        self._near = self._near or Network()
        return self._near


class TimedGroup(SimGroup):
    """A `SimGroup` in which whoever waits for a collective has its clock moved on to the collective's end."""

    def __init__(self, group: SimGroup, network: Network, clock: Clock) -> None:
        super().__init__(group._stage, group._me, group.members, group._is_block)
        self._network = network
        self._line = network.line(group)
        self._clock = clock
        self._num_timed = 0
        self._is_free = False

    @contextmanager
    def for_free(self) -> Iterator[None]:
        """Let what all replicas do within this block cost nothing but waiting for each other."""
        self._is_free = True
        try:
            yield
        finally:
            self._is_free = False

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

    def split(self, size: int) -> SimGroup:
        """Return the block of neighbours, who are on one machine."""
        return TimedGroup(super().split(size), self._network.near(), self._clock)

    def _under_way(self, work: Work, num_bytes: float, num_hops: int) -> Work:
        sending_s = 0.0 if self._is_free else 8 * num_bytes / self._network.bandwidth_bps
        waiting_s = 0.0 if self._is_free else num_hops * self._network.latency_s
        number = self._num_timed
        self._num_timed += 1
        self._line.join(number, self._clock.now, self.size, sending_s, waiting_s)
        return _TimedWork(work, self._line, number, self._clock)


@dataclass(frozen=True)
class _TimedWork:
    """A collective under way."""

    work: Work
    line: Line
    number: int
    clock: Clock

    def wait(self) -> None:
        self.work.wait()
        self.clock.now = max(self.clock.now, self.line.ends[self.number])
