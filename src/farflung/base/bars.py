# SPDX-License-Identifier: Apache-2.0
"""Bars for long work: on a terminal alone, and only while the work takes longer than a moment."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any

_PATIENCE_S = 1.0  # work that is over sooner shows no bar
_REDRAW_S = 0.1


class Bar:
    """Counts bytes, or steps, that are done, and draws how many of `total` they are; only threads that count draw.

    Attributes:
        num_done: so far.
        total: to be done in all; it may change.
    """

    def __init__(self, what: str, total: int, is_shown: bool, of_bytes: bool = True) -> None:
        self.num_done, self.total = 0, total
        self._what, self._of_bytes = what, of_bytes
        self._due_at = time.monotonic() + _PATIENCE_S if is_shown else math.inf  # when it is drawn next
        self._drawn: Any = None
        self._lock = Lock()

    def advance(self, number: int) -> None:
        """Count what is done now; any thread may call it."""
        with self._lock:
            self.num_done += number
            if (now := time.monotonic()) < self._due_at:
                return
            self._due_at = now + _REDRAW_S
            try:
                self._drawn = self._drawn or _drawn(self._what, self._of_bytes)
                done = {"completed": self.num_done, "total": self.total}
                self._drawn.update(self._drawn.task_ids[0], **done, refresh=True)
            except (OSError, ValueError):  # the terminal is gone, or closed; the work is not
                self._due_at = math.inf

    def close(self) -> None:
        """Remove what was drawn."""
        with self._lock, suppress(OSError, ValueError):
            self._due_at = math.inf
            if self._drawn is not None:
                self._drawn.stop()


@contextmanager
def bar(what: str, total: int, is_shown: bool = True, of_bytes: bool = True) -> Iterator[Bar]:
    """Yield a bar on stderr, which is gone when the block is left; nothing is drawn if stderr is no terminal.

    Args:
        what: is done, such as `Reading checkpoint_3`.
        is_shown: False on all processes but the main one.
    """
    made = Bar(what, total, is_shown and sys.stderr is not None and sys.stderr.isatty(), of_bytes)
    try:
        yield made
    finally:
        made.close()


def _drawn(what: str, of_bytes: bool) -> Any:
    from rich import progress  # late: most work is over before a bar is due
    from rich.console import Console
    from rich.control import Control
    from rich.segment import ControlType
    from rich.table import Column

    console = Console(stderr=True)
    console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))  # over a bar of the script's
    one_line = Column(no_wrap=True)
    columns = (
        progress.TextColumn("{task.description}", markup=False, table_column=one_line),
        progress.BarColumn(),
        (progress.DownloadColumn if of_bytes else progress.MofNCompleteColumn)(table_column=one_line),
        progress.TimeRemainingColumn(table_column=one_line),
    )
    # What the script prints meanwhile goes where it always goes: rich would send stdout to this console too.
    shown = progress.Progress(
        *columns, console=console, transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    )
    shown.add_task(what)
    shown.start()
    return shown
