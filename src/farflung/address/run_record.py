# SPDX-License-Identifier: Apache-2.0
"""Finds the run at an address: its record `run` names the part below which all other records of the run lie.

So a run that begins where another one was deleted has keys of its own, and a forgotten machine of the old one writes
none of them. Where a replica has kept the state itself, all records lie next to that record, which holds the settings.
"""

from __future__ import annotations

import json
import re
import secrets
from contextlib import suppress

from farflung.address.board import vanished
from farflung.address.objects import ObjectBoard, quoted
from farflung.address.seal import PART, RECORD_OF_RUN, SealError, is_sealed
from farflung.base.errors import ConfigError, Unreachable

_RUN, _STATES = RECORD_OF_RUN, "loop1/saved/"


class KeyMismatch(ConfigError):
    """The run at an address has another key than this process."""

    def __init__(self, address: str, why: str) -> None:
        self.why = why
        super().__init__(
            f"The record of the run at {address} can't be used: {why}. Give the key that the run has begun with "
            "(--key_file, FARFLUNG_KEY), or another address: a run with another key is another run."
        )


def knock(board: ObjectBoard, who: str) -> None:
    """Leave names that say to the launchers of all runs at an address that one with another key was refused."""
    name, line = f"events/first/refused {who}", f"{who} was refused: it has another key, or only one side has any"
    names: list[str] = []
    with suppress(Unreachable):
        board.ask(lambda: board.find_names("", names), "list")
        for part in {found[0] for known in names if (found := re.match(PART, known))}:
            board.write_name(f"{part}/{quoted(name)}", [line.encode()], is_new=False)


def part_of_run(board: ObjectBoard, address: str) -> str | None:
    """Return the name of the part that holds the run at an address; empty: all of it does. None: no run was begun.

    Raises:
        ConfigError: there are states of runs, and no record says which one is meant.
        KeyMismatch: the run has another key than this process, or only one of them has any.
    """
    try:
        content = board.read(_RUN, lambda file, size: file.read())
    except SealError as error:
        raise KeyMismatch(address, str(error)) from None
    if content is not None:
        if is_sealed(content) and board.seal is None:
            raise KeyMismatch(address, "it has a key, and none was given")
        return _part_in(content)
    parts = {key.partition(_STATES)[0] for key in board.list("") if _STATES in key}
    if parts - {""}:
        ways = " or ".join(f"--meet {address.rstrip('/')}/{part.rstrip('/')}" for part in sorted(parts))
        raise ConfigError(
            f"The record of the run at {address} has vanished, but states of a run lie there. Continue with {ways}, or "
            "delete all of it to begin again."
        )
    return "" if parts else None  # a replica keeps its state so when the address of its run is gone


def begin(board: ObjectBoard, address: str, settings: bytes) -> str:
    """Return the name of the part that holds the run at an address, which begins with `settings` if there is none."""
    name = part_of_run(board, address)
    if name is None:
        name = f"run-{secrets.token_hex(4)}"
        board.part(name).put(_RUN, settings)
        if not board.put_new(_RUN, _pointer(name)):  # another launcher has begun it
            board.part(name).delete(_RUN)
            name = part_of_run(board, address) or ""
    elif not name:
        board.put_new(_RUN, settings)
    if not (board.part(name) if name else board).has([_RUN]):
        raise vanished(f"{name}/{_RUN}")
    return name


def check_pointer(board: ObjectBoard, name: str) -> None:
    """Raise Unreachable once the record of the run names another part than `name`."""
    if (content := board.get(_RUN)) is not None and _part_in(content) != name:
        raise Unreachable(f"Another run has begun in the {board.root}, where this one was.", is_gone=True)


def renew_pointer(board: ObjectBoard, name: str) -> None:
    """Write the record of the run again, or if it has vanished, and the run has not."""
    if board.get(_RUN) == _pointer(name):
        board.put(_RUN, _pointer(name))
    elif board.part(name).has([_RUN]):
        board.put_new(_RUN, _pointer(name))


def _pointer(name: str) -> bytes:
    return json.dumps({"in": name}).encode()


def _part_in(content: bytes) -> str:
    return str(json.loads(content).get("in", ""))
