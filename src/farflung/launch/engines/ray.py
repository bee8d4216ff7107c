# SPDX-License-Identifier: Apache-2.0
"""Starts a run on a Ray cluster: an actor for each machine or replica, which runs a launcher of ours under it.

The script is in no loop of Ray's. What an actor runs ends with it, and all of them with the launcher that started them.
"""

from __future__ import annotations

import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from farflung.base.errors import ConfigError, FarflungError
from farflung.base.events import Kind, record
from farflung.base.words import counted
from farflung.comm.patience import waiting
from farflung.config import environ
from farflung.config.launch import DEFAULT_PORT, LaunchSettings
from farflung.launch.codes import EngineFailure
from farflung.launch.engines.connections import GONE, Connection, Connections, ForegroundEngine
from farflung.launch.engines.engine import Job, launcher_command
from farflung.launch.network import get_free_port
from farflung.launch.shell import start_of
from farflung.launch.supervisor import max_restarts
from farflung.process.identity import this_process
from farflung.process.tether import SIGN_S

_OPTIONS = ("address", "cpus", "gpus", "folder", "wait")  # keys of `engine_options`
_ANSWER_WITHIN_S, _CONNECT_WITHIN_S = 1.0, 10.0
# Ray kills the processes that a worker has started when that ends, but not theirs: they are to end by themselves.
_APART = ("/bin/sh", "-c", 'exec 3<&0; "$@" <&3 3<&- & wait $!', "sh")


class LauncherActor:
    """What runs on a node, as an actor of several threads: a launcher, and the lines that it prints."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        self._open = len(self._lines)
        self._news = threading.Condition()

    def locate(self) -> tuple[str, str, int]:
        """Return the node's address, its id, and a port that is free there."""
        import ray

        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), get_free_port()

    def start(self, words: Sequence[str], folder: str, token: str) -> None:
        """Start a launcher: `words` follow `farflung`; `token` is before its reports."""
        command = [
            *_APART,
            *(*start_of("farflung.process.tether"), "--reports", token),
            *launcher_command(words, sys.executable),
        ]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe)
        except OSError as error:
            raise RuntimeError(f"nothing could be started in {folder}: {error.strerror}") from None
        for name in self._lines:
            threading.Thread(target=self._collect, args=(name,), daemon=True).start()
        threading.Thread(target=self._keep_alive, daemon=True).start()

    def read(self, name: str) -> tuple[list[bytes], int | None]:
        """Return the lines of a stream that nobody has read, and the exit code once there are no more."""
        with self._news:
            self._news.wait_for(lambda: self._lines[name] or not self._open, _ANSWER_WITHIN_S)
            lines, self._lines[name] = self._lines[name], []
            is_all = not self._open
        return lines, self._process.wait() if is_all and self._process else None

    def send_signal(self, number: int) -> None:
        """Send the launcher a signal; 0 is a heartbeat alone."""
        if self._process and self._process.stdin:
            with suppress(OSError):
                self._process.stdin.write(bytes([number]))
                self._process.stdin.flush()

    def _collect(self, name: str) -> None:
        assert self._process is not None
        with getattr(self._process, name) as stream:
            for line in stream:
                with self._news:
                    self._lines[name].append(line)
                    self._news.notify_all()
        with self._news:
            self._open -= 1
            self._news.notify_all()

    def _keep_alive(self) -> None:
        for _ in waiting(SIGN_S):
            if not self._process or self._process.poll() is not None:
                return
            self.send_signal(0)


