# SPDX-License-Identifier: Apache-2.0
"""The trackers of one Accelerator: they are called on the main process, and never so that training ends."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

from farflung.base.checks import check_word
from farflung.base.words import counted
from farflung.tracking.choose import LOGGER_TYPE_TO_CLASS, filter_trackers

Arguments = Mapping[str, Mapping[str, Any]]


class Tracking:
    """The trackers that `log_with` asks for (`asked`), those of the latest run (`started`), and what they lost."""

    def __init__(self, log_with: Any, logging_dir: str | os.PathLike[str] | None) -> None:
        self.asked = filter_trackers(log_with, logging_dir)
        self.started: list[Any] = []
        self.lost: Counter[str] = Counter()
        self.step: int | None = None
        self.is_running = False
        self._has_warned = False
        self._logging_dir = logging_dir

    def check_names(self, called: str, arguments: Arguments) -> None:
        """Refuse arguments for a tracker that does not exist. Those for one that is not asked for are left unread."""
        own = [asked.name for asked in self.asked if not isinstance(asked, str)]
        for name in arguments:
            check_word(called, name, [*LOGGER_TYPE_TO_CLASS, *own])

    def start(self, project: str | None, config: Any, arguments: Arguments) -> None:
        """Make the trackers that are named, start all, and have them store `config` where there is one."""
        self.started.clear()
        self.is_running = True
        for asked in self.asked:
            if isinstance(asked, str):
                kind: Any = LOGGER_TYPE_TO_CLASS[str(asked)]
                place = (self._logging_dir,) if kind.requires_logging_directory else ()
                asked = kind(project, *place, **arguments.get(str(asked), {}))
            self.started.append(asked)
        for tracker in self.started:
            self._attempt(tracker, "start")
            if config is not None:
                self._attempt(tracker, "store_init_configuration", config)

    def log(self, values: Mapping[str, Any], step: int | None, arguments: Arguments) -> None:
        """Have each tracker record `values`."""
        if not self.is_running:
            if self.asked and not self._has_warned:
                self._has_warned = True
                warnings.warn("log() records nothing before init_trackers() and after end_training().", stacklevel=3)
            return
        self.step = step
        for tracker in self.started:
            self._attempt(tracker, "log", values, step=step, **arguments.get(tracker.name, {}))

    def finish(self) -> None:
        """Finish the trackers, and say what they lost."""
        for tracker in self.started if self.is_running else ():
            self._attempt(tracker, "finish")
        self.is_running = False
        for name, number in self.lost.items():
            warnings.warn(f"The tracker {name} lost {counted(number, 'event')} of this run.", stacklevel=3)
        self.lost.clear()

    def _attempt(self, tracker: Any, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a tracker's method. What it raises is an event lost; a warning tells of the first."""
        try:
            getattr(tracker, method)(*args, **kwargs)
        except Exception as error:
            if method == "start" and isinstance(error, TypeError):
                raise  # an argument that the client does not have: nothing has been trained yet
            self.lost[tracker.name] += 1
            if self.lost[tracker.name] == 1:
                warnings.warn(
                    f"The tracker {tracker.name} failed in {method}: {type(error).__name__}: {error}. Training goes on "
                    "without what it can't record; end_training says how much that was.",
                    stacklevel=4,
                )
