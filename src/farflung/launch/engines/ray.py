# SPDX-License-Identifier: Apache-2.0
"""Starts a run on a Ray cluster: an actor for each machine or replica, which runs a launcher of ours under it.

The script is in no loop of Ray's. What an actor runs ends with it, and all of them with the launcher that started them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any, ClassVar

from farflung.base.errors import ConfigError
from farflung.base.words import counted
from farflung.config import environ
from farflung.config.launch import DEFAULT_PORT
from farflung.launch.codes import BY_SIGNAL, DONE
from farflung.launch.engines.engine import Job, launcher
from farflung.launch.engines.lines import Lines, end_launcher, shown_elsewhere, this_launcher
from farflung.launch.engines.nodes import Cluster, RayLine, place_of
from farflung.launch.events import say

OPTIONS = {
    "address": "the cluster, host:6379, or local, a new one here [RAY_ADDRESS, or this machine's; else a new one]",
    "cpus": "CPUs of each machine or replica [1]",
    "gpus": "GPUs of each machine or replica [0]",
    "folder": "the working folder on the nodes [the path of this one]",
    "wait": "seconds to wait until enough nodes are free [300]",
}
_RESTARTS = 3  # of replicas that are lost with their node, as of one in its launcher
_LOOK_S = 1.0


class Ray:
    """The engine of `--engine ray`. The launcher that submits a run is its driver: the run ends with it."""

    outlives_launch: ClassVar[bool] = False

    def __init__(self, job: Job) -> None:
        job.check_options(OPTIONS)
        self._job, own = job, job.settings
        for name in ("cpus", "gpus", "wait"):
            value = job.options.get(name, "1")
            if not value.isdecimal() or (name == "cpus" and value == "0"):
                raise ConfigError(f"engine_options has {name}={value}; use a whole number.")
        address = job.options.get("address") or environ.text("RAY_ADDRESS") or ""
        if address.startswith("ray://"):
            raise ConfigError(
                f"address is {address}, which is for Ray's client. Start the run on a machine that reaches the cluster "
                "itself, with address=host:6379."
            )
        for name in ("main_process_ip", "machine_rank"):
            if getattr(own, name):
                raise ConfigError(f"{name} is {getattr(own, name)}, but Ray decides which nodes the machines are.")
        self._machines: _Machines | None = None

    @cached_property
    def _cluster(self) -> Cluster:
        return Cluster(self._job)

    def check(self) -> None:
        """Connect with the cluster, and see whether its nodes have what the run needs."""
        self._cluster.check()

    def described(self) -> str:
        """Return the launchers' commands; addresses are known once there are nodes."""
        own, lines = self._job.settings, []
        for number in range(self._job.count):
            place = place_of(own, number, "node-of-0", own.main_process_port or DEFAULT_PORT)
            lines.append(f"[{number}] {' '.join(launcher(self._job.command(json=True, **place)))}")
        options = {"cpus": "1", "gpus": "0", **self._job.options}
        asked = f"an actor with cpus={options['cpus']} and gpus={options['gpus']}"
        return "\n".join([f"nothing is started (--dry-run); {asked} would run each of", *lines])

    def submit(self) -> Mapping[str, Any]:
        """Have nodes chosen, and start a launcher on each."""
        self._machines = _Machines(self._job, self._cluster)
        return this_launcher()

    def follow(self) -> int:
        """Print what the machines print until all have ended."""
        if self._machines is None:
            raise shown_elsewhere("Ray", self._job.name, self._job.ticket)
        try:
            return self._machines.follow()
        finally:
            self._cluster.leave()

    def scale(self, count: int) -> str:
        """Leave the number where the launcher that submitted the run looks for it."""
        self._job.write({**self._job.ticket, "replicas": count})
        return f"{self._job.name} is to have {counted(count, 'replica')}; its launcher adds some, or has some sign out"

    def cancel(self) -> str:
        """End the launcher that submitted the run; what it has started ends with it."""
        return end_launcher(self._job.name, self._job.ticket)


class _Machines(Lines[RayLine]):
    """The machines of a fixed run, or the replicas of an elastic one: some are lost, drained, added or let go."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        super().__init__(job.settings, cluster.started())
        self._job, self._cluster = job, cluster
        self._wanted, self._next, self._look_at = len(self.all), len(self.all), 0.0
        self._restarts = _RESTARTS if job.settings.max_restarts is None else job.settings.max_restarts
        self._told: set[str] = set()

    @property
    def _is_done(self) -> bool:
        return any(line.code == DONE for line in self.all)

    def _is_lost(self, line: RayLine) -> bool:
        return bool(self._restarts) and (line.is_gone or (line.code or 0) > BY_SIGNAL)

    def _goes_on(self) -> bool:
        changes = any(line.leaves or (self._is_lost(line) and not self._is_done) for line in self.all)
        return super()._goes_on() or (self._is_elastic and changes and not self._signal)

    def _note_lost(self) -> None:
        now = time.monotonic()
        if now < self._look_at or self._signal:
            return
        self._look_at = now + _LOOK_S
        draining = self._cluster.draining()
        if not self._is_elastic:
            for line in self.all:
                if line.node in draining and line.node not in self._told:
                    self._told.add(line.node)
                    self._say("note", f"the node of machine {line.host} drains, and the run ends with it")
            return
        is_done = self._is_done
        for line in list(self.all):
            self._note(line, is_done, draining)
        wanted = int(Job.read(self._job.folder).ticket.get("replicas", self._wanted))
        if wanted != self._wanted:
            running = [line for line in self.all if line.code is None and not line.leaves]
            for _ in range(wanted - len(running)):
                self._start()
            for line in running[wanted:]:
                self._let_go(line, "the run is to have fewer replicas")
            self._wanted = wanted

    def _note(self, line: RayLine, is_done: bool, draining: Collection[str]) -> None:
        """Let go of a replica whose node drains; start one that was lost, or has left such a node, somewhere else."""
        if line.code is None:
            if line.node in draining and not line.leaves:
                self._let_go(line, "its node drains")
                self._start()
            elif is_done and not line.node:  # it waits for a node, and the work is done
                self.all.remove(line)
                line.kill()
        elif line.leaves:
            self.all.remove(line)
        elif self._is_lost(line) and not is_done:
            self.all.remove(line)
            self._restarts -= 1
            self._say("lost", f"{line.host} is gone: {line.said}; a replica starts in its place")
            self._start()

    def _let_go(self, line: RayLine, why: str) -> None:
        line.leaves = True
        line.tell(signal.SIGTERM)
        self._say("note", f"{line.host} signs out: {why}")

    def _start(self) -> None:
        self.add(self._cluster.replica(self._next))
        self._next += 1

    def _say(self, event: str, words: str) -> None:
        say(self._settings, event, words, is_error=event == "lost")
