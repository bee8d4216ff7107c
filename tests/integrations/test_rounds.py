# SPDX-License-Identifier: Apache-2.0
"""What is said of the rounds while a run goes on: lines, figures for trackers, and a table at the end."""

import io
import json
import logging
from contextlib import redirect_stderr

import pytest
import torch
from torch import nn

from farflung import Accelerator
from farflung.base.errors import ConfigError
from farflung.base.events import EVENTS
from farflung.hosts.rounds import RoundFigures, RoundOutputs, record_rounds
from farflung.methods.arguments import OuterConfig
from farflung.outer import OuterLoop, local_sgd
from farflung.outer.stats import Stats
from farflung.testing.ranks import run_ranks


def rounds(count, loop=None, report="round", **outputs):
    """Run some rounds of a loop, which are perhaps reported."""
    loop = loop or OuterLoop(nn.Linear(3, 3), local_sgd(2))
    if outputs:
        config = OuterConfig("local_sgd", every=2, report=report)
        RoundOutputs(config, outputs["rank"]).listen(loop, outputs["number"], loss=lambda: outputs["loss"])
    for _ in range(2 * count):
        loop.step()


@pytest.mark.parametrize(
    ("report", "rank", "lines"), [("round", 0, 3), ("auto", 0, 3), ("3600", 0, 1), ("off", 0, 0), ("round", 1, 0)]
)
def test_a_line_a_round_or_none_on_rank_0_alone(report, rank, lines, capsys):
    rounds(3, report=report, rank=rank, number=0, loss=0.25)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines
    if lines:
        assert said[0].startswith("farflung: round 1, step 2: loss 0.25, 0 B sent, "), said
        assert said[0].endswith("% of the time waiting")


def test_a_quiet_launcher_has_no_lines_that_nobody_has_asked_for(monkeypatch, capsys):
    """Also of a loop that the script asks for, of which the launcher knows nothing."""
    monkeypatch.setenv("FARFLUNG_QUIET", "true")
    for report, lines in ((None, 0), ("round", 3)):
        rounds(3, report=report, rank=0, number=0, loss=0.25)
        assert len(capsys.readouterr().err.splitlines()) == lines


@pytest.mark.parametrize(("report", "lines"), [("round", 3), (None, 0), ("off", 0)])
def test_a_block_prints_the_lines_that_its_settings_ask_for(report, lines, capsys):
    accelerator, model = Accelerator(cpu=True), nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with accelerator.outer(model, OuterConfig("local_sgd", every=2, report=report)):
        for _ in range(6):
            accelerator.backward(model(torch.ones(2, 3)).mean())
            optimizer.step()
            optimizer.zero_grad()
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("farflung: round")]
    assert len(said) == lines
    assert all(": loss " in line for line in said)


def test_a_plain_loop_which_prints_no_lines_says_so():
    with pytest.raises(ConfigError, match=r"report is 'round', but a plain OuterLoop prints no lines\. .*listeners"):
        OuterLoop(nn.Linear(3, 3), OuterConfig("local_sgd", every=2, report="round"))


def test_a_line_has_the_share_that_the_end_of_the_run_has(capsys):
    loop, now = OuterLoop(nn.Linear(3, 3), local_sgd(2)), Stats(rounds=3, seconds_exposed=3.0, seconds_total=4.0)
    loop.stats = lambda: now
    rounds(2, loop, rank=0, number=0, loss=None)
    assert [line.split(", ")[-1] for line in capsys.readouterr().err.splitlines()] == ["75% of the time waiting"] * 2
    assert "of 4 s (75%)" in str(now)


def test_a_loss_that_is_not_known_is_left_out(capsys):
    rounds(1, rank=0, number=1, loss=None)
    assert capsys.readouterr().err.startswith("farflung: round 1 of model 1, step 2: 0 B sent, ")


