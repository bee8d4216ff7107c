# SPDX-License-Identifier: Apache-2.0
"""Tests of the command see no file and no variable of the machine they run on, and start it as a user does."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import partial

import pytest

from farflung.config import environ
from farflung.launch import main as command, rank
from farflung.testing.ranks import run_ranks
from tests.python import run_farflung


@pytest.fixture
def farflung(home) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `farflung` with arguments in the empty home; a hang is ended after a minute. It may exit with any `code`."""
    return partial(run_farflung, code=None, timeout_s=90)


@pytest.fixture
def forked(home, monkeypatch) -> Callable[..., str]:
    """Run `farflung launch` here, with ranks that fork from a server that has torch loaded; return what they print.

    All but the agent over the processes is the launcher's own. Starting processes afresh takes seconds for each rank.
    """

    def start(settings, plan, is_inner) -> int:
        run_ranks(run_forked, plan.num_local, plan.command[4:], dict(plan.variables), connect=False)
        return 0

    def run(*arguments: str) -> str:
        monkeypatch.setattr("farflung.launch.run.start", start)
        with pytest.raises(SystemExit, match="0"):
            command.main(["launch", *arguments])
        return "".join(file.read_text() for file in sorted(home.glob("printed*")))

    return run


def run_forked(arguments: tuple[str, ...], variables: dict[str, str]) -> None:
    """Be the rank that the launcher would have started as `python -u -m farflung.launch.rank ARGUMENTS`."""
    environ.export(variables)
    streams = os.open(f"printed{environ.text('RANK')}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(streams, 1)
    os.dup2(streams, 2)
    try:
        rank.run(list(arguments))
    except SystemExit as end:
        if end.code:
            raise
