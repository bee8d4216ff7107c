# SPDX-License-Identifier: Apache-2.0
"""Starts a run on a Ray cluster: an actor for each machine or replica, which runs a launcher of ours under it.

The script is in no loop of Ray's. What an actor runs ends with it, and all of them with the launcher that started them.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

from farflung.base.errors import ConfigError, FarflungError
from farflung.base.events import Kind, record
from farflung.base.words import counted
from farflung.config import environ
from farflung.config.launch import DEFAULT_PORT
from farflung.launch.engines.connections import Connections, ForegroundEngine, this_launcher
from farflung.launch.engines.engine import Job, launcher_command
from farflung.launch.engines.ray_cluster import RayCluster, RayConnection, launcher_settings
from farflung.launch.supervisor import max_restarts

OPTIONS = {
    "address": "the cluster, host:6379, or local, a new one here [RAY_ADDRESS, or this machine's; else a new one]",
    "cpus": "CPUs of each machine or replica [1]",
    "gpus": "GPUs of each machine or replica [0]",
    "folder": "the working folder on the nodes [the path of this one]",
    "wait": "seconds to wait until enough nodes are free [300]",
}


class Ray(ForegroundEngine[RayConnection]):
    """The engine of `--engine ray`. The launcher that submits a run is its driver: the run ends with it."""

    def __init__(self, job: Job) -> None:
        job.check_options(OPTIONS, numbers=("cpus", "gpus", "wait"))
        self._job = job
        job.check_unicode("Ray")
        if job.options.get("cpus") == "0":
            raise ConfigError("engine_options has cpus=0; a launcher needs at least one.")
        address = job.options.get("address") or environ.text("RAY_ADDRESS") or ""
        if address.startswith("ray://"):
            raise ConfigError(
                f"address is {address}, which is for Ray's client. Start the run on a machine that reaches the cluster "
                "itself, with address=host:6379."
            )
        job.check_key("Ray would show it in its records: have --key_file name a file that each node has.")
        job.check_left_out(("main_process_ip", "machine_rank"), "Ray decides which nodes the machines are.")

    @cached_property
    def _cluster(self) -> RayCluster:
        return RayCluster(self._job)

    def check(self) -> None:
        """Connect with the cluster, and see whether its nodes have what the run needs."""
        self._cluster.check()

    def described(self) -> str:
        settings, lines = self._job.settings, []
        for number in range(self._job.count):
            place = launcher_settings(settings, number, "node-of-0", settings.main_process_port or DEFAULT_PORT)
            lines.append(f"[{number}] {' '.join(launcher_command(self._job.command(json=True, **place)))}")
        options = {"cpus": "1", "gpus": "0", **self._job.options}
        asked = f"an actor with cpus={options['cpus']} and gpus={options['gpus']}"
        return "\n".join([f"nothing is started (--dry-run); {asked} would run each of", *lines])

    def submit(self) -> Mapping[str, Any]:
        noun, job = "replica" if self._job.is_elastic else "machine", self._job
        names = [f"{noun} {number}" for number in range(job.count)]
        cluster, times = self._cluster, max_restarts(job.settings)
        self._connections = Connections(job.settings, cluster.token, cluster.start, names, times)
        self._wanted = self._next = job.count
        return this_launcher()

    def follow(self) -> int:
        try:
            return super().follow()
        finally:
            if not self._job.handle:  # it is this launcher's run
                self._cluster.leave()

    def scale(self, count: int) -> str:
        """Leave the number where the launcher that submitted the run looks for it."""
        self._job.write({**self._job.handle, "replicas": count})
        return f"{self._job.name} is to have {counted(count, 'replica')}; its launcher adds some, or has some sign out"

    def _look(self) -> None:
        """Start replicas in place of those on draining nodes; start and end some as `scale` has asked for."""
        supervisor = self._connections.supervisor
        if supervisor.signal:
            return
        draining = self._cluster.draining()
        staying = [connection for connection in supervisor.running.values() if not connection.is_leaving]
        for connection in staying:
            if connection.node in draining and self._job.is_elastic:
                self._sign_out(connection, "its node drains")
                self._add()
            elif connection.node in draining:
                connection.is_leaving = True
                message = f"the node of machine {connection.host} drains, and the run ends with it"
                record(Kind.NOTE, message=message)
            elif self._connections.is_done and not connection.node:  # it waits for a node, and the work is done
                connection.is_leaving = True
                connection.close()
        wanted = self._wanted
        with suppress(FarflungError):  # a folder that is gone or damaged ends no run
            wanted = int(Job.read(self._job.folder).handle.get("replicas", wanted))
        if wanted != self._wanted:
            staying = [connection for connection in supervisor.running.values() if not connection.is_leaving]
            for _ in range(wanted - len(staying) - len(supervisor.due)):
                self._add()
            for connection in staying[wanted:]:
                self._sign_out(connection, "the run is to have fewer replicas")
            self._wanted = wanted

    def _sign_out(self, connection: RayConnection, why: str) -> None:
        connection.is_leaving = True
        connection.send(signal.SIGTERM)
        record(Kind.NOTE, message=f"{connection.host} signs out: {why}")

    def _add(self) -> None:
        self._connections.supervisor.add(f"replica {self._next}")
        self._next += 1
