# SPDX-License-Identifier: Apache-2.0
"""Stands in for launchers that an engine starts elsewhere: programs of milliseconds that do what a test says."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

from farflung.testing.patience import patience
from tests.python import call_farflung

# A Python of a host: it runs a probe, which comes on stdin, and in place of a launcher the file `acts` of its folder.
_PYTHON = """#!{python} -IS
import json, os, sys, time
words = sys.argv[1:]
if words[0] == "-":
    os.execv("{python}", ["{python}", *words])
token = words[words.index("--reports") + 1]
of = dict(zip(words, words[1:])).get
def report(event, **facts):
    os.write(2, f"\\x1e{{token}} {{json.dumps(dict(event=event, time=1.0, **facts))}}\\n".encode())
def signal():  # the next one that comes, but for heartbeats; None: the connection is closed
    while (byte := os.read(0, 1)) == b"\\0":
        pass
    return byte[0] if byte else None
with open("commands", "a") as file:
    file.write(json.dumps(words) + "\\n")
exec(open("acts").read())
"""
ENDS = "report('ended', code=0)\n"


def make_python(folder: Path, acts: str) -> str:
    """Write such a Python and what it does into a folder; return its path. `commands` there has its arguments."""
    (folder / "acts").write_text(acts)
    (folder / "python").write_text(_PYTHON.format(python=sys.executable))
    (folder / "python").chmod(0o755)
    return str(folder / "python")


def launched(*words: str) -> Callable[[], int]:
    """Submit and follow a run in a thread; return a call that waits for its exit code."""
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(call_farflung("launch", *words)), daemon=True)
    thread.start()

    def code() -> int:
        thread.join(patience(60))
        return codes[0]

    return code
