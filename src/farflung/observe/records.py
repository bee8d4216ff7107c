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
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, TypeVar

from farflung.base.events import Event

_CHUNK_BYTES = 1 << 13  # fewer rows than make the collector of garbage look at them again and again
_MOST_BYTES = 1 << 24  # of one line, or of a file that is one record
_LAST_MOMENT = 253_402_214_400.0  # a day before the year 10000, where calendars end
_LONGEST_S, _MOST, _LAST_PID = 1e12, 1 << 53, (1 << 31) - 1
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]"
)  # terminals obey them, or no file can hold them
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # JSON has no word for them

Row = Mapping[str, Any]
_Read = Callable[[Any], Any]
_T = TypeVar("_T")


def _typed(kind: type[_T], value: Any) -> _T:
    if type(value) is not kind:
        raise TypeError(value)
    return value


def text(value: Any) -> str:
    """Read a text, without what a terminal would obey."""
    value = _typed(str, value)
    return value if value.isprintable() else _UNPRINTABLE.sub("\ufffd", value)


def _number(most: float, value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(value)
    if not 0 <= value <= most:  # which NaN is not, either
        raise ValueError(value)
    return float(value)


def _integer(least: int, most: int, value: Any) -> int:
    if not least <= _typed(int, value) <= most:
        raise ValueError(value)
    return int(value)


def _list(read: _Read, value: Any) -> list[Any]:
    return [read(item) for item in _typed(list, value)]


def _object(read: _Read, value: Any) -> dict[str, Any]:
    return {text(name): read(item) for name, item in _typed(dict, value).items()}


def _any(value: Any) -> Any:
    """Read what is only shown."""
    if isinstance(value, dict):
        return _object(_any, value)
    if isinstance(value, list):
        return _list(_any, value)
    return text(value) if isinstance(value, str) else value


def logged(value: Any) -> Any:
    """Read what a script has logged: NaN and infinities are texts in these files."""
    if isinstance(value, str):
        return NOT_FINITE.get(value, text(value))
    try:
        return float(value) if isinstance(value, (int, float)) else _any(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf if value > 0 else -math.inf


moment, _seconds, _count = partial(_number, _LAST_MOMENT), partial(_number, _LONGEST_S), partial(_integer, 0, _MOST)


def optional_count(value: Any) -> int | None:
    """Read a whole number from 0 on, or none."""
    return None if value is None else _count(value)


@lru_cache(1024)
def _same(value: tuple[int, ...]) -> tuple[int, ...]:
    """Return one tuple for all that are equal: rounds have the same few members."""
    return value


def _counts(value: Any) -> tuple[int, ...]:
    return _same(tuple(_list(_count, value)))


_READ: Mapping[str, _Read] = {
    **dict.fromkeys(("time", "begun", "since", "started"), moment),
    **dict.fromkeys(("number", "step", "model", "rank", "bytes_sent", "parameters", "bytes", "island"), _count),
    **dict.fromkeys(("member", "generation", "v", "attempt", "restart"), _count),
    **dict.fromkeys(("host", "call", "at", "why", "script", "name", "message", "strategy", "folder"), text),
    **dict.fromkeys(("event", "git", "identity", "container", "replica", "launcher"), text),
    **dict.fromkeys(("world", "settings", "versions"), partial(_object, _any)),
    **dict.fromkeys(("members", "joined"), _counts),
    **dict.fromkeys(("arguments", "stack"), partial(_list, text)),
    **dict.fromkeys((f"seconds_{part}" for part in ("exposed", "hidden", "voting", "encoding", "landing")), _seconds),
    **dict.fromkeys(("seconds", "seconds_recovering"), _seconds),
    **dict.fromkeys(("ended", "code"), partial(_integer, -255, 255)),
    "pid": partial(_integer, 0, _LAST_PID),
    **dict.fromkeys(("dropped", "program"), partial(_typed, bool)),
    "lost": partial(_object, text),
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


def event(row: Any) -> Event:
    """Read a line of `events.jsonl`: facts that are not known are only shown."""
    needed = _NEEDED.get(row["event"], ())
    facts = {name: _READ.get(name, _any)(value) for name, value in row.items() if value is not None}
    found = Event.of_row({name: facts[name] for name in ("event", "time", *needed)} | facts)
    if found is None:
        raise ValueError("it is no event")
    return found


class RoundLine(NamedTuple):
    """A round of the outer loop, as one replica saw it; what former releases did not write has a default."""

    time: float
    number: int
    members: tuple[int, ...]
    dropped: bool
    bytes_sent: int
    seconds_exposed: float
    seconds_hidden: float = 0.0
    step: int = 0
    lost: Mapping[str, str] = MappingProxyType({})  # why, by id
    joined: tuple[int, ...] = ()
    seconds_voting: float = 0.0
    seconds_encoding: float = 0.0
    seconds_landing: float = 0.0
    seconds_recovering: float = 0.0
    model: int = 0
    member: int | None = None  # that wrote it
    attempt: int | None = None
    restart: int | None = None


def logged_round(row: Any) -> RoundLine:
    """Read a line of `rounds.jsonl`; TypeError or ValueError for one that lacks something."""
    line = RoundLine(**{name: read(row[name]) for name, read in _OF_ROUNDS if row.get(name) is not None})
    if not line.members:
        raise ValueError("it is a round of no members")
    return line


_OF_ROUNDS = [(name, _READ[name]) for name in RoundLine._fields]


def steps(row: Any) -> Row:
    """Read a line of `steps.jsonl`."""
    found = _known(row, {})
    return {"time": found["time"], "step": found["step"]} | found


def sign(row: Any) -> Row:
    """Read the record that a rank replaces each second."""
    found = _known(row, {"step": 0})
    for name in ("time", "begun", "since", "host", "pid"):
        found[name]  # KeyError: it is no sign of a rank
    return found


def is_setting(value: Any) -> bool:
    """Return whether something is a setting as a launcher writes it, with its value."""
    return isinstance(value, dict) and isinstance(value.get("value"), str)


def facts_of(row: Any) -> tuple[dict[str, Any], list[str]]:
    """Return how a run was started, and the names of what can't be read of it. That and what is absent has a default.

    Raises:
        ValueError: it is no JSON object.
    """
    if type(row) is not dict:
        raise ValueError("it is no JSON object")
    facts: dict[str, Any] = {"script": "(unknown script)", "arguments": [], "started": 0.0, "host": "(unknown host)"}
    facts |= {"pid": 0, "world": {}, "settings": {}, "versions": {}}
    facts |= dict.fromkeys(("git", "identity", "container"))
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


def read_sign(path: Path, known_ns: int | None) -> tuple[Row, int] | None:
    """Return the latest sign of a rank and when it was written; None for the known one, and while it is being written.

    Raises:
        ValueError: it is no sign that this release knows.
    """
    try:
        written_ns = path.stat().st_mtime_ns
        if written_ns == known_ns:
            return None
        held = json_of(path)
    except (OSError, ValueError):
        return None
    try:
        return sign(held), written_ns
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
        take: is called with each row and returns its time; it raises for what this release can't read.
    """

    def __init__(self, path: Path, take: Callable[[Any], float]) -> None:
        self._path, self._take, self._at = path, take, 0
        self.last = 0.0  # the time of the last row
        self.num_unread = 0  # lines that were left out
        self.share_read: float | None = None  # of a file that is not read to its end

    def look(self, until: float = math.inf) -> None:
        """Read to the end, or until this time of the monotonic clock: the next look reads the rest."""
        with suppress(OSError), _opened(self._path) as file:
            file.seek(self._at)
            self.share_read = None
            while held := file.read(_CHUNK_BYTES):
                if time.monotonic() >= until:
                    self.share_read = self._at / os.fstat(file.fileno()).st_size
                    break
                if not (size := held.rfind(b"\n") + 1):
                    held += file.readline(_MOST_BYTES)
                    size = len(held)
                    if not held.endswith(b"\n") and size < _MOST_BYTES:
                        break  # it is being written
                self._at += size
                file.seek(self._at)
                for row in _rows(held[:size]):
                    try:
                        self.last = self._take(row)
                    except (*_WRONG, AttributeError):  # torn by a full disk, or of another release
                        self.num_unread += 1


def _rows(lines: bytes) -> list[Any]:
    """Return the rows of whole lines: all at once, which is quicker, or one by one where some are no JSON."""
    with suppress(ValueError):
        rows: list[Any] = _value(b"[%s]" % lines.rstrip(b"\n").replace(b"\n", b",\n"))
        if len(rows) == lines.count(b"\n"):  # or else two half ones may look like one
            return rows
    rows = []
    for line in filter(bytes.strip, lines.split(b"\n")):
        try:
            rows.append(_value(line))
        except ValueError:
            rows.append(None)  # which is no row
    return rows
