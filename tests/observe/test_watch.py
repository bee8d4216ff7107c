# SPDX-License-Identifier: Apache-2.0
"""What `farflung watch` shows of a run, from its folder alone: in a terminal, in a pipe, live and long after."""

from __future__ import annotations

import html
import io
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import pexpect
import psutil
import pytest
from click.testing import CliRunner
from rich.console import Console

from farflung.base.errors import ConfigError
from farflung.launch import folder
from farflung.observe.figures import figures
from farflung.observe.folder import named_run
from farflung.observe.problems import problems
from farflung.observe.report import report
from farflung.observe.run import ObservedRun
from farflung.observe.watch import screen
from farflung.testing.patience import patience
from tests.launch.machines import ADDRESSES, Machines, two_machines
from tests.observe.made import T0, a_round, add_lines, rows_of, sign, write_lines, write_run
from tests.python import call_farflung
from tests.waits import until

PAGE = Path(__file__).parents[2] / "docs" / "watch.md"
TRAINS = """
import os, time, torch
from farflung.elastic import launched_membership
from farflung.outer import OuterLoop, diloco
torch.set_num_threads(1)
torch.manual_seed(os.getpid())
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with OuterLoop(model, diloco(4), membership=launched_membership()) as outer:
    while outer.position < 20_000:
        time.sleep(0.01)
        model(torch.randn(1, 4)).sum().backward()
        optimizer.step()
        outer.step()
"""


def shown(run, width, **more):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(screen(run, width, **more))
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


@pytest.fixture(autouse=True)
def utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def made(path, signs, **more):
    now = write_run(path, signs, **more)
    return ObservedRun(path, clock=lambda: now)


@pytest.mark.parametrize("width", [80, 120])
def test_the_page_shows_the_screens_that_there_are_and_the_one_that_others_wait_for_is_named(tmp_path, width):
    waits = {"call": "step", "at": "train.py:44", "since": T0 + 161}
    signs = [sign(1, 1216, 200, **waits), sign(2, 1216, 200, **waits), sign(4, 430, 160)]
    run = made(tmp_path / "2026-09-21T14-13-20-train", signs)
    text = shown(run, width)
    assert max(map(len, text.splitlines())) <= width
    shows = f"```text\n{text}```\n" in PAGE.read_text(encoding="utf-8")
    assert shows or width > 80, text
    said = f"; {figures(run).share('waiting'):.0%} of the time waiting"
    assert said in " ".join(text.split()), "as the report has it"
    said = "replica 2 on node1 has given no sign for 40 s; replica 0 and replica 1 wait in step at step 1,216"
    assert problems(run) == [said]


def test_a_replica_that_rounds_had_left_and_taken_in_again_is_named_when_it_is_lost_once_more(tmp_path):
    here, pid = socket.gethostname(), 2**31 - 1  # of no process
    signs = [sign(1, 1216, 200), sign(2, 430, 160, host=here, pid=pid)]
    run = made(tmp_path / "run", signs, rounds=0)
    left = a_round(1, 1, [1], 20, lost={"2": "it was late by more than 3 s"})
    back = [a_round(2, member, [1, 2], 30, joined=[2] if member == 1 else []) for member in (1, 2)]
    add_lines(run.path / "rounds.jsonl", back[1], left, back[0])  # in the order in which they were written
    run.look()
    assert problems(run) == [f"replica 1 on {here} is gone: process {pid} ended without a word"]
    add_lines(run.path / "rounds.jsonl", a_round(3, 1, [1], 40, lost={"2": "it was killed by SIGKILL"}))
    run.look()
    assert problems(run) == []


def test_the_recording_shows_the_run_that_was_kept_and_the_screens_that_there_are(tmp_path):
    script = runpy.run_path(str(PAGE.parent / "images" / "watch.py"))
    kept = json.loads(script["KEPT"].read_text(encoding="utf-8"))
    assert {"began", "lost", "joined"} <= {event["event"] for event in kept["events"]}
    script["draw"](tmp_path / "watch.svg")
    drawn, shown = (path.read_text(encoding="utf-8") for path in (tmp_path / "watch.svg", script["TARGET"]))
    texts = [re.sub(r"<style>.*?</style>|<[^>]*>|\s", "", picture, flags=re.DOTALL) for picture in (drawn, shown)]
    assert html.unescape(texts[0]) == html.unescape(texts[1]), "run `python docs/images/watch.py`"
    assert shown.count('<g class="frame"') == len(kept["looks"])
    assert "http" not in shown.replace("http://www.w3.org/2000/svg", "")


