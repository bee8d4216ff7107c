# SPDX-License-Identifier: Apache-2.0
"""Bars for long work: on a terminal, after a moment, and nothing anywhere else."""

import re
import sys
from pathlib import Path

import pexpect
import pytest

from farflung.testing.patience import patience
from tests.python import run_python

WORK = """
import sys, time
from farflung.base import bars
{patience}
with bars.bar("Reading [one]", 3_400_000_000, {is_shown}) as bar:
    bar.advance(600_000_000)
    {pause}
    bar.advance(600_000_000)
assert bar.num_done == 1_200_000_000
print("done", "rich" in sys.modules, "torch" in sys.modules)
"""
NOW, NEVER = "bars._PATIENCE_S = 0", "bars._PATIENCE_S = 1e9"


def work(patience=NOW, is_shown=True, pause="pass"):
    return WORK.format(patience=patience, is_shown=is_shown, pause=pause)


def in_terminal(program, width=100):
    """All that a terminal gets from a program, or the file of one, whose exit code is 0."""
    options = {"encoding": "utf-8", "timeout": patience(60), "dimensions": (24, width)}
    words = [str(program)] if isinstance(program, Path) else ["-c", program]
    child = pexpect.spawn(sys.executable, words, **options)
    try:
        child.expect(pexpect.EOF)
        said = child.before
    finally:
        child.close(force=True)
    assert child.exitstatus == 0, said
    return said


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def test_a_terminal_shows_how_much_of_how_much_once_the_work_takes_longer_than_a_second():
    said = in_terminal(work(patience="", pause="time.sleep(1.2)"))
    assert re.search(r"Reading \[one\] .*1\.2/3\.4 GB", said), said
    assert said.endswith("done True False\r\n")
    assert "\x1b[?25l" in said, "the cursor is hidden meanwhile"
    assert said.rindex("\x1b[?25h") > said.rindex("\x1b[?25l"), "and there afterwards"
    assert "\x1b[2K" in said[said.rindex("3.4 GB") :], "the bar is removed"


@pytest.mark.parametrize("how", [{"patience": NEVER}, {"is_shown": False}], ids=["over soon", "not the main process"])
def test_work_that_is_over_soon_or_of_another_process_shows_nothing_and_loads_no_rich(how):
    assert in_terminal(work(**how)) == "done False False\r\n"


def test_a_pipe_gets_nothing_whatever_variables_say_of_colors(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = run_python("-c", work())
    assert (done.stdout, done.stderr) == ("done False False\n", "")


def test_what_is_printed_meanwhile_goes_to_stdout_alone(tmp_path):
    program = work(pause='print("in between")')
    said = in_terminal(f"import sys; sys.stdout = open({str(tmp_path / 'out')!r}, 'w')\n{program}")
    assert "in between" not in said
    assert "Reading [one]" in said
    assert (tmp_path / "out").read_text() == "in between\ndone True False\n"


def test_a_terminal_that_is_gone_stops_no_work():
    closes = "import os; gone = os.open(os.devnull, os.O_RDONLY); os.dup2(gone, 2)"
    assert in_terminal(work(pause=closes)).endswith("done True False\r\n")


def test_a_narrow_terminal_has_a_bar_of_one_line():
    assert in_terminal(work(), width=40).count("\x1b[1A") == 1, "only the line of the bar has to be removed"
