# SPDX-License-Identifier: Apache-2.0
"""How a script asks for the next batch: by a loop that may find nothing, or by a `next()` that would fail."""

from __future__ import annotations

import ast
import linecache
import threading
from functools import partial
from types import FrameType

from farflung.comm.frames import user_call

_PARSING = threading.Lock()  # Python 3.11 counts the depth of a syntax tree for all threads together


def asks_by_next(frame: FrameType | None) -> bool:
    """Return whether a script asks an iterator, which is read in `frame`, by a `next()` that fails where it ends.

    A `for` loop doesn't, nor does a `next()` with a default, or in a `try` of the same function for StopIteration.
    """
    asking = user_call(frame)
    if not asking.path or asking.lines[0][0] == "__next__":  # whose end is that of a loop
        return False
    try:
        with _PARSING:
            tree = ast.parse("".join(linecache.getlines(asking.path)))
    except SyntaxError:
        return False
    line = int(asking.lines[0][1])
    around = [one for one in ast.walk(tree) if isinstance(one, ast.stmt) and _has(one, one, line)]
    innermost = max(around, key=lambda one: (one.lineno, -(one.end_lineno or 0)), default=None)
    if innermost is None or hasattr(innermost, "body") or any(map(partial(_catches_ends, line), around)):
        return False
    calls = [one for one in ast.walk(innermost) if isinstance(one, ast.Call) and len(one.args) < 2]
    return any(getattr(one.func, "id", getattr(one.func, "attr", "")) in ("next", "__next__") for one in calls)


def _has(first: ast.stmt, last: ast.stmt, line: int) -> bool:
    return first.lineno <= line <= (last.end_lineno or 0)


def _catches_ends(line: int, one: ast.stmt) -> bool:
    """Return whether a statement is a `try` that catches StopIteration on one of its lines."""
    if not isinstance(one, ast.Try) or not _has(one.body[0], one.body[-1], line):
        return False
    caught = [name for handler in one.handlers if handler.type is not None for name in ast.walk(handler.type)]
    return any(getattr(name, "id", "") == "StopIteration" for name in caught)
