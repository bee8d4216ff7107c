# SPDX-License-Identifier: Apache-2.0
"""The exit codes of `farflung`; `docs/commands.md` has the table."""

from __future__ import annotations

import re

from farflung.base.errors import GLOO_TIMED_OUT, RankFailure, Unreachable
from farflung.process.preemption import REQUEUE as REQUEUE  # a scheduler ended the run: start it again

DONE, USAGE, FAILED, HUNG, ENGINE, INTERRUPTED = 0, 2, 3, 4, 5, 130
BY_SIGNAL = 128  # and the number of the signal that the launcher got
# How ranks say that somebody did not come in time, and how torch's rendezvous does.
_RANKS = re.compile(rf"RankFailure: .*(stopped waiting|did not reach|has not ended for)|{GLOO_TIMED_OUT}", re.DOTALL)
COULD_NOT_MEET = "could not meet at"
_MACHINES = re.compile(r"timed out|timeout|another attempt within")


class EngineFailure(RankFailure):
    """What starts the processes and connects the machines did not manage to."""


def of_message(message: str | None) -> int:
    """Return the exit code of a run that failed with `message`, None where a rank left none: HUNG or FAILED."""
    return HUNG if _RANKS.search(message or "") else FAILED


def of_error(error: Exception) -> int:
    """Return the exit code of a command that ends with one of our errors."""
    if isinstance(error, (EngineFailure, Unreachable)):
        has_begun = isinstance(error, Unreachable) or COULD_NOT_MEET in str(error)  # not: sbatch's or ssh's time-out
        return HUNG if has_begun and _MACHINES.search(str(error)) else ENGINE
    return FAILED if isinstance(error, RankFailure) else USAGE