class RayConnection(Connection):
    """The connection to an actor.

    Attributes:
        node: the id of the actor's node; empty until it has one.
    """

    def __init__(self, ray: Any, actor: Any, name: str) -> None:
        super().__init__(name, (self._read("stdout"), self._read("stderr")))
        self.number = int(name.split()[1])
        self.host, self.node = str(self.number), ""
        self._ray, self._actor = ray, actor
        self._code: int | None = None
        self._start: Any = None

    def start(self, words: Sequence[str], folder: str, token: str) -> None:
        """Have the actor start a launcher, once it has a node."""
        self._start = self._actor.start.remote(list(words), folder, token)

    def locate(self, wait_s: float | None = None) -> tuple[str, int]:
        """Wait until the actor has a node; return that node's address and a port that is free there."""
        address, self.node, port = self._ray.get(self._actor.locate.remote(), timeout=wait_s)
        self.host = f"{self.number}@{address}"
        return address, port

    def code_of_line(self) -> int | None:
        return self._code

    def pass_on(self, number: int) -> None:
        if number and not self.node:  # it waits for one
            self.close()
        elif number:
            self._actor.send_signal.remote(number)

    def close(self) -> None:
        self._ray.kill(self._actor)

    def _read(self, name: str) -> Iterator[bytes]:
        code, has_started = None, False
        while code is None:
            try:
                if not has_started:
                    self.locate()
                    has_started = self._ray.get(self._start) is None
                lines, code = self._ray.get(self._actor.read.remote(name))
                yield from lines
            except self._ray.exceptions.ActorUnavailableError:  # and it may come back
                time.sleep(_ANSWER_WITHIN_S)
            except self._ray.exceptions.RayError as error:
                self.last_line, code = in_short(error), GONE
        self._code = code


def in_short(error: Exception) -> str:
    """Return the last sentence of Ray's error, which is the reason."""
    lines = [line.strip() for line in str(getattr(error, "cause", None) or error).splitlines() if line.strip()]
    return next((line for line in lines if "because" in line), lines[-1] if lines else type(error).__name__)


def launcher_settings(settings: LaunchSettings, number: int, host: str, port: Any) -> dict[str, Any]:
    """Return the settings of one launcher; `host`, `port`: of the first one, which serves what the others need."""
    if settings.elastic is not None:
        return {"replicas": 1, "meet": settings.meet or f"tcp://{host}:{port}"}
    if settings.num_machines == 1:
        return {}
    return {"machine_rank": number, "main_process_ip": host, "main_process_port": settings.main_process_port or port}


