# SPDX-License-Identifier: Apache-2.0
"""Why a process or a run failed. The words of gloo, NCCL and torch's rendezvous are looked at here alone."""

from __future__ import annotations

import re
from enum import Enum

_PEER_LOST = re.compile(
    "Connection closed by peer|Connection reset by peer|Connection timed out|Broken pipe|remote process exited"
)
_GLOO_TIMED_OUT = re.compile(r"Timed out waiting (\d+)ms")
_MEETING_TIMED_OUT = re.compile("timed out|timeout|another attempt within")


class Cause(str, Enum):
    """Why a process or a run failed; `launch/codes.py` has the exit code of each."""

    OWN = "own"  # an error of its own
    WRONG_USE = "wrong_use"  # a use of ours that fails in the same way each time
    MISSING = "missing"  # a module that is not there, or not yet, as on a folder of the network
    FAULT = "fault"  # a signal that the system sends, such as SIGSEGV
    PEER = "peer"  # another rank was lost
    LATE = "late"  # another rank did not come in time
    NOT_MET = "not_met"  # machines did not find each other in time
    RUN_ENDED = "run_ended"  # the other replicas have done the work, so nothing has failed
    PREEMPTED = "preempted"  # a scheduler's signal
    ENGINE = "engine"  # what starts processes and connects machines

    @property
    def is_of_others(self) -> bool:
        """Whether another rank's failure explains it."""
        return self in (Cause.PEER, Cause.LATE)


def cause_of(error: BaseException) -> Cause:
    """Return why a process fails with `error`: the cause of the first error of ours, gloo or NCCL that led to it."""
    if isinstance(error, ImportError):
        return Cause.MISSING
    link: BaseException | None = error
    while link is not None:
        if isinstance(cause := getattr(link, "cause", None), Cause):
            return cause
        if isinstance(link, RuntimeError) and (cause := cause_in(str(link))) is not Cause.OWN:
            return cause
        link = link.__cause__
    return Cause.OWN


def cause_in(message: str) -> Cause:
    """Return the cause that an error of gloo or NCCL shows, for a report whose author recorded none."""
    if _GLOO_TIMED_OUT.search(message):
        return Cause.LATE
    return Cause.PEER if _PEER_LOST.search(message) else Cause.OWN


def cause_of_meeting(error: Exception) -> Cause:
    """Return why torch's rendezvous failed."""
    return Cause.NOT_MET if _MEETING_TIMED_OUT.search(str(error)) else Cause.ENGINE


def gloo_limit_s(error: RuntimeError) -> float | None:
    """Return the time limit of a collective of gloo that ran out of time; None for other errors."""
    match = _GLOO_TIMED_OUT.search(str(error))
    return int(match[1]) / 1000 if match else None
