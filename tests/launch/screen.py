# SPDX-License-Identifier: Apache-2.0
"""What a command prints, read while it runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from threading import Thread
from typing import Any

import pytest

from farflung.testing.patience import patience
from tests.waits import until

_END_WITHIN_S, _PRINT_WITHIN_S = 90.0, 120.0


class Screen(Thread):
    """Reads what a command prints to its pipe. A block of it ends the command.

    Attributes:
        text: what was printed so far.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self.process, self._pipe, self.text = process, process.stdout or process.stderr, ""
        self.start()

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()  # what it has started may outlive it, and hold its streams, if it were killed
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience(60))
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.join()
        self._pipe.close()

    def run(self) -> None:
        for line in self._pipe:
            self.text += line

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines(keepends=True)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until it has printed what matches; return the match."""

        def found() -> re.Match[str] | None:
            has_ended = not self.is_alive()  # asked first: it may print the last lines meanwhile
            match = re.search(pattern, self.text, re.MULTILINE)
            assert match or not has_ended, f"ended without {pattern!r}:\n{self.text}"
            return match

        return until(found, lambda: f"no {pattern!r} in\n{self.text}", _PRINT_WITHIN_S)

    def ended(self) -> int:
        """Wait for the end, and return the exit code. What it has started may hold the pipe for longer."""
        try:
            return self.process.wait(patience(_END_WITHIN_S))
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.process.args} did not end; it said:\n{self.text}")

    def end(self, code: int | None = None) -> str:
        """Wait until it and all that holds its pipe have ended, and return what was printed.

        Args:
            code: what it must exit with. None: anything.
        """
        ended = self.ended()
        self.join()
        self._pipe.close()
        assert code in (None, ended), self.text
        return self.text


def started(*words: str, **options: Any) -> Screen:
    """Start `farflung` with these words, and read both of its streams unless `options` of `Popen` say otherwise."""
    command = [sys.executable, "-m", "farflung", *words]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
    return Screen(subprocess.Popen(command, text=True, start_new_session=True, **streams))


def launcher(*words: str) -> Screen:
    """Start `farflung launch --cpu` with these words, and read what it and the ranks say on stderr."""
    return started("launch", "--cpu", *words, stdout=None, stderr=subprocess.PIPE)
