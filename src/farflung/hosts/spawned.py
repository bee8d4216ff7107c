# SPDX-License-Identifier: Apache-2.0
"""Follows processes that a script starts by itself (`torch.multiprocessing.spawn`, `Process`), once they join a group,
in the same way as the launcher's ranks.

A script is started once, with `--num_processes 1`, and its processes meet at an address of the script's own. They have
the launcher's variables too, by which torch would look for its store there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from inspect import signature
from multiprocessing.process import BaseProcess
from typing import Any

from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.hosts.patching import around

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_MEETING = ("MASTER_ADDR", "MASTER_PORT")
_HELPERS = ("torch.utils.data.", "multiprocessing.")  # whose processes train nothing


class Spawned:
    """Wraps the function that a process calls: takes over its DDP models, and ends their outer loops after it.

    Args:
        take_over: makes the takeover of a process, for one that is not forked.
        takeover: that of the process that starts it, which a forked process has inherited.
        launched: that process, by the launcher's variables: where ranks meet, and how many are on its machine.
    """

    def __init__(
        self, target: Callable[..., Any], take_over: Callable[[], Any], takeover: Any, launched: list[str | None]
    ) -> None:
        self._target, self._take_over, self._takeover, self._launched = target, take_over, takeover, launched

    def __reduce__(self) -> Any:
        return Spawned, (self._target, self._take_over, None, self._launched)

    def __call__(self, *args: Any, **options: Any) -> Any:
        takeover = self._takeover
        if takeover is None:
            takeover = self._take_over()
        else:
            takeover.forget()
        around(sys.modules["torch.distributed"], "init_process_group", partial(self._init_group, takeover))
        try:
            result = self._target(*args, **options)
            takeover.close()
            return result
        except BaseException as error:
            takeover.leave(error) if not isinstance(error, SystemExit) or error.code else takeover.close()
            raise

    def _init_group(self, takeover: Any, init: Callable[..., None], *args: Any, **options: Any) -> None:
        """Connect to the group that the script asks for, and set the launcher's variables to the rank in it."""
        given = signature(init).bind(*args, **options).arguments
        url = given.get("init_method") or "env://"
        *meeting, local_size = self._launched
        if local_size not in (None, "1"):
            raise ConfigError(
                f"This process was started by one of {local_size} that the launcher has started here. A script that "
                "starts its processes by itself is launched with --num_processes 1 (for each machine)."
            )
        if given.get("store") or not url.startswith("env://") or [*map(environ.text, _MEETING)] != meeting:
            environ.remove(_AGENT_STORE)
        init(*args, **options)
        dist: Any = sys.modules["torch.distributed"]
        rank, size = dist.get_rank(), dist.get_world_size()
        here = max(1, size // (environ.integer("GROUP_WORLD_SIZE") or 1))
        ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % here, "LOCAL_WORLD_SIZE": here}
        environ.export({name: str(number) for name, number in ranks.items()})
        takeover.read_ranks()


def follow_processes(takeover: Any, take_over: Callable[[], Any]) -> None:
    """Follow the processes that this one starts from now on; for the arguments see `Spawned`."""

    def make(init: Callable[..., None], process: BaseProcess, *args: Any, **options: Any) -> None:
        given = signature(init).bind(process, *args, **options)
        target = given.arguments.get("target")
        if target is not None and not f"{getattr(target, '__module__', None)}.".startswith(_HELPERS):
            launched = [*map(environ.text, (*_MEETING, "LOCAL_WORLD_SIZE"))]
            given.arguments["target"] = Spawned(target, take_over, takeover, launched)
        init(*given.args, **given.kwargs)

    around(BaseProcess, "__init__", make)
