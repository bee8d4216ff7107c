# SPDX-License-Identifier: Apache-2.0
"""Where a thread is, as its script sees it: in which function of ours or of torch's, and by which lines."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_OURS, _STDLIB = f"{Path(__file__).parents[1]}{os.sep}", f"{Path(threading.__file__).parent}{os.sep}"
_MAX_FRAMES = 12  # of a stack, the innermost ones


@dataclass(frozen=True)
class UserCall:
    """A call that a script has made.

    Args:
        name: the outermost function of ours or of torch's that the script is in; empty: it is in code of its own.
        path: the file of the script that has made the call; empty: no script has.
        lines: the functions of the script and their lines, the innermost first.
        place: differs as soon as the script moves on.
    """

    name: str
    path: str
    lines: list[list[str | int]]
    place: tuple[int, int]

    def __str__(self) -> str:
        what = f"`{self.name}`" if self.name else "a collective"
        if not self.path:
            return what
        line = self.lines[0][1]
        return f"{what} ({self.path}:{line}: `{linecache.getline(self.path, int(line)).strip()}`)"

    @property
    def at(self) -> str:
        """`train.py:44`, for example."""
        return f"{Path(self.path).name}:{self.lines[0][1]}" if self.path else ""


def user_call(frame: FrameType | None) -> UserCall:
    """Return the call of the script that has led to `frame`, the innermost one of a thread."""
    name, path, place, torch = "", "", (0, 0), _torch()
    lines: list[list[str | int]] = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith((_OURS, torch)):
            # Python 3.10 has the bare name only.
            called = getattr(code, "co_qualname", code.co_name)
            if code.co_filename.startswith(_OURS) and not code.co_name.startswith("__"):
                called = called if "<locals>" in called else code.co_name  # not the class that has the method
            name = name if lines or "<locals>" in called else called
        elif not code.co_filename.startswith((_STDLIB, "<frozen")) or "-packages" in code.co_filename:
            if not lines:
                path, place = code.co_filename, (id(frame), frame.f_lasti)
            lines.append([code.co_name, frame.f_lineno])
        frame = frame.f_back
    return UserCall(name, path, lines, place)


def innermost_calls(frame: FrameType | None) -> traceback.StackSummary:
    """Return the innermost calls that led to a frame, without the calls that started the script."""
    calls = traceback.extract_stack(frame) if frame is not None else []
    starters = (f"{_OURS}launch{os.sep}", f"{_torch()}distributed{os.sep}elastic{os.sep}")
    begun = max((k + 1 for k, call in enumerate(calls) if call.filename.startswith(starters)), default=0)
    return traceback.StackSummary.from_list(calls[begun:][-_MAX_FRAMES:])


def _torch() -> str:
    """Return torch's folder, once it is loaded; until then a path that no file has."""
    return f"{Path(file).parent}{os.sep}" if (file := getattr(sys.modules.get("torch"), "__file__", None)) else "\0"
