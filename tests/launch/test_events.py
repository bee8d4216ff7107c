# SPDX-License-Identifier: Apache-2.0
"""What the launcher says: words or JSON, of which ranks the output is shown, and with which code it ends."""

from __future__ import annotations

import json
import time
from unittest.mock import Mock

import pytest

from farflung.base.causes import Cause
from farflung.base.errors import ConfigError, RankFailure, Unreachable
from farflung.base.events import Kind, record
from farflung.config import environ
from farflung.config.launch import LaunchSettings
from farflung.launch.agent import Outcome
from farflung.launch.codes import CODES, DONE, ENGINE, FAILED, HUNG, REQUEUE, USAGE, EngineFailure, of_error
from farflung.launch.events import Screen, showing, showing_ranks
from farflung.launch.folder import RunFolder
from farflung.launch.network import get_free_port
from farflung.launch.report import Failure
from tests.observe.made import add_lines
from tests.python import call_farflung


def test_quiet_leaves_errors_alone_also_in_json(capsys):
    for settings in (LaunchSettings(quiet=True), LaunchSettings(quiet=True, json=True)):
        with showing(Screen(settings)):
            record(Kind.NOTE, message="words")
            assert capsys.readouterr().err == ""
            record(Kind.FAILED, message="words")
            assert "words" in capsys.readouterr().err
    with showing(Screen(LaunchSettings())):
        record(Kind.STARTED, processes=1)
        record(Kind.ENDED, code=3)
    assert capsys.readouterr().err == ""


def test_quiet_leaves_out_the_file_of_settings(home, capsys):
    (home / "farflung.yaml").write_text("use_cpu: true\n")
    (home / "train.py").touch()
    note = "farflung: ACCELERATE_USE_CPU asks for the CPU, so --multi_gpu starts processes on the CPU.\n"
    environ.export({"ACCELERATE_USE_CPU": "true"})
    for flags, said in ([], "farflung: settings from farflung.yaml\n"), (["-q"], ""), (["-q", "--multi_gpu"], note):
        assert call_farflung("launch", *flags, "--dry_run", "train.py") == 0
        assert capsys.readouterr().err == said


ROW = ["--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "127.0.0.1", "--num_processes", "4"]
LOST = Failure(2, 1, traceback="T", reported_cause=Cause.PEER)


@pytest.mark.parametrize(
    ("outcome", "code", "words"),
    [
        (Outcome(), DONE, []),
        (Outcome((Failure(2, 7),)), FAILED, ["rank 2 failed on ", "(127.0.0.1): exit code 7", "logs: logs"]),
        (Outcome((Failure(2, 7),), signal=2), 130, ["rank 2 failed on "]),
        (Outcome((LOST,)), FAILED, ["The cause is on another machine; see the report there."]),
        (Outcome((LOST,), finished=(3,)), FAILED, ["rank 3 ended with exit code 0 while others still needed it"]),
        (Outcome(signal=15, is_preempted=True), REQUEUE, []),
        (Outcome((Failure(2, 1),), notes=frozenset({"preempted"})), REQUEUE, []),
        (KeyboardInterrupt(), 130, []),
    ],
)
def test_how_the_ranks_of_this_machine_have_ended_is_said_and_is_the_code(
    outcome, code, words, home, monkeypatch, capsys
):
    (home / "train.py").touch()
    monkeypatch.setattr("farflung.launch.agent.run_agent", Mock(side_effect=[outcome]))
    assert call_farflung("launch", "--cpu", *ROW, "--run-dir", "run", "--log_dir", "logs", "train.py", "x") == code
    said = capsys.readouterr().err
    assert [word for word in words if word not in said] == []
    assert ("╭" in said) == bool(words)
    events = [json.loads(line) for line in (home / "run" / "events.jsonl").read_text().splitlines()]
    (begun,) = [event for event in events if event["event"] == "started"]
    facts = [begun[name] for name in ("processes", "machines", "machine_rank", "ranks", "size")]
    assert (facts, begun["command"][-2:], events[-1]["code"]) == ([2, 2, 1, [2, 3], 4], ["train.py", "x"], code)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("num_processes is 0"), USAGE),
        (RankFailure("rank 1: ValueError"), FAILED),
        (RankFailure("rank 1 did not come", Cause.LATE), HUNG),
        (RankFailure("SIGSEGV", Cause.FAULT), FAILED),
        (RankFailure("rank 1 is lost", Cause.PEER), FAILED),
        (RankFailure("the others are done", Cause.RUN_ENDED), DONE),
        (RankFailure("SIGTERM", Cause.PREEMPTED), 75),
        (EngineFailure("sbatch gave no answer: it timed out"), ENGINE),
        (EngineFailure("The 2 machines could not meet at node0:29500", Cause.NOT_MET), HUNG),
        (Unreachable("nobody listens"), ENGINE),
    ],
)
def test_each_error_has_its_code(error, code):
    assert of_error(error) == code


def test_every_cause_has_a_code():
    assert set(CODES) == set(Cause)


PRINTS = """
import os, sys
print(f"rank {os.environ['RANK']} prints")
print(f"rank {os.environ['RANK']} complains", file=sys.stderr)
if os.environ["RANK"] in sys.argv[1:]:
    raise ValueError("bad value")
"""


