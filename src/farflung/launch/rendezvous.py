# SPDX-License-Identifier: Apache-2.0
"""How the machines of a run meet: at a store that machine 0 serves, at one address alone.

torch's own `static` and `c10d` rendezvous do the same with a store that listens on every interface.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from farflung.process.sockets import serve_store

NAME = "farflung"


class StoreRendezvous:
    """A rendezvous of torch's elastic agent: which machine is which is known before, as with `static`.

    Args:
        params: torch's `RendezvousParameters`. `rank` is the machine's number, `listen` the address at which machine 0
            serves the store, `timeout` how many seconds the machines wait for each other.
    """

    def __init__(self, params: Any) -> None:
        self._run_id = params.run_id
        self._num_machines = params.max_nodes
        self._rank = int(params.get("rank", 0))
        self._listen = params.get("listen")
        self._timeout = timedelta(seconds=int(params.get("timeout", 600)))
        host, _, port = params.endpoint.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._store: Any = None

    use_agent_store = True  # so no rank serves a store of its own

    def get_backend(self) -> str:
        return NAME

    def next_rendezvous(self) -> Any:
        """Return the store, this machine's number and how many there are, once all have come."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        if self._store is None:
            self._store = self._connect()
        place = RendezvousStoreInfo(self._host, self._port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), self._rank, self._num_machines, place)

    def _connect(self) -> Any:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError

        options: dict[str, Any] = {"world_size": self._num_machines, "timeout": self._timeout}
        if self._rank > 0:
            return TCPStore(self._host, self._port, is_master=False, **options)
        try:
            store = serve_store(self._host, self._port, self._listen, **options)
        except OSError as error:
            raise RendezvousConnectionError(f"machine 0 can't listen at {self._listen}: {error.strerror}") from error
        self._port = store.port
        return store

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: no machine joins later."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return str(self._run_id)

    def shutdown(self) -> bool:
        return True