def test_the_runs_folder_has_the_loss_that_rounds_know(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FARFLUNG_RUN_FOLDER", str(tmp_path))
    config = OuterConfig("local_sgd", every=2, report=3600)
    loop = OuterLoop(nn.Linear(3, 3), local_sgd(2))
    RoundOutputs(config, 0).listen(loop, 0, loss=lambda: 0.25)
    rounds(3, loop)
    (metrics,) = [listener._metrics for listener in loop.listeners if hasattr(listener, "_metrics")]
    metrics.write()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["values"]) for line in lines] == [
        (step, {"loss at rounds": 0.25}) for step in (2, 4, 6)
    ]
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_runs_folder_has_the_rounds_and_changes_of_each_loop_once_and_no_handler_else(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("FARFLUNG_RUN_FOLDER", str(tmp_path))
    logger = logging.getLogger("farflung.rounds")
    before, sinks = (logger.handlers[:], logger.level, logger.propagate), EVENTS.handlers[:]
    try:
        for _ in range(2):
            record_rounds()  # by the launcher's rank, and by an Accelerator in it
        loops = [OuterLoop(nn.Linear(3, 3), local_sgd(2)) for _ in range(2)]
        for loop in (loops[0], loops[1], loops[0]):
            rounds(1, loop)
        loops[1].change_schedule(4)
        rounds(2, loops[1])
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
        EVENTS.handlers[:] = sinks
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [(line["model"], line["step"]) for line in lines] == [(0, 2), (1, 2), (0, 4), (1, 4), (1, 6)]
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (event["event"], event["step"], event["every"]) == ("changed", 6, 4)
    assert not [one for one in caplog.records if one.name == logger.name]


def test_on_a_terminal_lines_come_every_few_seconds():
    every = OuterConfig("local_sgd", every=2)
    assert [every.report_seconds(on_terminal) for on_terminal in (True, False)] == [5.0, 0.0]
    assert OuterConfig("local_sgd", every=2, report=30).report_seconds(True) == 30.0


def test_figures_are_given_once_and_the_loop_is_not_kept():
    loop = OuterLoop(nn.Linear(3, 3), local_sgd(2))
    figures = RoundFigures(loop, 1)
    assert figures.take() == {}
    rounds(2, loop)
    values = figures.take()
    assert (values["outer1/round"], values["outer1/bytes_sent"]) == (2, 0)
    assert 0 <= values["outer1/waiting"] <= 1
    assert figures.take() == {}
    loop.detach()
    del loop
    assert not figures.is_open


def test_stats_are_printed_as_a_table():
    stats = Stats(
        384, 386, 12, 1, 37_200_000, 18_600_000, 3000, 1.2, 3.1, 4.0, 5.0, 6.0, 30.0, 2.5, 0.75, 0.5, 0.25, 1, 2, 8.0
    )
    assert str(stats).splitlines() == [
        "steps     384 (2 skipped)",
        "rounds    12 (1 dropped)",
        "sent      37.2 MB, votes 3 kB",
        "received  18.6 MB",
        "waited    1.2 s of 30 s (4%)",
        "hidden    3.1 s of rounds during training",
        "drift     2.5 from the anchor, 0.75 in the first round",
        "cosine    0.5 between replicas",
        "replicas  1 lost, 2 joined; 8 s to recover",
    ]
    assert stats.as_dict()["bytes_sent"] == 37_200_000
    assert "nan" not in str(Stats())
    assert "replicas " not in str(Stats())
    assert "1 joined" in str(Stats(replicas_joined=1))


def reported(folder, parts):
    """The lines of a training whose trackers get what is logged; each step's loss comes in some parts."""
    config = OuterConfig("local_sgd", every=2, report="round")
    with redirect_stderr(io.StringIO()) as said:
        accelerator = Accelerator(cpu=True, outer=config, log_with="jsonl", project_dir=folder)
        accelerator.init_trackers("run")
        model = nn.Linear(3, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for step in range(1, 6):
            loss = model(torch.ones(2, 3)).mean() / parts
            for _ in range(parts):
                accelerator.backward(loss, retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": 1.0}, step=step)
        accelerator.end_training()
    return [line for line in said.getvalue().splitlines() if line.startswith("farflung: round")]


def test_trackers_get_the_rounds_at_the_steps_that_the_script_logs(tmp_path):
    lines, others = run_ranks(reported, 2, tmp_path, 1)
    events = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    logged = [(event["step"], event["values"]) for event in events if "values" in event]
    found = [(step, values["outer/round"]) for step, values in logged if "outer/round" in values]
    assert found == [(2, 1), (4, 2), (5, 3)]  # the last, at the end of training
    names = ("round", "dropped_rounds", "bytes_sent", "waiting", "norm", "drift_norm", "cosine")
    assert set(logged[1][1]) == {"loss"} | {f"outer/{name}" for name in names}
    assert set(logged[0][1]) == {"loss"}
    assert others == []
    assert [line.split(":")[1] for line in lines] == [" round 1, step 2", " round 2, step 4", " round 3, step 5"]
    assert ["loss" in line for line in lines] == [True, True, False]  # no step belongs to the last


def test_the_loss_of_a_step_in_parts_is_not_guessed(tmp_path):
    lines, _ = run_ranks(reported, 2, tmp_path, 2)
    assert len(lines) == 3
    assert not any("loss" in line for line in lines)
