# SPDX-License-Identifier: Apache-2.0
"""Folders of runs that another release, another program or a full disk has written: none is a traceback."""

import json
import math
import os
import random

import pytest
from click.testing import CliRunner

from farflung.base.errors import ConfigError
from farflung.cost.forecast import plan
from farflung.cost.methods import efficiency
from farflung.observe import planned, watch as watching
from farflung.observe.figures import figures
from farflung.observe.report import report
from farflung.observe.run import ObservedRun
from farflung.observe.watch import watch
from tests.observe.made import T0, a_round, add_lines, sign, write_lines, write_run

assert planned  # which gives `plan` its flag --from
FILES = ("run.json", "events.jsonl", "rounds.jsonl", "metrics.jsonl", "steps.jsonl", "ranks/replica1.json")
DEEP = json.loads("[" * 300 + "]" * 300)
VALUES = (None, True, -1, 0, 1.5, 10**400, 2**63, 1e308, math.nan, math.inf, "", "NaN", "[/x]\x1b[2J\ud800", [], [None])
VALUES += ({}, {"a": [1]}, {"3": 7}, ["x", {}], "x" * 5000, DEEP)


@pytest.fixture(autouse=True)
def no_wait_for_signs(monkeypatch):
    monkeypatch.setattr(watching, "_SIGN_S", 0.0)


def damaged(row, rng):
    """Return a row with a key less, other types, a key of the next release, or none at all."""
    match rng.randrange(5):
        case 0:
            row.pop(rng.choice([*row]))
        case 1:
            row |= {"v": 99, "of_the_next_release": rng.choice(VALUES)}
        case 2:
            return rng.choice(VALUES)
        case _:
            for name in rng.sample([*row], rng.randint(1, 3)):
                row[name] = rng.choice(VALUES)
    return row


def damaged_run(path, seed):
    """Write a run, change some rows of some of its files, and tear some of their lines."""
    folder, rng = path / str(seed), random.Random(seed)
    write_run(folder, [sign(member, 1280, 190) for member in (1, 2, 4)])
    for name in rng.sample(FILES, rng.randint(1, 4)):
        file = folder / name
        lines = file.read_text().splitlines() if name.endswith("l") else [file.read_text()]
        for k in rng.sample(range(len(lines)), min(len(lines), rng.randint(1, 6))):
            lines[k] = json.dumps(damaged(json.loads(lines[k]), rng))
            if rng.random() < 0.1:
                lines[k] = lines[k][: rng.randrange(len(lines[k]))]
        file.write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("first", range(0, 60, 15))
def test_no_damaged_folder_is_a_traceback(tmp_path, first):
    for seed in range(first, first + 15):
        folder = damaged_run(tmp_path, seed)
        for command, *arguments in (
            (watch, str(folder)),
            (report, str(folder)),
            (report, str(folder), "--json"),
            (report, str(folder), "--trace", str(folder / "trace.json")),
            (plan, "--from", str(folder), "--parameters", "1000000"),
        ):
            done = CliRunner().invoke(command, arguments)
            assert isinstance(done.exception, (SystemExit, ConfigError, type(None))), (seed, command.name, arguments)
            assert done.exit_code in (0, 1, 2), (seed, command.name)


def test_what_can_not_be_read_is_counted_and_the_rest_is_shown(tmp_path):
    write_run(tmp_path / "run", [sign(member, 1280, 190) for member in (1, 2)])
    whole = len(ObservedRun(tmp_path / "run").rounds)
    for name in ("rounds.jsonl", "events.jsonl"):
        add_lines(tmp_path / "run" / name, {"event": "ended", "time": T0, "code": [0]}, 7)
    (tmp_path / "run" / "ranks" / "replica2.json").write_text('{"step": "many"}')
    run = ObservedRun(tmp_path / "run")
    assert (len(run.rounds), run.code, [one.name for one in run.ranks]) == (whole, None, ["replica 0"])
    for command, *more in ((watch,), (report,), (report, "--json"), (plan, "--parameters", "1M", "--from")):
        done = CliRunner().invoke(command, [*more, str(tmp_path / "run")])
        assert "2 of events.jsonl, 2 of rounds.jsonl, replica2.json" in " ".join(done.output.split()), command.name


def test_a_run_without_ranks_and_a_round_without_members_have_figures(tmp_path):
    write_run(tmp_path / "run", [])
    launched = json.loads((tmp_path / "run" / "run.json").read_text())
    launched["settings"] = {f"outer_{name}": {"value": value} for name, value in (("recipe", "diloco"), ("every", "8"))}
    (tmp_path / "run" / "run.json").write_text(json.dumps(launched))
    add_lines(tmp_path / "run" / "rounds.jsonl", a_round(40, 1, [1], 190) | {"members": []})
    run = ObservedRun(tmp_path / "run")
    assert (run.unread, figures(run).rounds) == ("not shown, as this release can't read it: 1 of rounds.jsonl", 40)
    assert figures(run).efficiency == efficiency("diloco", 8, 3)


@pytest.mark.parametrize("with_steps", [True, False])
def test_the_curve_continues_with_another_replica_if_the_first_has_died(tmp_path, with_steps):
    """All log each second, and one of them runs ahead: none takes the place of another that lives."""
    write_run(tmp_path / "run", [sign(member, 1280, 190) for member in (1, 2, 3)])
    rows = []
    for k in range(300):
        for member, step in ((1, k), (2, k), (3, k + 5))[k >= 100 :]:
            who = {"member": member, "rank": 0, "step": step if with_steps else None}
            rows.append({"time": T0 + k, **who, "values": {"loss": float(member)}})
    write_lines(tmp_path / "run" / "metrics.jsonl", rows)
    loss = ObservedRun(tmp_path / "run").curves.loss
    values, steps = ([getattr(point, name) for point in loss.points] for name in ("value", "step"))
    assert values[:100] == [1.0] * 100
    assert 135 <= len(values[100:]) <= 200
    assert set(values[100:]) == {loss.last}
    assert steps == (sorted(set(steps)) if with_steps else [None] * len(steps))


def test_a_line_of_the_next_release_ends_nothing(tmp_path):
    write_run(tmp_path / "run", [sign(1, 1280, 190)])
    row = {"event": "merged", "v": 2, "time": T0 + 1, "message": "two runs became one"}
    add_lines(tmp_path / "run" / "events.jsonl", row)
    run = ObservedRun(tmp_path / "run")
    assert (str(run.events[-1]), run.unread) == ("two runs became one", "")


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path):
    write_run(tmp_path / "run", [sign(1, 1280, 190)])
    (tmp_path / "run" / "steps.jsonl").unlink()
    os.mkfifo(tmp_path / "run" / "steps.jsonl")
    assert ObservedRun(tmp_path / "run").steps_of(sign(1, 1280, 190)) is None


@pytest.mark.parametrize(
    ("logged", "value"), [(10**400, math.inf), (-(10**400), -math.inf), (3, 3.0)], ids=["above", "below", "within"]
)
def test_an_integer_beyond_every_float_is_not_finite(tmp_path, logged, value):
    write_run(tmp_path / "run", [sign(1, 1280, 190)])
    row = {"time": T0 + 199, "member": 1, "rank": 0, "step": 9999, "values": {"loss": logged}}
    add_lines(tmp_path / "run" / "metrics.jsonl", row)
    assert ObservedRun(tmp_path / "run").curves.loss.last == value
