# SPDX-License-Identifier: Apache-2.0
"""The report of a run that failed: one box that names the rank that failed first, and why."""

from __future__ import annotations

import io
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from farflung.base.causes import Cause, cause_in
from farflung.base.checks import Address
from farflung.base.events import Kind, record, tell
from farflung.base.signals import name_of
from farflung.base.words import numbered

# The end of a process that was not its own doing, so no other rank's failure caused it.
_FAULTS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_GRACE_S = 20  # the agent waits 30 s before it kills: who ends by a signal this long after the first did not fail


@dataclass(frozen=True)
class Failure:
    """A process that did not end well."""

    rank: int
    exit_code: int  # as the system says it; -k for signal k
    pid: int = 0
    message: str | None = None  # the error in one line, if the process left one
    traceback: str | None = None  # the whole of it
    time_s: float = 0.0  # when, in seconds since the epoch; of whole seconds if the process left no report
    reported_code: int | None = None  # the exit code that the process was about to end with when it left its report
    reported_cause: Cause = Cause.OWN

    @classmethod
    def of(cls, rank: int, exit_code: int, left: Mapping[str, Any], *, pid: int = 0, seen_s: float = 0.0) -> Failure:
        """Return what is known of `rank`: by its error file (`left`, in torch's form), and when its end was seen."""
        report = left.get("message")
        if not isinstance(report, Mapping):
            return cls(rank, exit_code, pid, time_s=seen_s)
        details = report.get("extraInfo", {})
        time_s = float(details.get("precise_timestamp") or details.get("timestamp") or seen_s)
        trace, code = details.get("py_callstack"), details.get("exit_code")
        message = report.get("message")
        cause = Cause(details["cause"]) if "cause" in details else cause_in(message or "")  # torch's reports have none
        return cls(rank, exit_code, pid, message, trace, time_s, code, cause)

    @property
    def cause(self) -> Cause:
        """Why it ended: by its report, or by the signal that ended it."""
        return Cause.FAULT if self.traceback is None and -self.exit_code in _FAULTS else self.reported_cause

    @property
    def shell_code(self) -> int:
        """The exit code as a shell says it: 128 + k for signal k."""
        return self._own_code if self._own_code >= 0 else 128 - self._own_code

    @property
    def _own_code(self) -> int:
        """A rank that had reported its end was on its way out, even if the launcher's signal came before."""
        if self.exit_code != -signal.SIGTERM or not self.has_reported:
            return self.exit_code
        return 1 if self.reported_code is None else self.reported_code

    @property
    def has_reported(self) -> bool:
        """Whether the process said itself why it ends."""
        return self.traceback is not None or self.reported_code is not None

    @property
    def how(self) -> str:
        """`exit code 3`, or `signal 9 (SIGKILL)`."""
        if self._own_code >= 0:
            return f"exit code {self._own_code}"
        number, name = -self._own_code, name_of(-self._own_code)
        return f"signal {number}" + (f" ({name})" if name.startswith("SIG") else "")


def in_order(failures: Sequence[Failure]) -> tuple[list[Failure], list[Failure]]:
    """Return the failures, the most likely cause first, and apart from them the ranks that the launcher ended.

    Faults come first, then errors by their time, then the errors of ranks that lost another one.
    """
    first_s = min(failure.time_s for failure in failures)
    signalled = [one for one in failures if one.exit_code < 0 and not one.has_reported]
    ended = [one for one in signalled if one.exit_code == -signal.SIGTERM or one.time_s > first_s + _GRACE_S]
    failed = [failure for failure in failures if failure not in ended]
    if not failed:  # each was asked to end; the agent lists first the one that another program asked
        failed, ended = ended[:1], ended[1:]
    failed.sort(key=lambda one: (one.cause.is_of_others, one.cause is not Cause.FAULT, one.time_s))
    return failed, ended


def explain(
    failures: Sequence[Failure],
    finished: Sequence[int] = (),
    others_at: str | None = None,
    checkpoint: Path | Address | None = None,
    name: str | None = None,
) -> tuple[str, str]:
    """Return title and text of the report.

    Args:
        finished: ranks of this machine that had ended well before.
        others_at: the address of this machine for others, whose names may be the same; None: there are no others.
        name: of what failed first; None: `rank 0`, for example.
    """
    failed, ended = in_order(failures)
    cause = failed[0]
    parts = [cause.traceback.rstrip() if cause.traceback else _without_traceback(cause)]
    others = [
        f"rank {other.rank} failed too: {in_short(other)}" for other in failed[1:] if not other.cause.is_of_others
    ]
    others += _listed([other for other in failed[1:] if other.cause.is_of_others], "lost the connection to it")
    others += _listed(ended, "ended by the launcher")
    if finished:
        others.append(
            f"{numbered('rank', finished)} ended with exit code 0"
            + (" while others still needed it, which is the cause." if cause.cause.is_of_others else ".")
        )
    elif cause.cause is Cause.PEER and others_at is not None:
        others.append("The cause is on another machine; see the report there.")
    if others:
        parts.append("\n".join(others))
    if checkpoint is not None:
        call = f"load_state({str(checkpoint)!r})"
        parts.append(f"Resume from {checkpoint.name}, the newest checkpoint of this run: {call}")
    here = socket.gethostname() + (f" ({others_at})" if others_at else "")
    return f"{name or f'rank {cause.rank}'} failed on {here}: {cause.how}", "\n\n".join(parts)


def _without_traceback(cause: Failure) -> str:
    if cause.exit_code == -signal.SIGKILL:
        return "It was killed from outside. The operating system does this when memory runs out."
    if cause.exit_code < 0:
        return "It was ended by a signal, so there is no traceback."
    return f"{cause.message or 'It left no traceback for the launcher.'} Its output is above."


def in_short(failure: Failure) -> str:
    """Return what a process said of its end, or how it ended, in one line."""
    lines = (failure.message or "").strip().splitlines()
    return shorten(lines[0], 150, placeholder=" ...") if lines else failure.how


def _listed(failures: Sequence[Failure], what: str) -> list[str]:
    return [f"then {what}: {numbered('rank', sorted(failure.rank for failure in failures))}"] if failures else []


def show(failures: Sequence[Failure], log_dir: str | None = None, **details: Any) -> int:
    """Record the report of a failure, with `details` for `explain`; return the exit code of the first rank to fail."""
    cause = in_order(failures)[0][0]
    title, text = explain(failures, **details)
    if log_dir is not None:
        text += f"\n\nlogs: {log_dir}"
    facts: dict[str, Any] = {"rank": cause.rank, "how": cause.how, "error": cause.message, "failed_at": cause.time_s}
    record(Kind.FAILED, message=title, **facts, cause=cause.cause.value, report=text)
    return cause.shell_code


def show_box(title: str, text: str) -> None:
    """Print a report on stderr for people."""
    from rich.console import Console  # late: only a failure needs it
    from rich.panel import Panel
    from rich.text import Text

    drawn = io.StringIO()  # not stderr: rich ends the process if that is a closed pipe
    console = Console(file=drawn, force_terminal=sys.stderr.isatty())
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a log file has no narrow edge
    console.print(Panel(Text(text), title=Text(title), title_align="left", border_style="red"), end="")
    tell(drawn.getvalue())