class RayCluster:
    """A Ray cluster, as the process that is connected with it sees it."""

    def __init__(self, job: Job) -> None:
        try:
            import ray
            import ray.util.placement_group
        except ImportError:
            raise EngineFailure("The engine ray needs a package: pip install 'farflung[ray]'.") from None
        self._ray, self._job, options = ray, job, job.options
        self._asked = {"CPU": float(options.get("cpus", 1)), "GPU": float(options.get("gpus", 0))}
        self._wait_s, self._folder = float(options.get("wait", 300)), options.get("folder", str(Path.cwd()))
        self._first: tuple[str, int] = ("", 0)
        self.token = secrets.token_hex(16)
        if ray.is_initialized():
            return
        address = options.get("address") or environ.text("RAY_ADDRESS") or None
        try:
            if address and (where := re.fullmatch(r"(.+):(\d+)", address)):  # Ray itself would try for minutes
                socket.create_connection((where[1].strip("[]"), int(where[2])), _CONNECT_WITHIN_S).close()
            ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # Ray raises all sorts, and this very one if a node does not start in 30 s
            raise EngineFailure(f"Ray's cluster at {address} can't be reached: {in_short(error)}.") from None

    def leave(self) -> None:
        """End the connection, with all actors."""
        self._ray.shutdown()

    def check(self) -> None:
        """Raise EngineFailure if too few nodes have what a machine needs, even if nobody else used them."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        fit = [node for node in nodes if all(node.get(name, 0.0) >= value for name, value in self._asked.items())]
        least = 1 if self._job.is_elastic else self._job.count
        if len(fit) < least:
            has = ", ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
            self.leave()
            raise EngineFailure(
                f"{counted(least, 'node')} with {self._asked['CPU']:g} CPUs and {self._asked['GPU']:g} GPUs each are "
                f"needed, but the cluster has {len(fit)}; its nodes have {has}. Change cpus and gpus in engine_options."
            )

    def start(self, name: str) -> RayConnection:
        """Start the launcher of `machine 0`, say; return the connection to it.

        Machines have nodes of their own at once; a replica gets one that is free, now or later. The node of the first
        launcher is waited for if it serves what the others need.
        """
        job, connection = self._job, RayConnection(self._ray, self._actor(name), name)
        if not self._first[0] and not (job.is_elastic and job.settings.meet):
            try:
                self._first = connection.locate(self._wait_s)
            except self._ray.exceptions.GetTimeoutError:
                self.leave()
                raise EngineFailure(f"No node was free within {self._wait_s:g} s. Use wait=SECONDS.") from None
        words = job.command(json=True, **launcher_settings(job.settings, connection.number, *self._first))
        connection.start(words, self._folder, self.token)
        return connection

    @cached_property
    def _nodes(self) -> Any:
        """A node for each machine of a fixed run: Ray's placement group."""
        group = self._ray.util.placement_group([dict(self._asked)] * self._job.count, strategy="STRICT_SPREAD")
        if not group.wait(self._wait_s):
            self.leave()
            raise EngineFailure(
                f"{counted(self._job.count, 'node')} with {self._asked} each were not free within {self._wait_s:g} s. "
                "Wait longer, with wait=SECONDS in engine_options, or ask for fewer."
            )
        return group

    def _actor(self, name: str) -> Any:
        strategy: Any = "SPREAD"
        if not self._job.is_elastic:
            scheduling = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            strategy = scheduling(self._nodes, int(name.split()[1]))
        settings = {"num_cpus": self._asked["CPU"], "num_gpus": self._asked["GPU"], "max_concurrency": 8}
        return self._ray.remote(LauncherActor).options(scheduling_strategy=strategy, **settings).remote()

    def draining(self) -> Collection[str]:
        """Return the ids of nodes that are about to end. Ray has no public name for it."""
        from ray._private.state import state

        found: Collection[str] = state.get_draining_nodes()
        return found


class Ray(ForegroundEngine[RayConnection]):
    """The engine of `--engine ray`. The launcher that submits a run is its driver: the run ends with it."""

    def __init__(self, job: Job) -> None:
        job.check_options(_OPTIONS, numbers=("cpus", "gpus", "wait"))
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
        self._next, self._asked = job.count, (job.count, 0.0)  # replicas, and when `scale` has asked for them
        return this_process()

    def follow(self) -> int:
        try:
            return super().follow()
        finally:
            if not self._job.handle:  # it is this launcher's run
                self._cluster.leave()

    def scale(self, count: int) -> str:
        """Leave the number where the launcher that submitted the run looks for it."""
        self._job.write({**self._job.handle, "replicas": count, "asked_at": time.time()})
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
        asked = self._asked
        with suppress(FarflungError):  # a folder that is gone or damaged ends no run
            handle = Job.read(self._job.folder).handle
            asked = int(handle.get("replicas", asked[0])), handle.get("asked_at", 0.0)
        if asked != self._asked:  # also for the same number as before: replicas may have been lost since then
            self._asked, wanted = asked, asked[0]
            staying = [connection for connection in supervisor.running.values() if not connection.is_leaving]
            for _ in range(wanted - len(staying) - len(supervisor.due)):
                self._add()
            for connection in staying[wanted:]:
                self._sign_out(connection, "the run is to have fewer replicas")

    def _sign_out(self, connection: RayConnection, why: str) -> None:
        connection.is_leaving = True
        connection.send(signal.SIGTERM)
        record(Kind.NOTE, message=f"{connection.host} signs out: {why}")

    def _add(self) -> None:
        self._connections.supervisor.add(f"replica {self._next}")
        self._next += 1
