# SPDX-License-Identifier: Apache-2.0
"""`farflung demo` from end to end on small settings, and what it says when something is missing."""

import importlib.util
import io
import json
import subprocess

import pytest
from rich.console import Console

from farflung.demo import compare
from farflung.demo.report import COLOURS, MARKERS, later, shown, table_of, verdicts
from farflung.demo.settings import ALONE, DemoSettings, Point, Result, load_results, save_results
from farflung.testing.patience import patience
from tests.python import run_farflung, run_python

WAYS = ("DDP", "Local SGD", "DiLoCo", "Streaming DiLoCo", "auto", "A replica alone")


def settings_for(folder, data=None):
    numbers = {"steps": 12, "processes": 2, "every": 4, "batch": 4, "seed": 0, "bandwidth_bps": 20e6}
    return DemoSettings(size="tiny", data=data, output=str(folder), **numbers)


def text_in(folder):
    (folder / "text").mkdir()
    (folder / "text" / "a").write_text("word " * 2000)
    return str(folder / "text")


def a_result(way="DDP", loss=2.0, *, bytes_sent=3000, line_seconds=9.0):
    curve = [Point(4, bytes_sent // 3, 3.0), Point(12, bytes_sent, loss)]
    return Result(way, curve, seconds=2.0, bytes_sent=bytes_sent, line_seconds=line_seconds)


@pytest.mark.usefixtures("warm")
def test_the_demo_trains_six_ways_draws_judges_and_writes(tmp_path):
    output = tmp_path / "made by the demo"
    knobs = ["--steps", "12", "--every", "4", "--size", "tiny", "--batch", "4", "--output", output.name]
    ran = run_farflung("demo", *knobs, timeout_s=100, cwd=tmp_path)

    ddp, local_sgd, diloco, streaming, auto, alone = results = load_results(settings_for(output))
    assert tuple(result.way for result in results) == WAYS
    assert all(word in ran.stdout for word in (*WAYS, "loss", "bytes sent", "time on 20 Mbit/s", "computed, not"))
    # Three rounds instead of twelve exchanges, and the bucket that goes along with the question whether all are done; a
    # round's own small messages may add a little.
    for outer in (local_sgd, diloco):
        assert ddp.bytes_sent / 4 <= outer.bytes_sent < ddp.bytes_sent / 3 * 1.05
    assert streaming.bytes_sent < diloco.bytes_sent / 6  # four bits instead of 32
    assert ddp.line_seconds > local_sgd.line_seconds > streaming.line_seconds
    assert alone.bytes_sent == 0
    assert "--outer diloco --outer-every 1 " in auto.note  # a short run
    assert ddp.bytes_sent > auto.bytes_sent > streaming.bytes_sent
    for result in results:
        assert result is auto or [point.step for point in result.curve] == [4, 8, 12]
        assert result.loss < 5.6  # an untrained model has log(256) = 5.55
        assert result.curve[-1].bytes_sent == result.bytes_sent
        assert result.line_seconds > 0

    verdict = ran.stdout[ran.stdout.index("Compared with DDP at equal loss, on a line of 20 Mbit/s:") :].splitlines()
    assert [line.split("  ")[1] for line in verdict[1:6]] == list(WAYS[1:])
    assert verdict[7] == f"auto: {auto.note}"
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert all(f'"name": "{way}"' in (output / "report.html").read_text() for way in ("DDP", "Streaming DiLoCo"))
    pasted = ran.stdout.strip().splitlines()[-1] + " --length 20"
    wrote = subprocess.run(pasted, shell=True, cwd=tmp_path, capture_output=True, timeout=patience(60))
    assert wrote.returncode == 0, wrote.stderr
    assert wrote.stdout.startswith(b"def main(")


def a_curve(way, *points, line_seconds):
    curve = [Point(step, step * 1_000, loss) for step, loss in points]
    return Result(way, curve, seconds=2.0, bytes_sent=curve[-1].bytes_sent, line_seconds=line_seconds)


def test_the_verdict_compares_at_equal_loss_and_says_where_a_way_loses():
    base = a_curve("DDP", (1, 4.0), (4, 3.0), (16, 2.0), line_seconds=160.0)
    near = a_curve("near", (1, 4.0), (16, 2.5), line_seconds=8.0)
    far = a_curve("far", (1, 4.0), (16, 2.0), line_seconds=400.0)
    better = a_curve("better", (4, 3.0), (16, 1.0), line_seconds=16.0)
    better.note = "it keeps most."
    assert "; it keeps most." in shown(better, "5 Mbit/s")["summary"]
    assert verdicts([base, near, far, better], "5 Mbit/s") == [
        "Compared with DDP at equal loss, on a line of 5 Mbit/s:",
        # DDP is half-way between 3 and 2 after 8 steps, as a curve is straight over the logarithm of the step.
        "  near    reaches 2.500 in 8 s with 16 kB; DDP needs 80 s and 8 kB, 10 times as long",
        "  far     reaches 2.000 in 400 s with 16 kB; DDP needs 160 s and 16 kB, 2.5 times less",
        "  better  reaches 2.000 in 8 s with 8 kB; then continues to 1.000; DDP needs 160 s and 16 kB, "
        "20 times as long",
        "DDP ends at 2.000, after 160 s.",
        "better: it keeps most.",
    ]


def test_a_picture_begins_where_the_curves_differ():
    best = a_curve("best", (1, 4.0), (4, 3.0), (8, 2.6), (16, 2.0), line_seconds=16.0)
    worst = a_curve("worst", (1, 4.0), (4, 3.1), (16, 2.2), line_seconds=16.0)
    first, second = later([best, worst])
    assert [point.loss for point in first.curve] == [2.6, 2.0]
    assert [point.loss for point in second.curve] == [2.2]
    assert first.curve_seconds == [8.0, 16.0]


def test_a_loss_is_reached_at_the_first_point_that_is_as_low():
    one = a_curve("one", (4, 3.0), (8, 3.5), (16, 2.0), line_seconds=16.0)
    assert [one.reaches(loss) for loss in (9.0, 3.0, 2.0)] == [(4_000, 4.0), (4_000, 4.0), (16_000, 16.0)]


def printed(results, rate="20 Mbit/s"):
    console = Console(width=80, file=io.StringIO())
    console.print(table_of(results, rate))
    return console.file.getvalue()


def test_the_table_fits_into_80_columns():
    shown = printed([a_result(way, bytes_sent=123_456_789, line_seconds=1234.5) for way in WAYS], "123 Mbit/s")
    for way in WAYS:
        row = next(line for line in shown.splitlines() if way in line)
        assert "123 MB" in row
        assert "1,234 s" in row
    # The picture tells all ways apart.
    assert len(set(MARKERS)) == len(set(COLOURS)) == len(MARKERS) == len(COLOURS) == len(WAYS)


def test_the_table_has_the_share_of_the_gain_that_is_kept():
    lines = printed([a_result("DDP", 2.0), a_result("DiLoCo", 2.1), a_result(ALONE, 3.0)]).splitlines()
    shown = {line.split("  ")[0].strip(): line for line in lines}
    for way, share in (("DDP", "100 %"), ("DiLoCo", "90 %"), (ALONE, "0 %")):
        assert f" {share} " in shown[way]
    assert " %" not in printed([a_result("DDP", 2.0), a_result(ALONE, 1.9)])


def test_the_command_starts_without_torch():
    code = "import sys, farflung.demo.compare; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    assert run_python("-c", code).stdout == "False False\n"


def test_a_failed_training_ends_the_demo_with_its_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "start", lambda settings, plan: 3)
    with pytest.raises(SystemExit) as ended:
        compare.run(settings_for(tmp_path / "out", data=text_in(tmp_path)))
    assert ended.value.code == 3
    assert json.loads((tmp_path / "out" / "settings.json").read_text())["steps"] == 12


def concluded(folder, monkeypatch, *results):
    """Run the demo, whose training brings these results."""
    monkeypatch.setattr(compare, "start", lambda launch, plan: save_results(settings, results) or 0)
    settings = settings_for(folder, data=text_in(folder))
    compare.run(settings)


def test_the_best_model_is_named_and_without_matplotlib_all_but_the_picture_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    concluded(tmp_path, monkeypatch, a_result("DDP", 2.5), a_result("DiLoCo", 2.4), a_result("Local SGD", 2.6))
    said = capsys.readouterr().out
    for words in ("pip install 'farflung[plot]'", "2 s", "9 s", "trained by DiLoCo", "won't run"):
        assert words in said
    assert not (tmp_path / "curves.png").exists()


def test_results_survive_the_file(tmp_path):
    results = [a_result("DDP"), a_result("DiLoCo", 1.5)]
    save_results(settings_for(tmp_path), results)
    assert load_results(settings_for(tmp_path)) == results
