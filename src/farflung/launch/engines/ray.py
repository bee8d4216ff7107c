# SPDX-License-Identifier: Apache-2.0
"""Starts a run on a Ray cluster: an actor for each machine or replica, which runs a launcher of ours under it.

The script is in no loop of Ray's. What an actor runs ends with it, and all of them with the launcher that started them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

from farflung.base.errors import ConfigError
from farflung.base.words import counted
from farflung.config import environ
from farflung.config.launch import DEFAULT_PORT
from farflung.launch.codes import BY_SIGNAL, DONE
from farflung.launch.engines.connections import Connections, ForegroundEngine, this_launcher
from farflung.launch.engines.engine import Job, launcher_command
from farflung.launch.engines.ray_cluster import RayCluster, RayConnection, launcher_settings
from farflung.launch.events import say

OPTIONS = {
    "address": "the cluster, host:6379, or local, a new one here [RAY_ADDRESS, or this machine's; else a new one]",
    "cpus": "CPUs of each machine or replica [1]",
    "gpus": "GPUs of each machine or replica [0]",
    "folder": "the working folder on the nodes [the path of this one]",
    "wait": "seconds to wait until enough nodes are free [300]",
}
_RESTARTS = 3  # of a replica that is lost with its node, equal to those under a launcher
_LOOK_S = 1.0


class Ray(ForegroundEngine[RayConnection]):
    """The engine of `--engine ray`. The launcher that submits a run is its driver: the run ends with it."""

    def __init__(self, job: Job) -> None:
        job.check_options(OPTIONS, numbers=("cpus", "gpus", "wait"))
        self._job, own = job, job.settings
        if job.options.get("cpus") == "0":
            raise ConfigError("engine_options has cpus=0; a launcher needs at least one.")
        address = job.options.get("address") or environ.text("RAY_ADDRESS") or ""
        if address.startswith("ray://"):
            raise ConfigError(
                f"address is {address}, which is for Ray's client. Start the run on a machine that reaches the cluster "
                "itself, with address=host:6379."
            )
        for name in ("main_process_ip", "machine_rank"):
            if getattr(own, name):
                raise ConfigError(f"{name} is {getattr(own, name)}, but Ray decides which nodes the machines are.")

    @cached_property
    def _cluster(self) -> RayCluster:
        return RayCluster(self._job)

    def check(self) -> None:
        """Connect with the cluster, and see whether its nodes have what the run needs."""
        self._cluster.check()

    def described(self) -> str:
        """Return the launchers' commands; addresses are known once there are nodes."""
        own, lines = self._job.settings, []
        for number in range(self._job.count):
            place = launcher_settings(own, number, "node-of-0", own.main_process_port or DEFAULT_PORT)
            lines.append(f"[{number}] {' '.join(launcher_command(self._job.command(json=True, **place)))}")
        options = {"cpus": "1", "gpus": "0", **self._job.options}
        asked = f"an actor with cpus={options['cpus']} and gpus={options['gpus']}"
        return "\n".join([f"nothing is started (--dry-run); {asked} would run each of", *lines])

    def submit(self) -> Mapping[str, Any]:
        """Have nodes chosen, and start a launcher on each."""
        self._connections = _RayConnections(self._job, self._cluster)
        return this_launcher()

    def scale(self, count: int) -> str:
        """Leave the number where the launcher that submitted the run looks for it."""
        self._job.write({**self._job.handle, "replicas": count})
        return f"{self._job.name} is to have {counted(count, 'replica')}; its launcher adds some, or has some sign out"


class _RayConnections(Connections[RayConnection]):
    """The machines of a fixed run, or the replicas of an elastic one: some are lost, drained, added or ended."""

    def __init__(self, job: Job, cluster: RayCluster) -> None:
        super().__init__(job.settings, cluster.start(), cluster.token)
        self._job, self._cluster = job, cluster
        self._wanted, self._next, self._look_at = len(self.all), len(self.all), 0.0
        self._restarts = _RESTARTS if job.settings.max_restarts is None else job.settings.max_restarts
        self._told: set[str] = set()

    def follow(self) -> int:
        try:
            return super().follow()
        finally:
            self._cluster.leave()

    @property
    def _is_done(self) -> bool:
        return any(connection.code == DONE for connection in self.all)

    def _is_lost(self, connection: RayConnection) -> bool:
        return bool(self._restarts) and (connection.is_gone or (connection.code or 0) > BY_SIGNAL)

    def _is_running(self) -> bool:
        changes = any(
            connection.is_leaving or (self._is_lost(connection) and not self._is_done) for connection in self.all
        )
        return super()._is_running() or (self._is_elastic and changes and not self._signal)

    def _report_lost(self) -> None:
        now = time.monotonic()
        if now < self._look_at or self._signal:
            return
        self._look_at = now + _LOOK_S
        draining = self._cluster.draining()
        if not self._is_elastic:
            for connection in self.all:
                if connection.node in draining and connection.node not in self._told:
                    self._told.add(connection.node)
                    self._say("note", f"the node of machine {connection.host} drains, and the run ends with it")
            return
        is_done = self._is_done
        for connection in list(self.all):
            self._note(connection, is_done, draining)
        wanted = int(Job.read(self._job.folder).handle.get("replicas", self._wanted))
        if wanted != self._wanted:
            running = [connection for connection in self.all if connection.code is None and not connection.is_leaving]
            for _ in range(wanted - len(running)):
                self._start()
            for connection in running[wanted:]:
                self._sign_out(connection, "the run is to have fewer replicas")
            self._wanted = wanted

    def _note(self, connection: RayConnection, is_done: bool, draining: Collection[str]) -> None:
        """Have a replica on a draining node sign out; start one elsewhere for each that did, or was lost."""
        if connection.code is None:
            if connection.node in draining and not connection.is_leaving:
                self._sign_out(connection, "its node drains")
                self._start()
            elif is_done and not connection.node:  # it waits for a node, and the work is done
                self.all.remove(connection)
                connection.kill()
        elif connection.is_leaving:
            self.all.remove(connection)
        elif self._is_lost(connection) and not is_done:
            self.all.remove(connection)
            self._restarts -= 1
            self._say("lost", f"{connection.host} is gone: {connection.said}; a replica starts in its place")
            self._start()

    def _sign_out(self, connection: RayConnection, why: str) -> None:
        connection.is_leaving = True
        connection.send_signal(signal.SIGTERM)
        self._say("note", f"{connection.host} signs out: {why}")

    def _start(self) -> None:
        self.add(self._cluster.start_replica(self._next))
        self._next += 1

    def _say(self, event: str, words: str) -> None:
        say(self._settings, event, words, is_error=event == "lost")
