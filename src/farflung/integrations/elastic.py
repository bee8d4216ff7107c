# SPDX-License-Identifier: Apache-2.0
"""The membership that `farflung launch --elastic` gives its replicas."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from farflung.base.errors import ConfigError, RankFailure
from farflung.comm.group import Group
from farflung.config import environ
from farflung.outer.elastic import Elastic

_ANSWER_WITHIN = timedelta(seconds=120)  # the store, of which a machine may be cut off for a while


def launched_membership(island: Group | None = None) -> Elastic | None:
    """Return this replica's membership in the run of `farflung launch --elastic`, for one outer loop.

        OuterLoop(model, recipe, membership=launched_membership())

    Args:
        island: the ranks that train this replica; None: this process alone.

    Returns:
        None if the replicas of this run don't come and go.

    Raises:
        ConfigError: the variables of the launcher can't be understood.
        RankFailure: the launcher's store can't be reached.
    """
    if not environ.is_elastic():
        return None
    store, member, run = launched_run()
    return Elastic(store, member, island=island, **run)


def launched_run() -> tuple[Any, int, dict[str, Any]]:
    """Return the store of the run that `farflung launch --elastic` has started, this replica's id, and the settings."""
    where, member = (environ.text(name) or "" for name in environ.MEMBER_VARIABLES)
    host, _, port = where.rpartition(":")
    if not port.isdecimal() or not member.isdecimal():
        raise ConfigError(
            f"{' and '.join(environ.MEMBER_VARIABLES)} are {where!r} and {member!r}; the launcher sets them."
        )
    try:
        store = TCPStore(host, int(port), is_master=False, timeout=_ANSWER_WITHIN)
        return store, int(member), json.loads(store.get("run"))
    except DistError as error:
        raise RankFailure(f"The store of the run at {where} can't be reached: {error}") from None
