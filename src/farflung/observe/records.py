# SPDX-License-Identifier: Apache-2.0
"""The one reader of what a run's folder holds: a row that gets past it has the types that it promises.

A folder may be of another release, damaged, or written by another program. What has no known form is counted and left
out, so that nothing behind this file has to check again.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

_MOST_BYTES = 1 << 24  # of one line, or of a file that is one record
_LAST_MOMENT = 253_402_214_400.0  # a day before the year 10000, where calendars end
_LONGEST_S, _MOST, _LAST_PID = 1e12, 1 << 53, (1 << 31) - 1
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]"
)  # terminals obey them, or no file can hold them
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # JSON has no word for them

Row = Mapping[str, Any]
_Read = Callable[[Any], Any]


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(value)
    return value if value.isprintable() else _UNPRINTABLE.sub("\ufffd", value)


def _number(most: float) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        if type(value) not in (int, float):
            raise TypeError(value)
        if not 0 <= value <= most:  # which NaN is not, either
            raise ValueError(value)
        return float(value)

    return read


def _integer(most: int, least: int = 0) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if type(value) is not int:
            raise TypeError(value)
        if not least <= value <= most:
            raise ValueError(value)
        return value

    return read


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(value)
    return value


def _list(read: _Read) -> _Read:
    def several(value: Any) -> list[Any]:
        if type(value) is not list:
            raise TypeError(value)
        return [read(item) for item in value]

    return several


def _object(read: _Read) -> _Read:
    def fields(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise TypeError(value)
        return {_text(name): read(item) for name, item in value.items()}

    return fields


def _any(value: Any) -> Any:
    """Read what is only shown."""
    if isinstance(value, dict):
        return _object(_any)(value)
    if isinstance(value, list):
        return [_any(item) for item in value]
    return _text(value) if isinstance(value, str) else value


def _logged(value: Any) -> Any:
    """Read what a script has logged: NaN and infinities are texts in these files."""
    if isinstance(value, str):
        return NOT_FINITE.get(value, _text(value))
    try:
        return float(value) if isinstance(value, (int, float)) else _any(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf if value > 0 else -math.inf


_moment, _seconds, _count = _number(_LAST_MOMENT), _number(_LONGEST_S), _integer(_MOST)
_READ: Mapping[str, _Read] = {
    **dict.fromkeys(("time", "begun", "since", "started"), _moment),
    **dict.fromkeys(("number", "step", "model", "rank", "bytes_sent", "parameters", "bytes", "island"), _count),
    **dict.fromkeys(("member", "generation", "v"), _count),
    **dict.fromkeys(("host", "call", "at", "why", "script", "name", "message", "strategy", "folder"), _text),
    **dict.fromkeys(("event", "git", "identity", "replica"), _text),
    **dict.fromkeys(("world", "settings", "versions"), _object(_any)),
    **dict.fromkeys(("members", "joined"), _list(_count)),
    **dict.fromkeys(("arguments", "stack"), _list(_text)),
    **dict.fromkeys((f"seconds_{part}" for part in ("exposed", "hidden", "voting", "encoding", "landing")), _seconds),
    **dict.fromkeys(("seconds", "seconds_recovering"), _seconds),
    **dict.fromkeys(("ended", "code"), _integer(255, -255)),
    "pid": _integer(_LAST_PID),
    "dropped": _flag,
    "lost": _object(_text),
    "values": _object(_logged),
}
_NEEDED = {  # of events; the others are shown by their message, or by their name and facts
    "process": ("member", "name"),
    "model": ("parameters", "bytes", "island"),
    "saving": ("seconds",),
    "ended": ("code",),
}
_WRONG = (TypeError, ValueError, KeyError, RecursionError)  # what readers raise


def _known(row: Any, needed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row that are known, without those that are null, and what it lacks and has a default."""
    row = {"rank": 0, **needed, **{name: value for name, value in row.items() if value is not None}}
    return {name: read(row[name]) for name, read in _READ.items() if name in row}


