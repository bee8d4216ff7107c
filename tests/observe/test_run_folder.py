# SPDX-License-Identifier: Apache-2.0
"""The folder of a launched run: what is in it, that it is whole after any end, and what happens where it can't be."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from unittest.mock import Mock

import pytest

from farflung.base.events import Event, Kind, record
from farflung.config.launch import LaunchSettings
from farflung.config.resolve import resolve
from farflung.launch import folder
from farflung.observe.folder import named_run
from farflung.observe.run import ObservedRun
from farflung.process import run_files
from farflung.process.identity import process_identity
from tests.observe.made import rows_of
from tests.waits import until

TRAINS = """
import os, sys, time, torch
from farflung import Accelerator
accelerator = Accelerator()
torch.manual_seed(accelerator.process_index)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(int(sys.argv[1])):
    loss = model(torch.randn(2, 4)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss.detach(), "lr": 0.01, "note": "a"}, step=step)
    print(f"rank {accelerator.process_index} at {step}")
    if step == 3:
        accelerator.save_state("checkpoint")
    if step > 100:
        time.sleep(0.05)
if sys.argv[2:]:
    raise ValueError(sys.argv[2])
"""
BARE = """
import torch
from torch.distributed import destroy_process_group, init_process_group
from farflung.outer import OuterLoop, diloco, local_sgd
init_process_group("gloo")
for recipe in (diloco(4), local_sgd(3)):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with OuterLoop(model, recipe) as outer:
        outer.attach(optimizer)
        for step in range(8):
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
destroy_process_group()
"""
LOW = """
import os, subprocess, sys
print("by Python")
sys.stdout.flush()
os.write(1, f"by a library of rank {os.environ['RANK']}\\n".encode())
subprocess.run([sys.executable, "-c", "import os; os.write(2, b'by a child\\\\n')"])
"""


@pytest.fixture
def launched(farflung, home, monkeypatch, warm):
    """Run a script with a folder; return what the launcher said, and the run."""
    monkeypatch.delenv("FARFLUNG_RUN_DIR")

    def launch(script, *words, flags=(), code=0):
        (home / "train.py").write_text(script)
        done = farflung("launch", "--cpu", *flags, "train.py", *words, code=code)
        return done, ObservedRun(named_run(None))

    return launch


def test_two_ranks_leave_settings_logs_rounds_metrics_and_events(launched):
    _, run = launched(TRAINS, "12", flags=("--num_processes", "2", "--outer", "diloco", "--outer-every", "4"))
    facts = run.facts
    assert facts["settings"]["num_processes"] == {"value": "2", "from": "flag --num_processes"}
    assert facts["settings"]["outer_every"]["value"] == "4"
    for rank in (0, 1):
        log = (run.path / "logs" / f"rank{rank}.log").read_text().splitlines()
        said = [line[9:] for line in log if "at " in line and "RANK" not in line]
        assert said == [f"rank {rank} at {step}" for step in range(12)]
    assert [(row.step, row.members) for row in run.rounds] == [(4, (0, 1)), (8, (0, 1)), (12, (0, 1))]
    assert all(run.begun <= row.time <= time.time() for row in run.rounds)
    metrics = rows_of(run.path / "metrics.jsonl")
    assert [row["step"] for row in metrics if "loss at rounds" in row["values"]] == [4, 8, 12]
    logged = [row for row in metrics if "loss at rounds" not in row["values"]]
    assert [row["step"] for row in logged] == list(range(12))
    assert all(row["values"].keys() == {"loss", "lr", "note"} for row in logged)
    assert all(isinstance(row["values"]["loss"], float) for row in logged)
    assert [event.kind for event in run.events] == ["started", "model", "checkpoint", "saving", "ended"]
    assert (run.events[1].facts["parameters"], run.events[1].facts["strategy"]) == (5, "MULTI_CPU")
    assert [(one.name, one.step, one.ended) for one in run.ranks] == [("rank 0", 12, 0), ("rank 1", 12, 0)]
    assert run.state == "finished"


def test_rounds_of_bare_loops_between_fixed_ranks_are_there_once_and_shown(launched, farflung):
    _, run = launched(BARE, flags=("--num_processes", "2"))
    rounds = [(row.model, row.number, row.step) for row in run.rounds]
    assert rounds == [(0, 1, 4), (0, 2, 8), (1, 1, 3), (1, 2, 6), (1, 3, 8)]
    assert {row.members for row in run.rounds} == {(0, 1)}
    assert "5 rounds" in farflung("watch", "--once").stdout


def test_with_tee_the_folder_has_what_is_not_printed_by_python_too(launched):
    done, run = launched(LOW, flags=("--num_processes", "2", "--tee", "3"))
    logs = run.path / "logs"
    for rank in (0, 1):
        assert (logs / f"rank{rank}.log").read_text().splitlines()[0][9:] == "by Python"
        (out,) = logs.glob(f"*/attempt_0/{rank}/stdout.log")
        assert out.read_text() == f"by Python\nby a library of rank {rank}\n"
        assert out.with_name("stderr.log").read_text() == "by a child\n"
        assert f"[default{rank}]:by a library of rank {rank}" in done.stdout


def test_a_rank_alone_says_itself_how_it_ends(launched):
    done, run = launched(TRAINS, "5", "a bad value", code=1)
    assert "ValueError: a bad value" in done.stderr
    assert "farflung/launch" not in done.stderr
    assert [event.facts["why"] for event in run.events if event.kind == "failed"] == ["ValueError: a bad value"]
    assert (run.state, run.ranks[0].step) == ("failed (1)", 5)
    assert "ValueError: a bad value" in (run.path / "logs" / "rank0.log").read_text()


def test_what_is_there_is_whole_after_a_kill(home, monkeypatch, warm):
    (home / "train.py").write_text(TRAINS)
    monkeypatch.delenv("FARFLUNG_RUN_DIR")
    launcher = subprocess.Popen([sys.executable, "-m", "farflung", "launch", "--cpu", "train.py", "1000"])
    until((home / "farflung-runs" / "latest").exists)
    run = ObservedRun(named_run(None))
    until(lambda: run.look() or (run.ranks and run.ranks[0].step >= 110 and run.curves.loss is not None))
    os.kill(run.ranks[0].row["pid"], signal.SIGKILL)
    launcher.wait()
    run.look()
    written = {file.name: rows_of(file) for file in run.path.glob("*.jsonl")}
    assert [row["step"] for row in written["metrics.jsonl"]] == [*range(len(written["metrics.jsonl"]))]
    assert run.state == "dead"


def test_where_no_folder_can_be_none_is_made_and_a_line_says_so(farflung, home, monkeypatch, warm):
    (home / "train.py").write_text("print('trained')")
    done = farflung("launch", "--cpu", "--run-dir", "none", "train.py")
    assert (done.stdout, sorted(one.name for one in home.iterdir())) == ("trained\n", ["train.py"])
    (home / "farflung-runs").write_text("")
    monkeypatch.delenv("FARFLUNG_RUN_DIR")
    done = farflung("launch", "--cpu", "train.py")
    assert done.stdout == "trained\n"
    assert "farflung-runs can't be written: File exists, so there is none; --run-dir names another" in done.stderr
    done = farflung("launch", "--cpu", "--run-dir", "farflung-runs", "train.py", code=2)
    assert done.stdout == ""
    assert "run_dir is 'farflung-runs', but the run's folder" in done.stderr


def test_the_facts_of_a_run_say_what_was_started_where_and_from_which_commit(home, monkeypatch):
    def begun(world):
        made = folder.make_folder(resolve({}), "code/train.py", ["--lr"], world)
        made.show(Event.now(Kind.STARTED, **world))
        return made.path, json.loads((made.path / "run.json").read_text()), rows_of(made.path / "events.jsonl")[0]

    monkeypatch.delenv("FARFLUNG_RUN_DIR")
    monkeypatch.setattr(time, "strftime", lambda form: "now")
    (home / "code").mkdir()
    path, facts, event = begun({"processes": 2})
    assert path == home / "farflung-runs" / "now-train"
    process = {"host": socket.gethostname(), "pid": os.getpid(), "identity": process_identity(os.getpid())}
    expected = {"script": "code/train.py", "arguments": ["--lr"], "command": sys.argv, "folder": str(home), "git": None}
    expected |= {"world": {"processes": 2}, "system": platform.platform(), **process}
    assert facts.items() >= expected.items()
    packages = {name: version(name) for name in ("farflung", "torch")}
    assert facts["versions"] == {"python": platform.python_version(), **packages}
    assert event.items() >= (process | {"attempt": 1}).items()
    (home / "code" / "train.py").touch()
    for words in ("init", "-q"), ("add", "."), ("commit", "-qm", "a"):
        subprocess.run(["git", "-C", "code", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)
    path, facts, _ = begun({"engine": "slurm"})
    assert (path.name, os.readlink("farflung-runs/latest")) == ("now-train-2", "now-train-2")
    assert re.fullmatch("[0-9a-f]{12}", facts["git"])
    (home / "code" / "train.py").write_text("changed")
    assert begun({})[1]["git"] == facts["git"] + "+"


def test_what_tee_writes_is_in_the_folder_of_the_run_unless_another_is_named(tmp_path):
    def place(path=tmp_path, **settings):
        return folder.RunFolder(path).with_logs(LaunchSettings(**settings)).log_dir

    assert place(tee="3") == str(tmp_path / "logs")
    assert (place(tee="3", log_dir="a"), place(), place(None, tee="3")) == ("a", None, None)


def test_numbers_that_json_has_no_word_for_and_bars_do_not_spoil_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FARFLUNG_RUN_FOLDER", str(tmp_path))
    run_files.keep_events()
    record(Kind.NOTE, value=float("nan"), values=[float("inf"), 1])
    row = json.loads((tmp_path / "events.jsonl").read_text())
    assert (row["value"], row["values"], row["rank"]) == ("NaN", ["Infinity", 1], 0)
    with run_files.recorded():
        print("one\ntwo", end="")
        print("\r 10%", end="")
        print(" and a half\n")
        print("", file=sys.stderr)
    lines = [line[9:] for line in (tmp_path / "logs" / "rank0.log").read_text().split("\n")]
    assert lines == ["one", "two and a half", "", "", ""]
    assert "10%" in capsys.readouterr().out


def test_the_log_of_a_replica_has_the_name_by_which_its_launcher_calls_it_and_goes_on_when_it_starts_again(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("FARFLUNG_RUN_FOLDER", str(tmp_path))
    monkeypatch.setenv("FARFLUNG_STORE", "node0:29500")
    monkeypatch.setenv("FARFLUNG_REPLICA", "replica 0 of node0:4501")
    for rank, member in (0, 1795998728741), (0, 1795998728749), (1, 1795998728749):
        monkeypatch.setenv("FARFLUNG_MEMBER", str(member))
        monkeypatch.setenv("RANK", str(rank))
        with run_files.recorded():
            print("begins")
    found = {file.name: file.read_text().count("begins") for file in (tmp_path / "logs").iterdir()}
    assert found == {"replica-0-of-node0-4501.log": 2, "replica-0-of-node0-4501.rank1.log": 1}


def test_a_disk_that_fills_up_does_not_end_a_run_that_went_well(tmp_path, monkeypatch):
    monkeypatch.setenv("FARFLUNG_RUN_FOLDER", str(tmp_path))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").symlink_to("/dev/full")
    with run_files.recorded():
        monkeypatch.setattr(os, "write", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        print("to a full disk")
        run_files.add_lines(tmp_path / "events.jsonl", [{"event": "x"}])
    (tmp_path / "rounds.jsonl").symlink_to("/dev/full")
    run_files.add_lines(tmp_path / "rounds.jsonl", [{"number": 1}])


def test_the_last_sign_of_a_rank_is_whole_however_long_its_error_is(tmp_path, monkeypatch):
    monkeypatch.setenv("FARFLUNG_RUN_FOLDER", str(tmp_path))
    with pytest.raises(ValueError, match="äö"), run_files.recorded():
        raise ValueError("äö\n" * 5000)
    row = json.loads((tmp_path / "ranks" / "rank0.json").read_text())
    assert row["ended"] == 1
    assert row["why"].startswith("ValueError: äö")
