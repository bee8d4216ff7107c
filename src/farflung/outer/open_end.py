# SPDX-License-Identifier: Apache-2.0
"""Warns of a loop that the script has not ended, if its replicas have different weights, and else notes these."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from farflung.base.events import Kind, record


@dataclass
class OpenEnd:
    """The state in which a loop would end now.

    Attributes:
        note: returns what leaves a digest of the weights; None if that is not to be done, or the loop is gone.
        steps: since the replicas were last alike.
        is_silent: another object reports them.
    """

    note: Callable[[], Callable[[], None] | None]
    steps: int = 0
    is_silent: bool = False

    def report(self) -> None:
        """Print a line, or note equal weights, unless an error ends the process: then no one expects these."""
        if sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None:
            return
        if not self.steps and (note := self.note()) is not None:
            with suppress(RuntimeError):  # a request may need a thread, and none begins as late as this
                note()
        if self.steps and not self.is_silent:
            which = "step was" if self.steps == 1 else f"{self.steps} steps were"
            message = (
                f"an OuterLoop was not closed. Its last {which} not averaged with any other rank, so ranks "
                "have different weights. Use `with OuterLoop(...):`, or call close() at the end."
            )
            record(Kind.WARNING, message=message)
