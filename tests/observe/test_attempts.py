# SPDX-License-Identifier: Apache-2.0
"""Several attempts of a run in one folder, and several launchers of one attempt: each end is that of its beginning."""

import json
import time

import pytest
from click.testing import CliRunner

from farflung.base.events import Event, Kind
from farflung.base.signals import REQUEUE
from farflung.config.resolve import resolve
from farflung.launch.folder import make_folder
from farflung.observe.problems import problems
from farflung.observe.report import report
from farflung.observe.run import ObservedRun
from farflung.observe.watch import watch
from farflung.process import run_files
from tests.observe.made import a_round, write_lines

ONE = {"processes": 2, "machines": 1, "machine_rank": 0}
SERVES = {"replicas": 1, "address": "10.0.0.1:29500", "join": "more join with `...`"}
JOINS = SERVES | {"join": ""}
ELSEWHERE = SERVES | {"address": "10.0.0.1:29501"}
SUBMITS = {"engine": "slurm", "machines": 2}


def machine(rank, machines=2):
    return {"processes": 1, "machines": machines, "machine_rank": rank}


def begun(path, world):
    """A launcher that has started, in this process."""
    folder = make_folder(resolve({"run_dir": str(path)}), "train.py", (), world)
    folder.show(Event.now(Kind.STARTED, **world))
    return folder


def ends(folder, code):
    folder.show(Event.now(Kind.ENDED, code=code))


@pytest.fixture
def as_rank(monkeypatch):
    """Have this process write as a rank of a launcher's."""

    def become(folder, rank=0, restart=0):
        place = {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(restart)}
        for name, value in (folder.variables | place).items():
            monkeypatch.setenv(name, value)
        return run_files.who()

    return become


def write_sign(path, who, step, **more):
    """The latest sign of a rank that is no process of this machine."""
    now = time.time()
    row = {"time": now, **who, "host": "node1", "pid": 7, "begun": now - 10, "step": step, "since": now, **more}
    (path / "ranks").mkdir(exist_ok=True)
    (path / "ranks" / f"{run_files.name_of(who)}.json").write_text(json.dumps(row))


def log(path, who, *steps):
    now = time.time()
    rows = [{"time": now, **who, "step": step, "values": {"loss": float(step)}} for step in steps]
    run_files.add_lines(path / "metrics.jsonl", rows)


def drawn(run):
    return [point.step for point in run.curves.loss.points]


def told(command, *words):
    return CliRunner().invoke(command, [*map(str, words)], catch_exceptions=False).output


def test_an_attempt_that_trains_is_not_told_by_the_end_of_the_one_before(tmp_path, as_rank):
    first = begun(tmp_path, ONE)
    for rank in range(4):
        write_sign(tmp_path, as_rank(first, rank), 10, ended=REQUEUE)
    log(tmp_path, as_rank(first), *range(10))
    write_lines(tmp_path / "rounds.jsonl", [a_round(1, None, [0, 1], 0) | as_rank(first) | {"member": None}])
    ends(first, REQUEUE)
    run = ObservedRun(tmp_path)
    assert (run.state, len(run.ranks), drawn(run)) == ("saved at a signal", 4, [*range(10)])
    assert len(run.voted) == 1

    second = begun(tmp_path, ONE)
    run.look()
    for now in (run, ObservedRun(tmp_path)):
        assert (now.state, now.code, now.code_so_far, now.ranks, now.voted) == ("running", None, None, [], [])
    write_sign(tmp_path, as_rank(second), 3)
    log(tmp_path, as_rank(second), 6, 7, 8)  # from the checkpoint at step 5
    run.look()
    for now in (run, ObservedRun(tmp_path)):
        assert ([one.name for one in now.ranks], drawn(now)) == (["rank 0"], [0, 1, 2, 3, 4, 5, 6, 7, 8])
        assert now.ranks[0].rate > 0
    (figures,) = json.loads(told(report, tmp_path, "--json"))
    assert (figures["state"], figures["attempt"], figures["steps"]) == ("running", 2, 3)
    assert "attempt 2 in this folder" in " ".join(told(watch, tmp_path, "--once").split())
    ends(second, 1)
    assert ObservedRun(tmp_path).state == "failed (1)"


