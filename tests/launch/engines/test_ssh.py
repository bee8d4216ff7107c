# SPDX-License-Identifier: Apache-2.0
"""Runs that are started by ssh, on two machines with sshd: one log, one box, and nothing is left of them."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from farflung.launch.codes import BY_SIGNAL, DONE, ENGINE, FAILED
from farflung.launch.shell import start_of
from farflung.testing.patience import patience
from tests.launch.engines.test_arguments import DUMP, HOSTILE, SHELLS, make_arguments, seen
from tests.launch.keyed import check_sealed_and_unseen, end_soon, write_key
from tests.launch.machines import ADDRESSES
from tests.launch.screen import Screen
from tests.launch.sshd import host_with_shell, two_hosts, why_no_sshd
from tests.launch.test_replicas import TRAINS, until_further
from tests.python import run_farflung
from tests.waits import until

COUNTS = """
import os, socket, sys, torch
from farflung import Accelerator
accelerator = Accelerator()
total = int(accelerator.reduce(torch.ones(1)))
print("rank", accelerator.process_index, "of", total, "on", socket.gethostname())
if "fail" in sys.argv and accelerator.process_index == 1:
    raise ValueError("a bad value")
accelerator.wait_for_everyone()
"""
STAYS = (
    COUNTS
    + """
import time
from pathlib import Path
Path(f"up{accelerator.process_index}").touch()
while True:
    accelerator.reduce(torch.ones(1))
    time.sleep(0.05)