@pytest.mark.usefixtures("warm")
def test_only_the_ranks_that_are_asked_for_are_shown_and_failures_of_all(farflung, home):
    (home / "train.py").write_text(PRINTS)
    done = farflung("launch", "--cpu", "--num_processes", "3", "--only-rank", "0,2", "train.py", code=DONE)
    for stream in (done.stdout, done.stderr):
        assert {line[5] for line in stream.splitlines()} == {"0", "2"}
    failed = farflung("launch", "--cpu", "--num_processes", "2", "--only-rank", "0", "train.py", "1", code=FAILED)
    assert "rank 1 failed" in failed.stderr
    assert "ValueError: bad value" in failed.stderr


@pytest.mark.usefixtures("warm")
def test_events_of_a_run_are_one_json_object_a_line(farflung, home):
    (home / "farflung.yaml").write_text("use_cpu: true\n")
    (home / "train.py").write_text("import sys; sys.exit(7 if '-f' in sys.argv else 0)")

    def events(*words: str, code: int) -> tuple[list[dict], list[str]]:
        said = farflung("launch", "--json", *words, code=code).stderr
        found = [json.loads(line) for line in said.splitlines()]  # a line that is no JSON fails
        first = found.pop(0)
        assert (first["event"], first["file"]) == ("settings", "farflung.yaml")
        assert all(isinstance(one["time"], float) for one in found)
        return found, [one["event"] for one in found]

    said, kinds = events("--num_processes", "2", "train.py", code=DONE)
    assert kinds == ["started", "ended"]
    assert (said[0]["ranks"], said[0]["size"], said[1]["code"]) == ([0, 1], 2, DONE)
    assert "message" not in said[0]
    said, kinds = events("--num_processes", "1", "--max_restarts", "1", "train.py", "-f", code=FAILED)
    assert kinds == ["started", "failed", "restarted", "failed", "ended"]
    assert [(said[k]["rank"], said[k]["how"]) for k in (1, 3)] == [(0, "exit code 7")] * 2
    assert said[4]["code"] == FAILED
    said, kinds = events("--elastic", "1:2", "train.py", "-f", code=FAILED)
    assert kinds == ["started", "failed", "failed", "ended"]
    assert (said[0]["replicas"], said[2]["replica"], said[3]["code"]) == (1, "replica 0", FAILED)


CHOOSES = """
import warnings, torch
from farflung import Accelerator
accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 1)
data = torch.utils.data.DataLoader(torch.randn(240, 2), batch_size=2)
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), data)
for rows in data:
    accelerator.backward(model(rows).mean())
    optimizer.step()
    if accelerator.is_main_process:
        warnings.warn("rows are odd")
accelerator.end_training()
"""


@pytest.mark.usefixtures("warm")
def test_events_of_ranks_are_there_too_with_their_facts(farflung, home):
    (home / "train.py").write_text(CHOOSES)
    words = ("--cpu", "--num_processes", "2", "--run_dir", "run", "--outer", "auto", "train.py")
    said = farflung("launch", "--json", *words, code=DONE).stderr.splitlines()
    found = {row["event"]: row for row in map(json.loads, (line for line in said if line.startswith("{")))}
    assert {"recipe", "options", "link", "step_s", "is_rate_constant"} <= found["chosen"].keys()
    assert (found["warning"]["category"], found["warning"]["rank"]) == ("UserWarning", 0)
    assert found["warning"]["message"] == "rows are odd"
    assert sum('"rows are odd"' in line for line in said if line.startswith("{")) == 1  # as Python shows it: once


def test_events_that_ranks_write_after_the_clock_was_set_back_are_shown(tmp_path, capsys):
    screen, folder = Screen(LaunchSettings(json=True)), RunFolder(tmp_path)
    at, said = time.time(), ""
    add_lines(tmp_path / "events.jsonl", {"time": at, "event": "warning", "rank": 0, "message": "of a run before"})
    with showing_ranks(screen, folder):
        row = {"time": at - 3600, "event": "warning", "rank": 0, "message": "of this one"}
        add_lines(tmp_path / "events.jsonl", row)
        while "of this one" not in said:
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert "of a run before" not in said


HANGS = """
import time, torch
from farflung import Accelerator
accelerator = Accelerator(cpu=True)
if accelerator.process_index == 1:
    time.sleep(300)
accelerator.gather(torch.ones(1))
"""


@pytest.mark.usefixtures("warm")
def test_a_run_that_hangs_ends_with_a_code_of_its_own(farflung, home):
    (home / "train.py").write_text(HANGS)
    done = farflung("launch", "--cpu", "--num_processes", "2", "--hang_timeout_s", "2", "train.py", code=HUNG)
    assert "rank 1" in done.stderr


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_machines_that_do_not_meet_in_time_end_with_the_code_of_a_time_out(flags, home, capsys):
    (home / "train.py").write_text("")
    row = ["--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "127.0.0.1", "--rdzv_conf", "timeout=1"]
    port = get_free_port()
    code = call_farflung("launch", "--cpu", *flags, *row, "--main_process_port", port, "train.py")
    said = capsys.readouterr().err
    assert code == HUNG, said
    assert f"The 2 machines could not meet at 127.0.0.1:{port}: " in said
    assert ". Check that each was started, with the same main_process_ip, main_process_port and num_machines," in said
    if not flags:
        assert f"farflung: machine 1 of 2 waits for the others at 127.0.0.1:{port}, over lo (127.0.0.1)\n" in said
    else:
        ours = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        assert [one["event"] for one in ours] == ["waits", "started", "failed", "ended"]
        assert ours[-1]["code"] == HUNG
