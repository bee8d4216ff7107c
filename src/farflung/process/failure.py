# SPDX-License-Identifier: Apache-2.0
"""Reports of failed ranks to their launcher, in the file and the form that torch's elastic agent reads.

The launcher loads this file too, which therefore does without torch.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from farflung.base.causes import cause_of
from farflung.base.errors import FarflungError
from farflung.base.events import tell
from farflung.base.files import atomic_file
from farflung.config import environ

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

# The note that has the path of the newest checkpoint of this run.
CHECKPOINT = "newest_checkpoint"
PREEMPTED = "preempted"  # the note that a rank has saved and ended, as a scheduler asked for it
# How far a rank came with the outer loop that its launcher asks for; each is the name of a note to the launcher.
OUTER_ASKED, OUTER_ATTACHED, OUTER_ROUND = "outer_asked", "outer_attached", "outer_round"
MEMBER = "member"  # the note that it has asked for its membership in the run

_OURS = str(Path(__file__).parent.parent)
_TORCHS = f"site-packages{os.sep}torch{os.sep}"


def install_failure_report(
    rank: int,
    explain: Callable[[BaseException], BaseException] = lambda error: error,
    leave: Callable[[BaseException], None] | None = None,
) -> None:
    """Write uncaught exceptions to the launcher's error file, and print them with the rank in front.

    What `torch.distributed.elastic.multiprocessing.errors.record` does for one function, this does for the whole
    script. The previous hook is still called. Without an elastic agent above the process no report is written.

    A KeyboardInterrupt is not reported: the user who pressed Ctrl-C knows, and one traceback a rank would only hide it.
    `explain` may give an error that says more, which is reported instead; `leave` tells the other ranks of it.
    """
    has_launcher, before = bool(environ.text(ERROR_FILE)), sys.excepthook
    if not has_launcher and leave is None:
        return

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if has_launcher and issubclass(kind, KeyboardInterrupt):
            return
        known = explain(error)
        if known is not error:
            kind, error = type(known), known.with_traceback(trace)
        if has_launcher:
            record_failure(error)
        if leave is not None:
            leave(error)
        if not has_launcher:
            before(kind, error, trace)
            return
        printed = io.StringIO()
        with redirect_stderr(printed):
            before(kind, error, trace)
        lines, prefix = printed.getvalue().splitlines(keepends=True), f"[rank{rank}]: "
        if sys.excepthook is report:  # else torch's own hook, set when the process group was made, does so
            lines = [line if line.startswith("[rank") else prefix + line for line in lines]
        tell("".join(lines).removesuffix("\n"))

    sys.excepthook = report


def record_failure(error: BaseException) -> None:
    """Write `error` and its traceback to the file that the elastic agent named, if there is an agent.

    The first report stays: later failures are its consequences. For Farflung's own errors the traceback has the
    script's frames only, and not the errors that caused them.

    `precise_timestamp` is ours: torch's own stamp counts whole seconds, too coarse to say which rank failed first.
    """
    if isinstance(error, FarflungError):
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_inner(f.filename)]
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)] if frames else []
        lines += traceback.format_exception_only(type(error), error)
    else:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
    _write_report(
        f"{type(error).__name__}: {error}",
        {"py_callstack": "".join(lines), "exit_code": 1, "cause": cause_of(error).value},
    )


def record_exit(code: object, trace: TracebackType | None) -> None:
    """Report to the launcher that this rank ends by `sys.exit` with an exit code other than 0, and where."""
    if code is None or code == 0:
        return
    frames = [frame for frame in traceback.extract_tb(trace) if not _is_inner(frame.filename)]
    where = f" ({frames[0].filename}, line {frames[0].lineno})" if frames else ""
    number = code & 255 if isinstance(code, int) else 1
    _write_report(f"It ended itself with exit code {number}{where}.", {"exit_code": number})


def _write_report(message: str, details: dict[str, Any]) -> None:
    path = environ.text(ERROR_FILE)
    if not path or Path(path).exists():
        return
    now = time.time()
    details |= {"timestamp": str(int(now)), "precise_timestamp": now}
    try:
        with atomic_file(path) as part:  # this process may be ended at any moment
            part.write_text(json.dumps({"message": {"message": message, "extraInfo": details}}), encoding="utf-8")
    except OSError as problem:
        tell(f"The failure could not be written to {path} for the launcher: {problem}")


def has_report() -> bool:
    """Return whether a launcher will show this rank's report: ours does, torchrun if no attempt follows this one."""
    last = (environ.integer("TORCHELASTIC_RESTART_COUNT") or 0) >= (environ.integer("TORCHELASTIC_MAX_RESTARTS") or 0)
    return bool(environ.text(ERROR_FILE)) and (last or environ.flag(environ.SHOWS_ATTEMPTS))


def _is_inner(file: str) -> bool:
    return file.startswith((_OURS, "<frozen ")) or _TORCHS in file


def has_note(name: str) -> bool:
    """Return whether this rank has left a note `name` for its launcher."""
    path = environ.text(ERROR_FILE)
    return path is not None and Path(path).with_name(name).exists()


def leave_note(name: str, text: str = "") -> None:
    """Write a file `name` for the launcher, next to this rank's report; without a launcher do nothing."""
    path = environ.text(ERROR_FILE)
    if path:
        with suppress(OSError):  # it is for a sentence only
            Path(path).with_name(name).write_text(text, encoding="utf-8")
