# SPDX-License-Identifier: Apache-2.0
"""Where the launchers of a run meet: at a store that machine 0 serves afresh for each attempt.

torch's own keeps one store for all attempts. A rank that is started again then reads where the ranks of the attempt
before listened, or that one of them has left, and fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

from farflung.process.sockets import serve_store

BACKEND = "farflung"

_MEET_WITHIN_S = 600  # torch's own
_POLL_S = 0.1
_ATTEMPT = "attempt"


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
        store = PrefixStore(self._params.run_id, self._found(port))
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
        deadline = time.monotonic() + self._timeout_s
        left_s = float(self._timeout_s)
        while left_s > 0:
            store = TCPStore(self._host, port, is_master=False, timeout=timedelta(seconds=max(1.0, left_s)))
            with suppress(DistError):  # it ends meanwhile
                attempt = int(store.get(_ATTEMPT))
                if attempt > self._attempt:
                    self._attempt = attempt
                    store.set_timeout(timedelta(seconds=self._timeout_s))
                    return store
            time.sleep(_POLL_S)
            left_s = deadline - time.monotonic()
        raise RendezvousTimeoutError(
            f"machine 0 has not begun another attempt within {self._timeout_s} s after ranks of machine {self._rank} "
            "failed"
        )

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


def registered() -> str:
    """Make this rendezvous known to torch's elastic agents, and return the name that they find it by."""
    rendezvous_handler_registry.register(BACKEND, FreshStores)
    return BACKEND
