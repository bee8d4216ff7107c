# SPDX-License-Identifier: Apache-2.0
"""Run this Python as a program of its own, or the command in this process, as tests of commands and scripts do."""

import subprocess
import sys
from typing import Any, TypeAlias

import pytest

from farflung.launch import main as command
from farflung.testing.patience import patience

Done: TypeAlias = "subprocess.CompletedProcess[str]"


def run_python(*words: Any, code: int | None = 0, timeout_s: float = 60.0, **options: Any) -> Done:
    """Run `sys.executable` with arguments, and return what came of it.

    Args:
        code: what it must exit with. None: anything.
        timeout_s: how long it may take on an idle machine.
        options: those of `subprocess.run`.
    """
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(timeout_s), **options)
    assert code in (None, done.returncode), f"{done.args} exited with {done.returncode}: {done.stdout}{done.stderr}"
    return done


def run_farflung(*words: Any, **options: Any) -> Done:
    """Run the command, as `run_python` does."""
    return run_python("-m", "farflung", *words, **options)


def call_farflung(*words: Any) -> int:
    """Run the command in this process, and return its exit code. Where torch is loaded, this takes milliseconds."""
    with pytest.raises(SystemExit) as ended:
        command.main([str(word) for word in words])
    return ended.value.code or 0