def event(row: Any) -> Row:
    """Read a line of `events.jsonl`: facts that are not known are only shown."""
    needed = _NEEDED.get(row["event"], ())
    facts = {name: _READ.get(name, _any)(value) for name, value in row.items() if value is not None}
    return {name: facts[name] for name in ("event", "time", *needed)} | facts


def logged_round(row: Any) -> Row:
    """Read a line of `rounds.jsonl`; what former releases did not write has a default."""
    optional = dict.fromkeys(("seconds_voting", "seconds_encoding", "seconds_landing", "seconds_recovering"), 0)
    found = _known(row, {"model": 0, "step": 0, "lost": {}, "joined": [], "seconds_hidden": 0, **optional})
    for name in ("time", "number", "members", "dropped", "bytes_sent", "seconds_exposed"):
        found[name]  # KeyError: it is no round
    return found


def steps(row: Any) -> Row:
    """Read a line of `steps.jsonl`."""
    found = _known(row, {})
    return {"time": found["time"], "step": found["step"]} | found


def metrics(row: Any) -> Row:
    """Read a line of `metrics.jsonl`."""
    found = _known(row, {})
    return {"time": found["time"], "values": found["values"], "step": None} | found


def sign(row: Any) -> Row:
    """Read the record that a rank replaces each second."""
    found = _known(row, {"step": 0})
    for name in ("time", "begun", "since", "host", "pid"):
        found[name]  # KeyError: it is no sign of a rank
    return found


def facts_of(row: Any) -> tuple[dict[str, Any], list[str]]:
    """Return how a run was started, and the names of what can't be read of it. That and what is absent has a default.

    Raises:
        ValueError: it is no JSON object.
    """
    if type(row) is not dict:
        raise ValueError("it is no JSON object")
    facts: dict[str, Any] = {"script": "(unknown script)", "arguments": [], "started": 0.0, "host": "(unknown host)"}
    facts |= {"pid": 0, "world": {}, "settings": {}, "versions": {}, "git": None, "identity": None}
    odd = []
    for name in facts.keys() & {name for name, value in row.items() if value is not None}:
        try:
            facts[name] = _READ[name](row[name])
        except _WRONG:
            odd.append(name)
    return facts, odd


# ---- files


def _opened(path: Path) -> BinaryIO:
    """Open a regular file; OSError for any other, such as a pipe, which would wait for a writer."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(0, "it is no regular file")
    return file


def json_of(path: Path) -> Any:
    """Return what a file of one record holds.

    Raises:
        OSError: it can't be read.
        ValueError: it is too large for a record, or no JSON.
    """
    with _opened(path) as file:
        held = file.read(_MOST_BYTES + 1)
    if len(held) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
    return _value(held)


def read_sign(path: Path) -> tuple[Row, float] | None:
    """Return the latest sign of a rank and when it was written; None while it is being written.

    Raises:
        ValueError: it is no sign that this release knows.
    """
    try:
        held = json_of(path)
        written = path.stat().st_mtime
    except (OSError, ValueError):
        return None
    try:
        return sign(held), written
    except (*_WRONG, AttributeError):
        raise ValueError(path.name) from None


def _value(text: bytes) -> Any:
    try:
        return json.loads(text, parse_constant=str)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class Lines:
    """A file of JSON lines, each read once: a look begins where the last one ended.

    Args:
        read: returns a row with the types that its callers rely on, or raises.
    """

    def __init__(self, path: Path, read: Callable[[Any], Row]) -> None:
        self._path, self._read, self._at = path, read, 0
        self.rows: list[Row] = []
        self.num_unread = 0  # lines that were left out

    def look(self) -> None:
        with suppress(OSError), _opened(self._path) as file:
            file.seek(self._at)
            while line := file.readline(_MOST_BYTES):
                if not line.endswith(b"\n") and len(line) < _MOST_BYTES:
                    break  # it is being written
                self._at += len(line)
                try:
                    self.rows.append(self._read(_value(line)))
                except (*_WRONG, AttributeError):  # torn by a full disk, or of another release
                    self.num_unread += not line.isspace()
