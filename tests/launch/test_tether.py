# SPDX-License-Identifier: Apache-2.0
"""No rank outlives a launcher that is killed; replicas that come and go do."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from farflung.config import environ
from farflung.launch.shell import start_of
from farflung.testing.patience import patience
from tests.python import run_python
from tests.waits import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")

# Leaves its number, and stays for minutes.
STAYS = """
import os, sys, time
name = f"up{os.environ['RANK']}"
with open(name + ".part", "w") as file:
    file.write(str(os.getpid()))
os.rename(name + ".part", name)
with open("ticks" + name, "w", buffering=1) as ticks:
    while True:
        print("tick", file=ticks)
        time.sleep(0.05)
"""
SHELL = "echo $$ > up$RANK.part; mv up$RANK.part up$RANK; while true; do sleep 1; done"
NOTEBOOK = """
from farflung import debug_launcher
def train():
    exec(open("train.py").read(), {})
debug_launcher(train)
"""


def after_a_kill(words: Sequence[str], home: Path) -> list[psutil.Process]:
    """Start a launcher, wait for its two ranks, kill it, and return the ranks."""
    launcher = subprocess.Popen([sys.executable, *words], start_new_session=True)
    files = until(lambda: len(found := [file for file in home.glob("up*") if not file.suffix]) == 2 and found)
    ranks = [psutil.Process(int(file.read_text())) for file in files]
    launcher.kill()
    assert launcher.wait(patience(10)) == -signal.SIGKILL
    return ranks


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


LAUNCH = ("-m", "farflung", "launch", "--cpu")
TETHER = (*start_of("farflung.process.tether"), "--reports", "token")


@pytest.mark.parametrize(
    "words",
    [
        (*LAUNCH, "--num_processes", "2", "train.py"),
        (*LAUNCH, "--num_processes", "2", "--no_python", "sh", "-c", SHELL),
        ("notebook.py",),
    ],
    ids=["script", "program", "function"],
)
def test_no_rank_outlives_a_launcher_that_is_killed(words, home):
    (home / "train.py").write_text(STAYS)
    (home / "notebook.py").write_text(NOTEBOOK)
    ranks = after_a_kill(words, home)
    until(lambda: all(map(is_gone, ranks)))


def test_replicas_that_come_and_go_outlive_their_launcher(home):
    (home / "train.py").write_text("import os\nos.environ['RANK'] = os.environ['FARFLUNG_MEMBER']\n" + STAYS)
    replicas = after_a_kill([*LAUNCH, "--elastic", "1:2", "--replicas", "2", "train.py"], home)
    ticks = {file: file.stat().st_size for file in home.glob("ticks*")}
    try:
        until(lambda: all(file.stat().st_size > 10 * len("tick\n") + size for file, size in ticks.items()))
    finally:
        for one in replicas:
            one.kill()
    assert len(ticks) == 2


def test_a_rank_whose_launcher_died_before_it_began_does_not_begin(home):
    (home / "train.py").write_text("open('began', 'w')")
    with subprocess.Popen(["sleep", "300"]) as launcher, environ.patched({environ.LAUNCHER: str(launcher.pid)}):
        run_python(*start_of("farflung.launch.rank")[1:], "train.py")  # started by another program than the launcher
        assert (home / "began").exists()
        (home / "began").unlink()
        launcher.kill()
        until(lambda: is_gone(psutil.Process(launcher.pid)))  # it is a zombie now
        run_python(*start_of("farflung.launch.rank")[1:], "train.py", code=-signal.SIGKILL)
    with environ.patched({environ.LAUNCHER: str(launcher.pid)}):
        run_python(*start_of("farflung.launch.rank")[1:], "train.py", code=-signal.SIGKILL)
    assert not (home / "began").exists()


@pytest.mark.long
def test_what_a_closed_line_holds_ends_with_all_that_it_has_started(home):
    (home / "train.sh").write_text("trap '' TERM\nsleep 300 & echo $! > up0; wait")
    words = [*TETHER, "sh", "train.sh"]
    line = subprocess.Popen(words, stdin=subprocess.PIPE)
    child = psutil.Process(int(until(lambda: (home / "up0").exists() and (home / "up0").read_text())))
    line.stdin.close()
    assert line.wait(patience(30)) == 128 + signal.SIGKILL  # it has asked for ten seconds
    until(lambda: is_gone(child))


def test_a_line_passes_signals_on_and_the_exit_code_back(home):
    (home / "train.sh").write_text("trap 'exit 7' INT\ntouch up0\nwhile true; do sleep 0.1; done")
    words = [*TETHER, "sh", "train.sh"]
    shell = ("sh", "-c", 'exec 3<&0; "$@" <&3 & wait $!', "sh")  # what it has in the background ignores SIGINT
    line = subprocess.Popen([*shell, *words], stdin=subprocess.PIPE)
    with line:
        until(lambda: (home / "up0").exists())
        line.stdin.write(bytes([0, signal.SIGINT]))
        line.stdin.flush()
        assert line.wait(patience(30)) == 7


DAEMON = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execvp(sys.argv[1], sys.argv[1:])"


def test_exit_codes_are_known_under_a_parent_that_ignores_its_children(home):
    """Daemons and login wrappers leave SIGCHLD ignored: each child's code was 0, a failed rank's too."""
    (home / "train.py").write_text("raise SystemExit(3)")
    words = [*start_of("farflung.launch.main"), "launch", "--cpu", "--json", "--run_dir", "run", "train.py"]
    assert run_python("-c", DAEMON, *words, code=None).returncode == 3
    assert json.loads((home / "run" / "run.json").read_text())
    line = subprocess.Popen(
        [sys.executable, "-c", DAEMON, *TETHER, "sh", "-c", "exit 7"],
        stdin=subprocess.PIPE,
    )
    with line:
        assert line.wait(patience(30)) == 7
