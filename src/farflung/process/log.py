# SPDX-License-Identifier: Apache-2.0
"""Logging that knows its rank: once, on every process, or one process after the other."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

from farflung.base.checks import check_word
from farflung.comm.collectives import wait_for_everyone
from farflung.config import environ
from farflung.process.world import current_world, known_rank


class MultiProcessAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]  # Python 3.10 knows no such arguments
    """A logger whose lines name their rank. Each call takes two more arguments.

    `main_process_only` (default True) logs on the first process alone; `in_order` logs on every process, one after the
    other, and is a barrier: every process must make the call.
    """

    def __init__(self, logger: logging.Logger, extra: Mapping[str, object] | None = None) -> None:
        super().__init__(logger, extra or {})
        self._said: set[str] = set()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank in front of the message."""
        kwargs.setdefault("stacklevel", 2)
        return f"[RANK {known_rank().rank}] {msg}", kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log `msg % args` on the processes that the arguments choose; StateError before an `Accelerator` is made."""
        known, world = known_rank(), current_world()
        main_process_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        enabled = self.isEnabledFor(level)
        message, kwargs = self.process(msg, kwargs)  # type: ignore[assignment]
        if not in_order:
            if enabled and (known.rank == 0 or not main_process_only):
                self.logger.log(level, message, *args, **kwargs)
            return
        for turn in range(known.size):
            if turn == known.rank and enabled:
                self.logger.log(level, message, *args, **kwargs)
            if world is not None:  # after `end_training` nobody waits
                wait_for_everyone(world.exchange, "a logger, in_order=True")

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a warning the first time that this logger is given this message."""
        key = repr((msg, args))
        if key not in self._said:
            self._said.add(key)
            self.warning(msg, *args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger for `name` that knows about processes.

    Args:
        log_level: sets the level of this logger and of the root one; None takes `ACCELERATE_LOG_LEVEL`, and leaves the
            levels alone when that is not set.
    """
    level = log_level or environ.text("ACCELERATE_LOG_LEVEL")
    logger = logging.getLogger(name)
    if level is not None and not (isinstance(level, str) and isinstance(logging.getLevelName(level.upper()), int)):
        source = "log_level" if log_level is not None else "ACCELERATE_LOG_LEVEL"
        check_word(source, level, ("debug", "info", "warning", "error", "critical"))
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger)
