# SPDX-License-Identifier: Apache-2.0
"""A warning about a loop that the script has not ended: its replicas have different weights."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from farflung.base.events import Kind, record


@dataclass
class OpenEnd:
    """The state in which a loop would end now.

    Attributes:
        steps: since the replicas were last alike.
        is_silent: another object reports them.
    """

    steps: int = 0
    is_silent: bool = False

    def report(self) -> None:
        """Print a line, unless an error ends the process: then no one expects equal weights."""
        is_by_error = sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None
        if self.steps and not self.is_silent and not is_by_error:
            which = "step was" if self.steps == 1 else f"{self.steps} steps were"
            message = (
                f"an OuterLoop was not closed. Its last {which} not averaged with any other rank, so ranks "
                "have different weights. Use `with OuterLoop(...):`, or call close() at the end."
            )
            record(Kind.WARNING, message=message)
