# SPDX-License-Identifier: Apache-2.0
"""The interface of the engines: what a launcher that one starts is asked for, and what is kept of a submitted run."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.config.launch import LaunchSettings
from farflung.config.resolve import Resolved
from farflung.launch.codes import INTERRUPTED, EngineFailure
from farflung.launch.engines import submit
from farflung.launch.engines.engine import Job
from farflung.launch.engines.kubernetes import Kubernetes
from farflung.launch.engines.ray import Ray
from farflung.launch.engines.slurm import Slurm
from farflung.launch.engines.ssh import Ssh
from farflung.launch.events import Screen, showing
from farflung.launch.folder import RunFolder
from farflung.launch.plan import Script
from tests.python import call_farflung

EACH_COMMAND = pytest.mark.parametrize("words", [["follow"], ["cancel"], ["scale", "2"]])
PAGES = Path(__file__).parents[3] / "docs" / "engines"


def job(folder, **settings) -> Job:
    return Job(LaunchSettings(**settings), "train.py", ("--lr", "0.1"), folder)


def submitted(home, handle, **settings) -> Path:
    """Make the folder of a run that was submitted."""
    folder = home / "run"
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text("{}")
    Job(LaunchSettings(**settings), "train.py", ("1",), folder).write(handle)
    return folder


def test_a_launcher_that_an_engine_starts_has_the_same_settings_and_reads_no_file(home, capsys):
    (home / "farflung.yaml").write_text("engine: slurm\nuse_cpu: true\nhang_timeout_s: 3\n")
    (home / "train.py").touch()
    settings = {"engine": "ray", "num_processes": 2, "outer_recipe": "diloco", "outer_options": {"every": 8}}
    words = job(home / "run", **settings, use_cpu=True, quiet=True).command()
    script = ("train.py", "--lr", "0.1")
    assert words[-len(script) :] == script
    assert call_farflung(*words[: -len(script)], "--dry-run", *script) == 0
    shown = capsys.readouterr().out
    for line in (
        "engine: local",
        "num_processes: 2",
        "use_cpu: true",
        "outer_recipe: diloco",
        "outer_every: 8",
        "quiet: true",
    ):
        assert f"  {line} " in shown
    assert "hang_timeout_s" not in shown
    assert "train.py --lr 0.1" in shown


def test_options_of_an_engine_are_keys_and_values_that_may_hold_commas(tmp_path):
    given = job(tmp_path, engine="slurm", engine_options="partition=gpu,nodelist=n[1-2],n5,time=1:00:00")
    assert given.options == {"partition": "gpu", "nodelist": "n[1-2],n5", "time": "1:00:00"}


def test_what_was_submitted_is_read_back_from_the_runs_folder(tmp_path):
    given = job(tmp_path, engine="slurm", elastic="2:4", replicas=3, meet="file:///shared/run")
    handle = {"jobs": ["17"], "next": 3}
    given.write(handle)
    found = Job.read(tmp_path)
    assert (found.settings, found.arguments, found.handle) == (given.settings, given.arguments, handle)
    assert (found.count, found.is_elastic) == (3, True)


@pytest.mark.parametrize("engine", ["kubernetes", "ray", "slurm", "ssh"])
def test_every_option_of_an_engine_has_a_row_in_its_page(engine, home, capsys):
    (home / "train.py").touch()
    hosts = ["--hosts", "a,b"] if engine == "ssh" else []
    words = ["--engine", engine, *hosts, "--engine-options", "nothing=1", "--run-dir", "run", "train.py"]
    assert call_farflung("launch", *words) == 2
    known = re.search(rf"'nothing', which {engine} does not know; use one of ([\w, ]+)\.", capsys.readouterr().err)[1]
    page = (PAGES / f"{engine}.md").read_text(encoding="utf-8")
    rows = " ".join(re.findall(r"^\| (`[^|]+)", page, re.MULTILINE))
    assert set(known.split(", ")) == set(re.findall(r"`(\w+)[`=]", rows))


def test_a_key_in_the_environment_stays_here_and_only_replicas_need_it(tmp_path):
    with environ.patched({"FARFLUNG_KEY": "5eed" * 16}):
        job(tmp_path, engine="slurm").check_key("Name a file.")
        with pytest.raises(ConfigError, match=r"key is in FARFLUNG_KEY, which stays on this machine. Name a file."):
            job(tmp_path, engine="slurm", elastic="1:2").check_key("Name a file.")


@EACH_COMMAND
def test_a_run_that_no_engine_has_is_told_from_one(words, home, capsys):
    (home / "farflung-runs" / "mine").mkdir(parents=True)
    (home / "farflung-runs" / "mine" / "run.json").write_text("{}")
    assert call_farflung(words[0], "mine", *words[1:]) == 2
    assert "run that was started on this machine alone: no engine knows it" in capsys.readouterr().err


def test_a_run_of_fixed_size_is_not_scaled(home, capsys):
    for count, size, why in ((1, {"num_machines": 2}, "fixed number"), (9, {"elastic": "1:4"}, "elastic is 1:4")):
        submitted(home, {"jobs": ["1"], "next": 2}, engine="slurm", **size)
        assert call_farflung("scale", "run", count) == 2
        assert why in capsys.readouterr().err


def test_a_launcher_of_a_submitted_run_adds_to_its_folder_and_leaves_what_is_there(farflung, home):
    (home / "train.py").write_text("print('hello')")
    submitted(home, {}, engine="slurm")
    (home / "run" / "run.json").write_text('{"who": "submitted it"}')
    assert farflung("launch", "--cpu", "--run-dir", "run", "train.py").returncode == 0
    assert json.loads((home / "run" / "run.json").read_text()) == {"who": "submitted it"}
    assert "hello" in (home / "run" / "logs" / "rank0.log").read_text()


NO_JOBS = '{"settings": {"engine": "slurm"}, "script": "a", "arguments": [], "handle": {"jobs": 3}}'
DAMAGED = ["", "{", "[]", "3", "{}", '{"settings": {}}', NO_JOBS]


@EACH_COMMAND
@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_of_what_was_submitted_is_an_answer_in_words(text, words, home, capsys):
    (submitted(home, {}) / "engine.json").write_text(text)
    assert call_farflung(words[0], "run", *words[1:]) == 5
    assert "engine.json can't be read" in capsys.readouterr().err


@EACH_COMMAND
@pytest.mark.parametrize("engine", ["slurm", "kubernetes", "ray", "ssh"])
def test_a_run_whose_submission_was_refused_is_an_answer_in_words(engine, words, home, capsys):
    submitted(home, {}, engine=engine, hosts="a" if engine == "ssh" else None)
    assert call_farflung(words[0], "run", *words[1:]) == 5
    assert "was not submitted" in capsys.readouterr().err


def test_a_submission_that_is_refused_leaves_the_job_before_it_in_reach(tmp_path, monkeypatch):
    engine = Mock(outlives_launch=True, follow=lambda: 0)
    monkeypatch.setattr(submit, "_engine_of", lambda job: engine)
    engine.submit.side_effect = [{"jobs": ["12"], "next": 1}, EngineFailure("no"), {"jobs": ["13"], "next": 1}]
    for is_refused, number in (False, "12"), (True, "12"), (False, "13"):
        submitted = submit.Submitted(Resolved(LaunchSettings(engine="slurm"), {}, None), Script("train.py"))
        with pytest.raises(EngineFailure) if is_refused else nullcontext():
            submitted.follow(RunFolder(tmp_path))
        assert not submitted.goes_on
        assert Job.read(tmp_path).handle["jobs"] == [number]


def test_a_failure_before_a_job_is_submitted_is_told_from_ctrl_c_at_one_that_goes_on(tmp_path, monkeypatch, capsys):
    engine = Mock(outlives_launch=True, submit=lambda: {"jobs": ["12"], "next": 1})
    monkeypatch.setattr(submit, "_engine_of", lambda job: engine)
    run = submit.Submitted(Resolved(LaunchSettings(engine="slurm"), {}, None), Script("train.py"))
    with pytest.raises(ConfigError, match="Name one that can be written"):
        run.follow(RunFolder(None))
    engine.follow.side_effect = KeyboardInterrupt
    with showing(Screen(LaunchSettings())):
        assert (run.follow(RunFolder(tmp_path)), run.goes_on) == (INTERRUPTED, True)
    assert "still running: `farflung follow" in capsys.readouterr().err
    engine.outlives_launch = False
    with pytest.raises(KeyboardInterrupt):
        run.follow(RunFolder(tmp_path))
    engine.submit = Mock(side_effect=OSError(28, "No space left on device"))
    with pytest.raises(EngineFailure, match=r"Nothing was submitted to slurm: .*No space left"):
        run.follow(RunFolder(tmp_path))


@pytest.mark.parametrize(
    ("engine", "options", "goes_on"),
    [(Slurm, "", True), (Kubernetes, "image=x,claim=y", True), (Ray, "", False), (Ssh, "", False)],
)
def test_ctrl_c_ends_a_run_unless_a_cluster_holds_it(engine, options, goes_on, home, monkeypatch, capsys):
    (home / "train.py").touch()
    for name, does in {"check": None, "submit": {}, "follow": KeyboardInterrupt}.items():
        monkeypatch.setattr(engine, name, Mock(side_effect=does if isinstance(does, type) else None, return_value=does))
    named = engine.__name__.lower()
    words = ["--engine", named, *(["--hosts", "a"] if engine is Ssh else []), "--engine_options", options]
    assert call_farflung("launch", *words[: None if options else -2], "--run-dir", "run", "train.py") == INTERRUPTED
    assert ("still running: `farflung follow run`" in capsys.readouterr().err) == goes_on


def test_a_job_of_another_release_is_found_whatever_became_of_its_settings(tmp_path):
    given = job(tmp_path, engine="slurm", engine_options="partition=gpu")
    given.write({"jobs": ["12"], "next": 1})
    rows = json.loads((tmp_path / "engine.json").read_text())
    for change in ({"a_setting_that_went": 3}, {"outer_recipe": "a recipe that went"}, {"engine_options": "gone=1"}):
        (tmp_path / "engine.json").write_text(json.dumps(rows | {"settings": rows["settings"] | change}))
        found = Job.read(tmp_path)
        assert (found.settings.engine, found.handle["jobs"]) == ("slurm", ["12"])
        found.check_options({})
