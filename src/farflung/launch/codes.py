# SPDX-License-Identifier: Apache-2.0
"""The exit codes of `farflung`; `docs/commands.md` has the table."""

from __future__ import annotations

import errno

from farflung.base.causes import Cause
from farflung.base.errors import RankFailure, Unreachable
from farflung.base.signals import REQUEUE as REQUEUE  # a scheduler ended the run: start it again

DONE, USAGE, FAILED, HUNG, ENGINE, INTERRUPTED = 0, 2, 3, 4, 5, 130
BY_SIGNAL = 128  # and the number of the signal that the launcher got
CODES = {  # of a run that failed because of this
    Cause.OWN: FAILED,
    Cause.WRONG_USE: FAILED,
    Cause.MISSING: FAILED,
    Cause.FAULT: FAILED,
    Cause.PEER: FAILED,
    Cause.LATE: HUNG,
    Cause.NOT_MET: HUNG,
    Cause.RUN_ENDED: DONE,
    Cause.PREEMPTED: REQUEUE,
    Cause.ENGINE: ENGINE,
}
OF_REPLICAS = {**CODES, Cause.WRONG_USE: USAGE}  # by which the launcher of a replica tells the one above it


class EngineFailure(RankFailure):
    """Processes could not be started, or machines not be connected."""

    def __init__(self, message: str, cause: Cause = Cause.ENGINE) -> None:
        super().__init__(message, cause)


def refused(error: OSError) -> EngineFailure:
    """Return what to raise if the system refuses what a run needs."""
    advice = " A script must begin with a line such as #!/bin/sh." if error.errno == errno.ENOEXEC else ""
    return EngineFailure(f"The system refused what the run needs: {error}.{advice}")


def of_error(error: Exception) -> int:
    """Return the exit code of a command that ends with one of our errors."""
    return CODES[error.cause] if isinstance(error, (RankFailure, Unreachable)) else USAGE
