# SPDX-License-Identifier: Apache-2.0
"""A rank that fails tells its launcher why, in the file and the form that torch's elastic agent reads."""

from __future__ import annotations

import io
import json
import sys
import time
import traceback
from contextlib import redirect_stderr
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from farflung.config import environ
from farflung.process import world as slot

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


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


def install_farewell() -> None:
    """Have an exception that nobody catches end the other ranks' waits at once, with its name as the reason.

    Otherwise they would wait until this process is gone, which may take minutes: it may run `atexit` functions, or wait
    for its threads. The hook that stood before is still called.
    """
    before = sys.excepthook

    def farewell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        world = slot.current()
        if world is not None and dist.is_initialized():
            world.group.leave(f"{kind.__name__}: {error}"[:500], for_good=True)
        before(kind, error, trace)

    sys.excepthook = farewell


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


def _with_rank(text: str, rank: int) -> str:
    prefix = f"[rank{rank}]: "
    return "".join(line if line.startswith("[rank") else prefix + line for line in text.splitlines(keepends=True))
