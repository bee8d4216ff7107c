# SPDX-License-Identifier: Apache-2.0
"""`farflung demo` from end to end on small settings, and what it says when something is missing."""

import dataclasses
import importlib.util
import json
import shlex
import subprocess
import sys

import pytest
from click.testing import CliRunner

from farflung.base.errors import ConfigError
from farflung.demo import command
from farflung.demo.settings import DemoSettings, Point, Result, load_results, save_results

FARFLUNG = [sys.executable, "-m", "farflung"]


def settings_for(folder, **changes):
    known = DemoSettings(steps=12, processes=2, size="tiny", data=None, output=str(folder), every=4, batch=4, seed=0)
    return dataclasses.replace(known, **changes)


def a_result(way="DDP", loss=2.0):
    return Result(way, [Point(4, 1000, 3.0), Point(12, 3000, loss)], 12_000, 2.0, 3000, 0.5)


@pytest.mark.timeout(120)
def test_the_demo_trains_three_ways_draws_and_writes(tmp_path):
    output = tmp_path / "made by the demo"
    knobs = ["--steps", "12", "--every", "4", "--size", "tiny", "--batch", "4", "--output", str(output)]
    ran = subprocess.run([*FARFLUNG, "demo", *knobs], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr

    ddp, local_sgd, diloco = load_results(settings_for(output))
    assert (ddp.way, local_sgd.way, diloco.way) == ("DDP", "Local SGD", "DiLoCo")
    assert all(way in ran.stdout for way in ("DDP", "Local SGD", "DiLoCo", "validation loss", "tokens/s"))
    # Three rounds instead of twelve exchanges, and the bucket that goes along with the question whether all are done; a
    # round's own small messages may add a little.
    for outer in (local_sgd, diloco):
        assert ddp.bytes_sent / 4 <= outer.bytes_sent < ddp.bytes_sent / 3 * 1.05
    assert [point.step for point in ddp.curve] == [4, 8, 12]
    for result in (ddp, local_sgd, diloco):
        assert result.loss < 5.6  # an untrained model has log(256) = 5.55
        assert result.curve[-1].bytes_sent == result.bytes_sent
        assert 0 <= result.waited_s < result.seconds

    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")
    last_line = ran.stdout.strip().splitlines()[-1]
    program, *arguments = shlex.split(last_line)
    assert program == "farflung"
    wrote = subprocess.run([*FARFLUNG, *arguments, "--length", "20"], capture_output=True, timeout=60)
    assert wrote.returncode == 0, wrote.stderr
    assert wrote.stdout.startswith(b"def main(")


def test_the_command_starts_without_torch():
    code = "import sys, farflung.demo.command; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.split() == ["False", "False"]


def test_a_failed_training_ends_the_demo_with_its_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "start", lambda settings, plan: 3)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a").write_text("word " * 2000)
    with pytest.raises(SystemExit) as ended:
        command.run(settings_for(tmp_path / "out", data=str(tmp_path / "text")))
    assert ended.value.code == 3
    assert json.loads((tmp_path / "out" / "settings.json").read_text())["steps"] == 12


def test_without_matplotlib_all_but_the_picture_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    command._conclude(settings_for(tmp_path), [a_result()])
    said = capsys.readouterr().out
    assert "pip install 'farflung[plot]'" in said
    assert "0.50 s (25.0%)" in said
    assert not (tmp_path / "curves.png").exists()


def test_the_best_model_is_named(tmp_path, capsys):
    command._conclude(
        settings_for(tmp_path), [a_result("DDP", 2.5), a_result("DiLoCo", 2.4), a_result("Local SGD", 2.6)]
    )
    assert "trained by DiLoCo" in capsys.readouterr().out


def test_an_output_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a").write_text("word " * 2000)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="can't be written to"):
        command.run(settings_for(tmp_path / "file" / "out", data=str(tmp_path / "text")))


def test_generating_without_a_model_says_what_to_do(tmp_path):
    ended = CliRunner().invoke(command.demo, ["--generate", "x", "--output", str(tmp_path)])
    assert isinstance(ended.exception, ConfigError)
    assert "Run `farflung demo` first" in str(ended.exception)


def test_results_survive_the_file(tmp_path):
    results = [a_result("DDP"), a_result("DiLoCo", 1.5)]
    save_results(settings_for(tmp_path), results)
    assert load_results(settings_for(tmp_path)) == results
