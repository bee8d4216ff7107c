# SPDX-License-Identifier: Apache-2.0
"""Stands in for the package ray, as its documents say: nodes are a table, and actors are objects of this process."""

from __future__ import annotations

import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor, TimeoutError as NotYet
from types import ModuleType, SimpleNamespace as Names
from typing import Any


class RayError(Exception): ...


class GetTimeoutError(RayError): ...


class Actor:
    """A handle: its methods run in threads of the actor, as soon as a node has a CPU for it."""

    def __init__(self, ray: StandIn, made: Any, asked: dict[str, Any]) -> None:
        self.ray, self.made, self.asked, self.node, self.error = ray, made, asked, "", ""
        self.threads = ThreadPoolExecutor(asked["max_concurrency"])

    def __getattr__(self, name: str) -> Any:
        return Names(remote=lambda *words: self.threads.submit(self._call, name, words))

    def _call(self, name: str, words: tuple[Any, ...]) -> Any:
        while not (self.node or self.error):
            self.ray.place(self)
            time.sleep(0.01)
        self.ray.here.node = self.node
        answer = None if self.error else getattr(self.made, name)(*words)
        if self.error:
            raise RayError(f"The actor died.\n{self.error}\n")
        return answer

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in vars(self.made).values() if isinstance(process, subprocess.Popen)]

    @property
    def has_ended(self) -> bool:
        """Whether its node is free: it is dead, or nobody has its handle, once its launcher has ended."""
        return bool(self.error) or any(process.poll() is not None for process in self.processes)

    def end(self, error: str) -> None:
        """End its worker, and so the pipes to what that has started."""
        self.error = error
        for process in self.processes:
            process.stdin.close()


class StandIn(ModuleType):
    """The module; `places` has the address of each node that is alive, each with one CPU and no GPU."""

    exceptions = Names(RayError=RayError, GetTimeoutError=GetTimeoutError, ActorUnavailableError=())

    def __init__(self, **places: str) -> None:
        super().__init__("ray")
        self.places, self.actors, self.draining, self.connected = places, list[Actor](), set[str](), list[Any]()
        self.here, self._lock = threading.local(), threading.Lock()
        group = Names(wait=lambda timeout_s: self._groups[-1] <= len(self.places))
        self._groups: list[int] = []
        self.util = Names(
            get_node_ip_address=lambda: self.places[self.here.node],
            placement_group=lambda bundles, strategy: self._groups.append(len(bundles)) or group,
            scheduling_strategies=Names(PlacementGroupSchedulingStrategy=lambda group, index: index),
        )

    def modules(self) -> dict[str, Any]:
        state = Names(state=Names(get_draining_nodes=lambda: self.draining))
        return {"ray": self, "ray._private.state": state} | dict.fromkeys(
            ("ray._private", "ray.util", "ray.util.placement_group"), self.util
        )

    def is_initialized(self) -> bool:
        return False

    def init(self, **words: Any) -> None:
        self.connected.append(words["address"])

    def shutdown(self) -> None:
        self.connected.clear()
        for actor in self.actors:
            actor.end("The driver has ended.")

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": node in self.places, "Resources": {"CPU": 1.0}} for node in (*self.places, "a dead one")]

    def get_runtime_context(self) -> Any:
        return Names(get_node_id=lambda: self.here.node)

    def remote(self, kind: type) -> Any:
        def made(asked: dict[str, Any]) -> Actor:
            self.actors.append(Actor(self, kind(), asked))
            return self.actors[-1]

        return Names(options=lambda **asked: Names(remote=lambda: made(asked)))

    def place(self, actor: Actor) -> None:
        """Give an actor its node, if that is free: the one of its group, or any."""
        with self._lock:
            taken = {other.node for other in self.actors if not other.has_ended} | self.draining
            index = actor.asked["scheduling_strategy"]
            nodes = list(self.places) if index == "SPREAD" else [list(self.places)[index]]
            actor.node = next((node for node in nodes if node not in taken), "")

    def get(self, answer: Any, timeout: float | None = None) -> Any:
        try:
            return answer.result(timeout)
        except NotYet:
            raise GetTimeoutError from None
        except RuntimeError as error:  # of the method
            failed = RayError("a task has failed")
            failed.cause = error
            raise failed from None

    def kill(self, actor: Actor) -> None:
        actor.end("It was killed by `ray.kill`.")

    def lose(self, node: str) -> None:
        """Have a node die."""
        del self.places[node]
        for actor in self.actors:
            if actor.node == node:
                actor.end("It died because its node has died.")
