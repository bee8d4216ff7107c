# SPDX-License-Identifier: Apache-2.0
"""The membership that `farflung launch --elastic` gives its replicas."""

from __future__ import annotations

import json
from typing import Any

from farflung.base.errors import ConfigError
from farflung.comm.board import Board
from farflung.comm.group import Group
from farflung.config import environ
from farflung.outer.elastic import Elastic


def launched_membership(island: Group | None = None) -> Elastic | None:
    """Return this replica's membership in the run of `farflung launch --elastic`, for one outer loop.

        OuterLoop(model, recipe, membership=launched_membership())

    Args:
        island: the ranks that train this replica; None: this process alone.

    Returns:
        None if the replicas of this run don't come and go.

    Raises:
        ConfigError: the variables of the launcher can't be understood.
        Unreachable: the launcher's store can't be reached.
    """
    if not environ.is_elastic():
        return None
    board, member, run = launched_run()
    return Elastic(board, member, island=island, **run)


def launched_run() -> tuple[Board, int, dict[str, Any]]:
    """Return the board of the run that `farflung launch --elastic` has started, this replica's id, and the settings."""
    where, member = (environ.text(name) or "" for name in environ.MEMBER_VARIABLES)
    host, _, port = where.rpartition(":")
    if not port.isdecimal() or not member.isdecimal():
        raise ConfigError(
            f"{' and '.join(environ.MEMBER_VARIABLES)} are {where!r} and {member!r}; the launcher sets them."
        )
    board = Board.at(host.strip("[]"), int(port))
    return board, int(member), json.loads(board.get("run"))
