# SPDX-License-Identifier: Apache-2.0
"""A rank that fails tells its launcher why, in the file and the form that torch's elastic agent reads.

The launcher loads this file too, which therefore does without torch.
"""

from __future__ import annotations

import io
import json
import sys
import time
import traceback
from contextlib import redirect_stderr, suppress
from pathlib import Path
from types import TracebackType

from farflung.config import environ

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

# How far a rank came with the outer loop that its launcher asks for; each is the name of a note to the launcher.
OUTER_ASKED, OUTER_ATTACHED, OUTER_ROUND = "outer_asked", "outer_attached", "outer_round"


def install_failure_report(rank: int) -> None:
    """Have an exception that nobody catches written to the launcher's error file, and printed with the rank before it.

    What `torch.distributed.elastic.multiprocessing.errors.record` does for one function, this does for the whole
    script. The hook that stood before is still called. A process without an elastic agent over it is left as it is.

    A KeyboardInterrupt is not reported: whoever pressed Ctrl-C knows, and one traceback a rank would only hide it.

    Args:
        rank: this process among all of the run.
    """
    if not environ.text(ERROR_FILE):
        return
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return
        record_failure(error)
        printed = io.StringIO()
        with redirect_stderr(printed):
            before(kind, error, trace)
        # torch's own hook, set when the process group was made, puts the rank before each line too.
        outermost = sys.excepthook is report
        sys.stderr.write(_with_rank(printed.getvalue(), rank) if outermost else printed.getvalue())
        sys.stderr.flush()

    sys.excepthook = report


def record_failure(error: BaseException) -> None:
    """Write `error` and its traceback to the file that the elastic agent named, where there is an agent.

    `precise_timestamp` is ours: torch's own stamp counts whole seconds, too coarse to say which rank failed first.
    """
    path = environ.text(ERROR_FILE)
    if not path:
        return
    now = time.time()
    frames = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    details = {"py_callstack": frames, "timestamp": str(int(now)), "precise_timestamp": now}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": details}
    try:
        part = Path(f"{path}.part")
        part.write_text(json.dumps({"message": message}), encoding="utf-8")
        part.replace(path)  # whole or not at all: this process may be ended at any moment
    except OSError as problem:
        print(f"The failure could not be written to {path} for the launcher: {problem}", file=sys.stderr)


def leave_note(name: str) -> None:
    """Leave an empty file `name` for the launcher, beside this rank's report; do nothing where there is no launcher."""
    path = environ.text(ERROR_FILE)
    if path:
        with suppress(OSError):  # it is for a warning only
            Path(path).with_name(name).touch()


def _with_rank(text: str, rank: int) -> str:
    prefix = f"[rank{rank}]: "
    return "".join(line if line.startswith("[rank") else prefix + line for line in text.splitlines(keepends=True))
