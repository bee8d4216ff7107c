# SPDX-License-Identifier: Apache-2.0
"""Clocks that are set, and machines whose clocks differ: neither tells a process from another, nor the dead."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from farflung.config.launch import LaunchSettings
from farflung.launch.codes import EngineFailure
from farflung.launch.engines.connections import ForegroundEngine
from farflung.launch.engines.engine import Job
from farflung.observe.attempts import is_gone
from farflung.observe.run import ObservedRun
from farflung.process import run_files
from farflung.process.identity import process_identity, process_state
from tests.observe.made import T0, add_lines, sign, write_run
from tests.waits import until


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as started:
        yield started
        started.kill()


@pytest.fixture(params=[-30, 30])
def set_clock(request, monkeypatch):
    """A clock that is set by half a minute after the process has started: what psutil reports moves with it."""
    true = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: true(self) + request.param)


def engine_of(tmp_path, **by):
    engine = ForegroundEngine()
    handle = {"host": socket.gethostname(), **by}
    engine._job = Job(LaunchSettings(hosts="a"), "train.py", (), tmp_path, handle)
    return engine


def test_a_launcher_is_cancelled_after_the_clock_was_set(process, tmp_path, set_clock):
    engine = engine_of(tmp_path, pid=process.pid, identity=process_identity(process.pid))
    assert "was asked to" in engine.cancel()
    assert process.wait() == -signal.SIGTERM


def test_a_process_with_the_number_of_a_launcher_that_has_ended_is_let_alone(process, tmp_path):
    identity = process_identity(os.getpid())
    assert "has ended before" in engine_of(tmp_path, pid=process.pid, identity=identity).cancel()
    assert process.poll() is None


def test_a_rank_of_this_machine_lives_after_the_clock_was_set(process, tmp_path, set_clock):
    begun = psutil.Process(process.pid).create_time() - 3600
    here = {"host": socket.gethostname(), "pid": process.pid, "begun": begun}
    write_run(tmp_path / "run", [sign(1, 8, 190, **here, identity=process_identity(process.pid))])
    assert [one.status for one in ObservedRun(tmp_path / "run").ranks] == ["running"]


def test_numbers_of_another_container_with_this_host_name_tell_nothing(process, tmp_path):
    elsewhere = {"host": socket.gethostname(), "container": "pid:[1]", "pid": process.pid, "identity": "boot:1"}
    at = write_run(tmp_path / "run", [sign(1, 8, 199, **elsewhere)])
    run = ObservedRun(tmp_path / "run", lambda: at)
    assert (run.state, [one.status for one in run.ranks]) == ("running", [""])
    assert not is_gone(elsewhere)
    with pytest.raises(EngineFailure, match="was started on"):
        engine_of(tmp_path, **elsewhere).cancel()


def test_a_process_that_is_gone_has_no_identity(process):
    identity = process_identity(process.pid)
    process.kill()
    process.wait()
    assert process_state(process.pid, identity) == "gone"
    with pytest.raises(ProcessLookupError):
        process_identity(process.pid)


@pytest.mark.parametrize(("ahead", "changes"), [(900.0, True), (-900.0, True), (-900.0, False)])
def test_a_rank_whose_sign_changes_lives_whatever_the_clocks_say_and_no_longer(tmp_path, ahead, changes):
    at = write_run(tmp_path / "run", [sign(1, 8, 190)]) + ahead
    run = ObservedRun(tmp_path / "run", lambda: at)
    assert run.lasted_s >= 0
    if changes:
        write_run(tmp_path / "later", [sign(1, 9, 191)])
        (tmp_path / "later" / "ranks" / "replica1.json").replace(tmp_path / "run" / "ranks" / "replica1.json")
        at += 1.0
        run.look()
        assert (run.state, run.ranks[0].silent_s, run.ranks[0].state) == ("running", 0.0, "training")
        assert 190 <= run.lasted_s <= 192
    at += 100.0
    run.look()
    assert (run.state, run.ranks[0].silent_s) == ("dead", 100.0)


def test_a_rank_that_began_again_from_a_checkpoint_has_no_negative_speed(tmp_path):
    at = write_run(tmp_path / "run", [sign(1, 8, 190)])
    add_lines(tmp_path / "run" / "steps.jsonl", {"time": T0 + 180, "member": 1, "rank": 0, "step": 900})
    assert ObservedRun(tmp_path / "run", lambda: at).ranks[0].rate == 0


def test_a_rank_whose_clock_is_set_back_still_writes_where_it_is(tmp_path, monkeypatch):
    beats = run_files.Heartbeat(tmp_path)
    record = tmp_path / "ranks" / "rank0.json"
    until(record.read_text)
    monkeypatch.setattr(time, "time", lambda: 5.0)
    until(lambda: json.loads(record.read_text())["time"] == 5.0)
    beats.close(0)
