# SPDX-License-Identifier: Apache-2.0
"""Where the launchers of a run meet: at a store that machine 0 serves afresh for each attempt.

torch's own keeps one store for all attempts. A rank that is started again then reads where the ranks of the attempt
before listened, or that one of them has left, and fails.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import DistError, DistStoreError, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

from farflung.comm.patience import aloud, waiting
from farflung.comm.threads import ThreadedCall
from farflung.process.sockets import serve_store

BACKEND = "farflung"

_MEET_WITHIN_S = 600  # torch's own
_POLL_S, _POLL_LATER_S = 0.01, 0.1
_ATTEMPT = "attempt"
_LONGER_S = 2.0  # for torch, whose words for a time-out depend on what has no answer


class FreshStores(RendezvousHandler):
    """A rendezvous of a fixed number of machines; each knows its own number.

    Args:
        params: torch's. Of the backend's own settings it reads `rank`, the machine's number; `timeout`, in seconds;
            `listen`, the address at which machine 0 serves the stores; and `begins`, which is called with the number of
            each attempt, from 1 on, before the machines meet for it.
    """

    use_agent_store = True

    def __init__(self, params: RendezvousParameters) -> None:
        host, _, port = params.endpoint.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._params = params
        self._rank = int(params.config["rank"])
        self._timeout_s = int(params.config.get("timeout", _MEET_WITHIN_S))
        self._begins: Callable[[int], None] = params.config["begins"]
        self._attempt = 0
        self._server: Any = None

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        self._begins(self._attempt + 1)
        port = self._serve() if self._rank == 0 else self._port
        store = _InterruptibleStore(self._params.run_id, self._found(port), self._say("the others"))
        return RendezvousInfo(store, self._rank, self._params.max_nodes, RendezvousStoreInfo(self._host, port))

    def _serve(self) -> int:
        """Put a new store in the place of the former one; return its port, any free one if none was named."""
        self._server = None  # it listens at the same port
        listen = self._params.config["listen"] or self._host
        try:
            self._server = serve_store(self._host, self._port, listen, wait_for_workers=False)
        except OSError as error:
            raise RendezvousConnectionError(f"machine 0 can't listen at {listen}: {error.strerror}") from error
        self._server.set(_ATTEMPT, str(self._attempt + 1))
        return int(self._server.port)

    def _found(self, port: int) -> Any:
        """Connect to the store of an attempt that is new here; machine 0 may still serve that of the one before."""
        connecting: ThreadedCall[Any] | None = None
        for waited_s in waiting(_POLL_S, self._timeout_s, self._say("machine 0"), _POLL_LATER_S):
            if connecting is None:
                left = timedelta(seconds=self._timeout_s - waited_s + _LONGER_S)
                connect = partial(TCPStore, self._host, port, is_master=False, timeout=left)
                connecting = ThreadedCall(connect, "connect to machine 0")
            elif connecting.is_over:
                store, connecting = connecting.result(), None
                with suppress(DistError):  # it ends meanwhile
                    attempt = int(store.get(_ATTEMPT))
                    if attempt > self._attempt:
                        self._attempt = attempt
                        store.set_timeout(timedelta(seconds=self._timeout_s))
                        return store
        if connecting is not None:
            raise RendezvousTimeoutError(f"timed out after {self._timeout_s} s without an answer")
        raise RendezvousTimeoutError(
            f"machine 0 has not begun another attempt within {self._timeout_s} s after ranks of machine {self._rank} "
            "failed"
        )

    def _say(self, whom: str) -> Callable[[float], None]:
        who = f"machine {self._rank} of {self._params.max_nodes}"
        return aloud(who, f"for {whom} at {self._params.endpoint}")

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return None

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._params.run_id

    def shutdown(self) -> bool:
        return True


class _InterruptibleStore(PrefixStore):
    """A store at which the agent waits for other machines in Python, where signals are heard: until all have come, and
    until the ranks of all have ended.
    """

    def __init__(self, prefix: str, store: Any, say: Callable[[float], None]) -> None:
        super().__init__(prefix, store)
        self._say = say

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        within = timeout or self.timeout  # type: ignore[attr-defined]  # torch.distributed has no type for it
        for _ in waiting(_POLL_S, within.total_seconds(), self._say, _POLL_LATER_S):
            if self.check(keys):
                return
        raise DistStoreError(f"the wait for the other machines timed out after {within}")

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(super().get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return list(super().multi_get(keys))


def registered() -> str:
    """Make this rendezvous known to torch's elastic agents, and return the name that they find it by."""
    rendezvous_handler_registry.register(BACKEND, FreshStores)
    return BACKEND
