# SPDX-License-Identifier: Apache-2.0
"""A warning reaches each rank once, whether a scheduler signals all processes of a run or its launcher alone."""

from __future__ import annotations

import os
import signal

import pytest

from farflung.config import environ
from farflung.process import heard
from farflung.process.failure import ERROR_FILE
from farflung.process.heard import SignalForwarder, record_signals
from tests.waits import until


@pytest.fixture
def rank(tmp_path):
    """This process as the only rank of a launcher; yields how often its handler was called."""
    folder = tmp_path / "attempt_0" / "0"
    folder.mkdir(parents=True)
    calls = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: calls.append(number))
    with environ.patched({ERROR_FILE: str(folder / "error.json")}):
        record_signals()
    yield calls
    os.close(signal.set_wakeup_fd(-1))
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("to_all", ["TTT", "FFF", "TFT", "FTF", "FTTF"])
def test_each_warning_is_heard_once_whoever_it_was_sent_to(to_all, rank, tmp_path):
    courier = SignalForwarder(tmp_path.glob)
    for count, one in enumerate(to_all, 1):
        if one == "T":
            os.kill(os.getpid(), signal.SIGUSR2)
        courier._send(signal.SIGUSR2, [os.getpid()])
        assert len(rank) == count


def test_it_is_passed_on_in_a_moment_and_not_to_processes_that_have_ended(rank, tmp_path, monkeypatch):
    monkeypatch.setattr(heard, "_WAIT_S", 0.01)
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    SignalForwarder(tmp_path.glob).pass_on(signal.SIGUSR2, [child, os.getpid()])
    until(lambda: rank)
    assert rank == [signal.SIGUSR2]
