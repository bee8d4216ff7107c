# SPDX-License-Identifier: Apache-2.0
"""A forecast from what a run has measured."""

import pytest
from click.testing import CliRunner

from farflung.base.errors import ConfigError
from farflung.observe.planned import measured, plan
from farflung.observe.run import ObservedRun
from tests.observe.made import sign, write_run


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "one", [sign(1, 1280, 201, ended=0), sign(2, 1280, 201, ended=0)])
    return ObservedRun(tmp_path / "one")


def test_step_line_and_size_are_those_of_the_run(run):
    found = measured(run)
    computed = 200 - 40 * 0.5 - 0.25 - (8 - 7 / (1273 / 192))  # less rounds, one recovery, and until the first step
    assert float(found["step_seconds"]) == pytest.approx(computed / 1280, rel=1e-4)
    assert (found["parameters"], found["replicas"], found["steps"]) == ("1000000", 3, "1280")
    assert found["bandwidth"] == f"{8 / (0.5 - 0.1 - 0.05):.6g}Mbit"
    assert found["latency"] == "50ms"


def test_steps_are_those_of_the_replica_that_has_made_the_most(tmp_path):
    write_run(tmp_path / "one", [sign(1, 40, 85), sign(2, 1280, 201, ended=0), sign(4, 600, 201, ended=0)])
    assert measured(ObservedRun(tmp_path / "one"))["steps"] == "1280"


def test_a_flag_takes_precedence_and_what_no_run_knows_is_asked_for(run):
    done = CliRunner().invoke(plan, ["--from", str(run.path), "--bandwidth", "1Gbit", "--table"])
    assert done.exit_code == 0
    assert f"--step_seconds {measured(run)['step_seconds']} --steps 1280" in done.output
    assert done.output.count("\n") > 5
    (run.path / "rounds.jsonl").unlink()
    done = CliRunner().invoke(plan, ["--from", str(run.path)])
    assert " (without rounds these seconds include the exchange of gradients" in done.output
    assert done.exit_code == 2
    assert "Missing --bandwidth." in done.output


def test_a_run_without_steps_has_measured_nothing(tmp_path):
    write_run(tmp_path / "one", [sign(1, 0, 201)])
    with pytest.raises(ConfigError, match="made no step"):
        measured(ObservedRun(tmp_path / "one"))