@pytest.mark.parametrize(
    ("starts", "numbers"),
    [
        ([ONE, ONE], [1, 2]),  # the first one was killed without a word
        ([ONE, 0, ONE], [1, 2]),
        ([machine(0), machine(1)], [1, 1]),
        ([machine(1), machine(0), 1, machine(0), machine(1)], [1, 1, 2, 2]),  # one has failed, and both start again
        ([machine(0), machine(1), machine(1), machine(0)], [1, 1, 2, 2]),
        ([SERVES, JOINS, 0, JOINS], [1, 1, 1]),
        ([SERVES, 0, SERVES], [1, 2]),
        ([SERVES, ELSEWHERE], [1, 2]),
        ([SUBMITS, machine(0), machine(1)], [1, 1, 1]),
        ([SUBMITS, machine(0), 1, machine(0)], [1, 1, 2]),  # a job that was requeued
        ([SUBMITS, SUBMITS, machine(0)], [1, 2, 2]),
    ],
)
def test_launchers_know_which_attempt_they_belong_to(tmp_path, starts, numbers):
    """A number in place of a world is the exit code of the latest launcher."""
    folders = []
    for start in starts:
        if isinstance(start, int):
            ends(folders[-1], start)
        else:
            folders.append(begun(tmp_path, start))
    assert [int(folder.variables["FARFLUNG_RUN_ATTEMPT"]) for folder in folders] == numbers
    assert ObservedRun(tmp_path).attempts.latest.number == numbers[-1]


@pytest.mark.parametrize(
    ("worlds", "codes", "state"),
    [
        ([SERVES, JOINS], [0, 1], "finished"),  # one replica that has finished is a run that has
        ([SERVES, JOINS], [1, 1], "failed (1)"),
        ([machine(0), machine(1)], [0, 0], "finished"),
        ([machine(0), machine(1)], [0, 3], "failed (3)"),
    ],
)
def test_the_end_of_a_launcher_is_that_of_no_other(tmp_path, worlds, codes, state):
    folders = [begun(tmp_path, world) for world in worlds]
    for folder, code in zip(folders, codes, strict=True):
        assert ObservedRun(tmp_path).state == "running"
        ends(folder, code)
    assert ObservedRun(tmp_path).state == state


def test_what_a_submitter_has_seen_is_the_end_of_all(tmp_path):
    submitter = begun(tmp_path, SUBMITS)
    first, _ = begun(tmp_path, machine(0)), begun(tmp_path, machine(1))
    ends(first, 0)
    run = ObservedRun(tmp_path)
    assert (run.state, run.code_so_far) == ("running", 0)
    ends(submitter, 5)
    run.look()
    assert run.state == "failed (5)"


def test_a_rank_that_took_its_launchers_place_tells_the_end(tmp_path, as_rank):
    ends(begun(tmp_path, ONE), 1)
    alone = as_rank(begun(tmp_path, machine(0, 1)))
    beats = run_files.Heartbeat(tmp_path)
    assert ObservedRun(tmp_path).state == "running"
    beats.close(0)
    run = ObservedRun(tmp_path)
    assert (run.state, run.ranks[0].row["attempt"]) == ("finished", alone["attempt"])


def test_a_program_in_the_place_of_its_launcher_is_not_called_dead(tmp_path, as_rank, farflung, monkeypatch):
    monkeypatch.delenv("FARFLUNG_RUN_DIR")
    assert farflung("launch", "--cpu", "--no_python", "true").returncode == 0
    run = ObservedRun(tmp_path / "farflung-runs" / "latest")
    assert (run.state, run.code, problems(run), [one.state for one in run.ranks]) == ("unknown", None, [], ["ended"])
    as_rank(begun(tmp_path, machine(0, 1)))
    beats = run_files.Heartbeat(tmp_path)
    beats.stop()
    run = ObservedRun(tmp_path, lambda: time.time() + 100)
    assert (run.state, problems(run), [one.state for one in run.ranks]) == ("running", [], ["a program"])
    beats.close(126, "it can't be started")
    assert ObservedRun(tmp_path).state == "failed (126)"


def test_ranks_that_a_launcher_starts_again_draw_no_step_twice(tmp_path, as_rank):
    folder = begun(tmp_path, ONE)
    old, new = as_rank(folder), as_rank(folder, restart=1)
    log(tmp_path, old, *range(10))
    now = time.time()
    run_files.add_lines(tmp_path / "steps.jsonl", [{"time": now - 60 + k, **old, "step": 9000 + k} for k in range(9)])
    rounds = [a_round(k, None, [0, 1], k) | old | {"time": now - 60 + k} for k in range(1, 4)]
    write_lines(tmp_path / "rounds.jsonl", [row | {"member": None} for row in rounds])
    write_sign(tmp_path, new, 2)
    log(tmp_path, new, 4, 5)
    run = ObservedRun(tmp_path)
    assert (drawn(run), run.ranks[0].rate, len(run.voted)) == ([0, 1, 2, 3, 4, 5], pytest.approx(0.2), 3)
    run_files.add_lines(tmp_path / "rounds.jsonl", [rounds[0] | new | {"member": None, "number": 2, "bytes_sent": 7}])
    run.look()
    assert [(one.number, one.bytes_sent) for one in run.voted] == [(2, 7)]
