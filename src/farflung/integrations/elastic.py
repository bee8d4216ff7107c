# SPDX-License-Identifier: Apache-2.0
"""The membership that `farflung launch --elastic` gives its replicas, and their places."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

from farflung.base.errors import ConfigError
from farflung.comm.board import Board
from farflung.comm.group import Group
from farflung.comm.member_store import LauncherNotes
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


def place() -> tuple[int, int]:
    """Return which part of the data this process should read, and of how many, for scripts that share it out alone.

        part, parts = place()
        dataset = dataset[part::parts]

    Under `farflung launch --elastic` each replica is a world of its own, whose `RANK` says nothing of the others. It
    gets the first place that no living replica has, so one that is started again takes up what was left; there are as
    many as the run began with, and replicas beyond these share places. Elsewhere it is `RANK` and `WORLD_SIZE`.

    Raises:
        ConfigError, Unreachable: see `launched_membership`.
    """
    rank, size = environ.integer("RANK") or 0, environ.integer("WORLD_SIZE") or 1
    if not environ.is_elastic():
        return rank, size
    board, member, run = launched_run()
    notes = LauncherNotes(board)
    for number in count():
        key, mine = f"place/{number}", str(member)
        holder = board.swap(key, "", mine)
        if holder != mine and (notes.noted("gone", int(holder)) or notes.noted("left", int(holder))):
            holder = board.swap(key, holder, mine)
        if holder == mine:
            break
    parts = run["expected"]
    return number % parts * size + rank, parts * size


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