def test_the_one_that_is_elsewhere_is_named_with_its_line_and_shown_with_its_stack(tmp_path):
    waits = {"call": "all_reduce", "at": "train.py:44", "since": T0 + 161}
    stack = ["/home/me/train.py:12 in load", "/home/me/read.py:7 in wait"]
    signs = [sign(1, 1216, 200, **waits), sign(2, 1210, 200, at="train.py:12", since=T0 + 150, stack=stack)]
    run = made(tmp_path / "run", signs)
    said = "replica 1 on node1 has been in train.py:12 for 50 s; replica 0 waits in all_reduce at step 1,216"
    assert problems(run) == [said]
    assert "read.py:7 in wait" in shown(run, 80, chosen=1)
    assert "no stack was written" in shown(run, 80, chosen=0)


def test_all_is_well_where_ranks_move_on_and_where_a_run_has_ended_well(tmp_path):
    signs = [sign(1, 1216, 199), sign(2, 1216, 198.5)]
    run = made(tmp_path / "run", signs)
    assert (problems(run), run.state) == ([], "running")
    add_lines(run.path / "events.jsonl", {"time": T0 + 300, "event": "ended", "code": 0})
    run.look()
    assert (problems(run), run.state) == ([], "finished")


def test_a_run_whose_launcher_and_ranks_are_gone_is_dead(tmp_path):
    run = made(tmp_path / "run", [sign(1, 1216, 100), sign(2, 1216, 100)])
    assert run.state == "dead"
    assert "nobody gives a sign any more" in problems(run)[0]
    assert "dead" in shown(run, 80)


def test_a_loss_that_is_no_number_is_said_in_the_curve_the_figures_and_json(tmp_path):
    run = made(tmp_path / "run", [sign(1, 1216, 199)])
    logged = rows_of(run.path / "metrics.jsonl")
    for word, place in (("NaN", 90), ("Infinity", 120), ("-Infinity", 121)):
        rows = [row | {"values": {"loss": word if k >= place else 2.0}} for k, row in enumerate(logged)]
        write_lines(run.path / "metrics.jsonl", rows)
        again = ObservedRun(run.path)
        text = shown(again, 100)
        assert "!" in re.search("loss (.*) 2 to (nan|inf|-inf)", text)[1]
        assert f"loss is not finite in {180 - place} of 180 values, first at step {8 * place}" in text
        done = CliRunner().invoke(report, [str(run.path), "--json"])
        assert json.loads(done.output, parse_constant=pytest.fail)[0]["loss"] == word
        assert "loss is not finite in" in CliRunner().invoke(report, [str(run.path)]).output


def test_older_rounds_can_be_looked_at(tmp_path):
    run = made(tmp_path / "run", [sign(1, 1216, 200)], rounds=0)
    add_lines(run.path / "rounds.jsonl", *(a_round(k, 1, [1], k, dropped=k < 5) for k in range(200)))
    run.look()

    def cells(back):
        return set(re.search("(?m)^replica 0 ([■x]+)$", shown(run, 80, back=back))[1])

    assert cells(0) == cells(100) == {"■"}
    assert cells(199) == cells(500) == {"x"}


def test_a_run_is_found_by_its_name_and_the_newest_one_without(home):
    with pytest.raises(ConfigError, match=r"There is no run in .*farflung-runs"):
        named_run(None)
    for name in ("2026-01-01T00-00-00-a", "2026-01-02T00-00-00-b"):
        write_run(home / "farflung-runs" / name, [])
    assert named_run(None).name.endswith("-b")
    assert named_run("2026-01-01T00-00-00-a") == named_run(str(home / "farflung-runs" / "2026-01-01T00-00-00-a"))
    for empty in ("", " "):
        with pytest.raises(ConfigError, match="name of the run is empty"):
            named_run(empty)
    shutil.copytree(home / "farflung-runs" / "2026-01-01T00-00-00-a", home / "farflung-runs" / "latest")
    assert named_run(None).name.endswith("-b")
    with pytest.raises(ConfigError, match=r"nothing is no folder of a run: .* There are: 2026-01-01T00-00-00-a, 2026"):
        named_run("nothing")


