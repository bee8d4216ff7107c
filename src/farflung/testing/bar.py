# SPDX-License-Identifier: Apache-2.0
"""A progress bar for what may take long: it shows up after two seconds, on a terminal."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import Progress

_PATIENCE_S = 2.0


class Bar:
    """Shows how many of `total` steps are done: at once if `wanted`, on a terminal after two seconds if it is None."""

    def __init__(self, total: int, wanted: bool | None = None) -> None:
        console = Console(stderr=True)
        self._total = total
        self._is_on = console.is_terminal if wanted is None else wanted
        self._due_at = time.perf_counter() + (_PATIENCE_S if wanted is None else 0)
        self._progress = Progress(console=console, transient=True)
        self._started = False
        self._furthest = 0

    def show(self, done: int) -> None:
        """Draw the bar at `done`, or leave it where it is if it has been further."""
        self._furthest = max(self._furthest, done)
        if not self._is_on or time.perf_counter() < self._due_at:
            return
        if not self._started:
            self._started = True
            self._progress.add_task("simulating", total=self._total)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=self._furthest)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._started:
            self._progress.stop()