"""
)
# Without torch, for tests of how a run ends that are not about what its ranks say to each other.
SLEEPS = """
import os, time
from pathlib import Path
Path(f"up{os.environ['RANK']}").touch()
time.sleep(600)
"""

on_two_hosts = [
    pytest.mark.server,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(why_no_sshd()), reason=why_no_sshd() or "-"),
]


PAGE = (Path(__file__).parents[3] / "docs" / "engines" / "ssh.md").read_text(encoding="utf-8")
A_RUN, A_TABLE, A_LINE = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def alike(text: str, folder: Path | None = None) -> list[str]:
    """The lines of a text in order, without its numbers and the folder."""
    text = text.replace(str(folder), "/home/me").replace("+cpu", "")
    return sorted(re.sub(r"[━┏┳┓┡╇┩└┴┘─ ]+", " ", re.sub(r"\d+(\.\d+)*", "N", line)) for line in text.splitlines())


class Lab:
    """Two hosts, and launches on them from the first one."""

    def __init__(self, machines, config, folder) -> None:
        self.machines, self.config, self.folder = machines, config, folder

    def launch(self, *words, python=sys.executable, script="train.py", options="", **variables) -> Screen:
        given = f"python={python},ssh=-F {self.config}{options}"
        own = ["farflung", "launch", "--cpu", *words, "--engine-options", given, script]
        variables = {"FARFLUNG_RUN_DIR": "", **variables}
        return Screen(self.machines.start(0, [*own, str(self.folder)], self.folder, variables))

    def left(self) -> list[list[str]]:
        """The commands of a launch that still run, anywhere."""
        running = [one.info for one in psutil.process_iter(["cmdline", "status"])]
        commands = [one["cmdline"] or [] for one in running if one["status"] != psutil.STATUS_ZOMBIE]
        return [words for words in commands if str(self.folder) in " ".join(words) and "sshd" not in words[0]]


@pytest.fixture
def lab(home, tmp_path):
    with two_hosts(home) as (machines, config):
        yield Lab(machines, config, home)


@pytest.fixture
def on_lab(lab, warm_python):
    """A lab whose hosts have a Python with torch loaded, for tests that are not about processes."""
    lab.warm = {"python": warm_python}
    return lab


def in_lab(test):
    for mark in on_two_hosts:
        test = mark(test)
    return test


@in_lab
def test_two_hosts_are_one_world_and_one_log_of_whole_lines(on_lab, home):
    (home / "train.py").write_text(COUNTS)
    (home / "hosts").write_text("# two of them\nnode0:2\n\nroot@node1 slots=2  # the far one\n")
    screen = on_lab.launch("--hosts", "hosts", **on_lab.warm)
    text = screen.end(DONE)
    lines = [line for line in text.splitlines() if "rank" in line]
    assert sorted(lines) == [f"[node{k // 2}] rank {k} of 4 on node{k // 2}" for k in range(4)]
    for rank in (0, 1):
        assert f"[node{rank}] farflung: machine {rank} of 2 waits for the others at {ADDRESSES[0]}:" in text
    (run,) = (home / "farflung-runs").glob("*-train")
    assert {log.name for log in (run / "logs").iterdir()} == {f"rank{rank}.log" for rank in range(4)}
    assert not (run / ".copied").exists()  # it is one disk
    assert json.loads((run / "run.json").read_text())["world"] == {"engine": "ssh", "machines": 2}


@pytest.mark.server
@pytest.mark.skipif(bool(why_no_sshd()), reason=why_no_sshd() or "-")
@pytest.mark.parametrize("shell", SHELLS)
def test_every_argument_arrives_as_it_was_whatever_the_login_shell_is(shell, home, tmp_path_factory, monkeypatch):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    folder, arguments = home / HOSTILE, make_arguments()
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("train.py").write_text(DUMP)
    with host_with_shell(tmp_path_factory.mktemp("sshd"), shell) as config:
        options = f"python={sys.executable},ssh=-F {config}"
        words = ("--cpu", "--hosts", "node0", "--run-dir", "the run", "--engine-options", options)
        done = run_farflung("launch", *words, "train.py", *arguments)
    assert seen(folder) == arguments, done.stderr


@in_lab
@pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
def test_a_folder_is_copied_there_and_what_the_run_has_written_comes_back(on_lab, home, tmp_path):
    (home / "train.py").write_text(COUNTS)
    (home / ".git").mkdir()
    there = tmp_path / "there"
    screen = on_lab.launch("--hosts", "node0,node1", "--sync", options=f",folder={there}", **on_lab.warm)
    text = screen.end(DONE)
    assert alike(text, home) == alike(A_RUN)
    assert (there / "train.py").exists()
    assert not (there / ".git").exists()
    (run,) = (home / "farflung-runs").glob("*-train")
    assert "of 2 on node1" in (run / "logs" / "rank1.log").read_text()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    begun = [event for event in events if event["event"] == "started"]
    assert len(begun) == 3  # of this launcher and of one on each host, each once though they share a disk


@in_lab
def test_a_rank_that_fails_is_one_box_and_a_log_for_machines_has_the_host(on_lab, home):
    (home / "train.py").write_text(COUNTS.replace('"fail" in sys.argv', "True"))
    screen = on_lab.launch("--hosts", "node0,node1", **on_lab.warm)
    text = screen.end(FAILED)
    assert text.count("╭─ rank 1 failed on node1 (10.77.0.2): exit code 1") == text.count("╭─") == 1
    assert "ValueError: a bad value" in text
    screen = on_lab.launch("--hosts", "node0,node1", "--json", **on_lab.warm)
    lines = [line for line in screen.end().splitlines() if line.startswith("{")]
    failed = [event for event in map(json.loads, lines) if event["event"] == "failed"]
    assert "node1" in {event["host"] for event in failed}
    assert json.loads(lines[-1])["code"] == FAILED


@in_lab
@pytest.mark.parametrize("trouble", ["gone", "cut"])
def test_a_host_that_goes_away_or_a_cut_line_ends_a_fixed_run_on_both_sides_in_one_box(trouble, lab, home):
    (home / "train.py").write_text(STAYS)
    screen = lab.launch("--hosts", "node0,node1")
    until(lambda: (home / "up1").exists(), lambda: screen.text)
    began = time.monotonic()
    lab.machines.kill(1) if trouble == "gone" else lab.machines.cut()
    text = screen.end(FAILED)
    assert text.count("╭─ node1 is gone ") == text.count("╭─") == 1
    assert time.monotonic() - began < patience(30)
    why = "The connection to it has ended: Timeout, server 10.77.0.2 not responding."
    assert trouble == "gone" or why in text
    until(lambda: not lab.left(), lambda: str(lab.left()))


@in_lab
def test_a_cut_line_costs_the_other_replicas_nothing_and_ends_those_behind_it(lab, home):
    (home / "train.py").write_text(TRAINS.replace("if sys.argv[1:] else", "if sys.argv[2:] else"))
    screen = lab.launch("--hosts", "node0,node1:2", "--elastic", "1:4")  # it begins with the least
    screen.wait_for("3 replicas train")
    lab.machines.cut()
    screen.wait_for("is out: its machine gave no sign for")
    screen.wait_for("training continues with 1 replica")
    until_further(home)
    screen.wait_for("farflung: node1 is gone: Timeout, server 10.77.0.2 not responding.; the others continue")
    until(lambda: sum(start_of("farflung.process.tether")[-1] in words for words in lab.left()) == 1)
    end_soon(home)
    text = screen.end(DONE)
    assert "╭─" not in text
    assert not lab.left()


@in_lab
def test_a_key_reaches_the_hosts_unseen_and_seals_the_run(on_lab, home):
    key, meet = write_key(home), home / "meet"
    meet.mkdir()
    where = ["--elastic", "2:2", "--meet", meet.as_uri()]
    screen = on_lab.launch("--hosts", "node0,node1", *where, "--key_file", str(key), **on_lab.warm)
    screen.wait_for("training begins with 2 replicas")
    end_soon(home)
    text = screen.end(DONE)
    check_sealed_and_unseen(home, meet, text)


@in_lab
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        *(("fixed", number) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGKILL)),
        *(("elastic", number) for number in (signal.SIGINT, signal.SIGKILL)),
        ("deaf", signal.SIGINT),  # which takes two
    ],
)
def test_nothing_is_left_of_a_run_whose_launcher_is_ended(kind, number, lab, home):
    elastic = ["--elastic", "2:4"] if kind == "elastic" else []
    deaf = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" if kind == "deaf" else ""
    (home / "train.py").write_text(TRAINS if elastic else deaf + SLEEPS)
    screen = lab.launch("--hosts", "node0,node1", *elastic)
    if elastic:
        screen.wait_for("training begins with 2 replicas")
    else:
        until(lambda: (home / "up0").exists() and (home / "up1").exists(), lambda: screen.text)
    launcher = psutil.Process(screen.process.pid)
    launcher.send_signal(number)
    if deaf:
        screen.wait_for("press Ctrl-C again to kill them now")
        launcher.send_signal(number)
    if number == signal.SIGKILL:
        until(lambda: not lab.left(), lambda: str(lab.left()))
    else:
        screen.end(BY_SIGNAL + number)
        until(lambda: not deaf or not lab.left(), lambda: str(lab.left()))
        assert not lab.left()


@in_lab
def test_a_run_is_cancelled_from_another_terminal(lab, home, capsys):
    (home / "train.py").write_text(SLEEPS)
    screen = lab.launch("--hosts", "node0,node1", "--run-dir", "run")
    until(lambda: (home / "up1").exists(), lambda: screen.text)
    done = Screen(lab.machines.start(0, ["farflung", "cancel", "run"], home))
    assert "was asked to, and has the hosts end too" in done.end()
    screen.end(BY_SIGNAL + signal.SIGTERM)
    assert not lab.left()
    done = Screen(lab.machines.start(0, ["farflung", "cancel", "run"], home))
    assert "has ended before" in done.end()
    done = Screen(lab.machines.start(0, ["farflung", "follow", "run"], home))
    assert "`farflung watch run`" in done.end(ENGINE)


@in_lab
def test_hosts_that_differ_are_one_table_before_anything_starts(lab, home):
    (home / "train.py").write_text("open('started', 'w')\n")
    fake = home / "fake" / "torch-1.0.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    python = home / "python"
    python.write_text(
        f'#!/bin/sh\ntest $(hostname) = node1 && export PYTHONPATH={home}/fake\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    screen = lab.launch("--hosts", "node0,node1", python=python)
    text = screen.end(ENGINE)
    assert re.search(r"│ node1\s+│ 1\.0 ", text)
    assert alike(text) == alike(A_TABLE)
    assert len(text.splitlines()) <= 15
    for options, why in (
        (f",folder={home}/gone", "/gone"),
        (",folder=/", "there is no train.py in /; --sync copies the folder"),
        (" -p 1", "Connection refused"),
    ):
        screen = lab.launch("--hosts", "node0,node1", options=options)
        text = screen.end(ENGINE)
        assert text.startswith("EngineFailure: 2 of 2 hosts can't be used. Nothing was started.\n  node0: ")
        assert why in text
    assert alike(lab.launch("--hosts", "node0,node1,node2").end()) == alike(A_LINE)
    screen = lab.launch("--hosts", "node0,node1", python="/usr/bin/nopython")
    assert "nopython" in screen.end(ENGINE)
    assert not (home / "started").exists()