def test_a_link_to_the_newest_run_that_can_not_be_renewed_is_removed(home, monkeypatch):
    for name in ("a", "b"):
        write_run(home / "farflung-runs" / name, [])
    latest = home / "farflung-runs" / "latest"
    latest.symlink_to("a")
    monkeypatch.setattr(Path, "symlink_to", lambda *_: os.stat("a file system without links"))
    folder._point(latest, "b")
    assert named_run(None).name == "b"


def test_into_a_pipe_it_is_printed_once_whatever_its_encoding_and_colours(home, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO(), "latin-1"))
    monkeypatch.setattr("farflung.observe.watch.follow", None)
    monkeypatch.setenv("FORCE_COLOR", "1")
    write_run(home / "run", [sign(1, 8, 190)])
    add_lines(home / "run" / "events.jsonl", {"time": T0 + 200, "event": "ended", "code": 0})
    assert call_farflung("watch", str(home / "run")) == 0
    assert rb"\u25a0" in written.getvalue()


def farflung(*words, **more):
    return pexpect.spawn(sys.executable, ["-m", "farflung", *words], encoding="utf-8", timeout=patience(60), **more)


def printed(*words):
    """What a command writes into a pipe, with single spaces."""
    return " ".join(pexpect.run(shlex.join([sys.executable, "-m", "farflung", *words]), encoding="utf-8").split())


def check_watched(width, one, fate):
    """Watch the newest run in a terminal while a replica is stopped and killed, and look at it in a pipe then.

    `one` is the replica's name, and `fate` what is said of it, both as patterns.
    """
    watch = farflung("watch", dimensions=(40, width), env=os.environ | {"COLUMNS": str(width)})
    watch.expect(rf"{one}\S* .*training")
    watch.expect("rounds: ")
    watch.expect("waiting")

    def pids():  # a record that is being written is found the next time
        return [each.row["pid"] for each in ObservedRun(named_run(None)).ranks if re.fullmatch(one, each.name)]

    pid = until(pids)[0]
    os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    watch.expect(rf"{one}\s+on\s+\S+\s+{fate}", timeout=patience(5))
    assert time.monotonic() - stopped < patience(5)
    os.kill(pid, signal.SIGCONT)
    os.kill(pid, signal.SIGKILL)
    watch.expect(rf"{one}\s+was\s+killed\s+by\s+SIGKILL")
    watch.send("pq")
    watch.expect(pexpect.EOF)
    assert watch.wait() == 0
    assert re.search(rf"{one} was killed by SIGKILL", printed("watch", "--once"))


@pytest.fixture
def at_home(home, monkeypatch):
    """Run things in a folder of their own, which has the script, in a terminal."""
    (home / "train.py").write_text(TRAINS)
    monkeypatch.delenv("FARFLUNG_RUN_DIR")
    for name, value in {"TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    return home


@pytest.mark.usefixtures("warm")
def test_a_terminal_names_a_replica_that_is_stopped_and_one_that_is_killed(at_home):
    launcher = farflung("launch", "--cpu", "--elastic", "1:2", "--replicas", "2", "--grace_s", "30", "train.py")
    try:
        launcher.expect("training begins|2 replicas train")
        check_watched(80, "replica 1", "is stopped")
    finally:
        launcher.sendintr()
        launcher.expect(pexpect.EOF)
        launcher.close(force=True)
        for one in psutil.process_iter(["cmdline", "cwd"]):  # replicas of a launcher that was too slow to end them
            if "train.py" in (one.info["cmdline"] or []) and one.info["cwd"] == str(at_home):
                one.kill()
    assert '"lost": 1' in printed("report", "--json")


@pytest.mark.namespace
@pytest.mark.timeout(240)
def test_two_machines_on_a_slow_line_are_watched_from_a_third_one(at_home, warm):
    """They share a file system, and write into one folder."""
    runs = at_home / "farflung-runs" / "shared"
    elastic = ["--elastic", "1:2", "--replicas", "1", "--grace_s", "30", "--meet", f"tcp://{ADDRESSES[0]}:29511"]
    line = ["farflung", "launch", "--cpu", *elastic, "--run-dir", str(runs), "train.py"]
    with two_machines(Machines(megabits=20)) as machines:
        machines.start(0, line, at_home)
        until(lambda: list(runs.glob("ranks/*")))
        machines.start(1, line, at_home)
        check_watched(100, r"replica \d of node1\S*", r"has\s+given\s+no\s+sign")
    assert '"lost": 1' in printed("report", "shared", "--json")
