# SPDX-License-Identifier: Apache-2.0
"""The example of replicas that come and go learns, alone and as two replicas of a launcher."""

import json
import re

import pytest

from tests.examples.scripts import FOLDER
from tests.python import run_python

pytestmark = pytest.mark.long

FILE = FOLDER / "elastic.py"
LAUNCH = ["-m", "farflung", "launch", "--cpu", "--elastic", "1:4", "--replicas", "2"]


@pytest.mark.parametrize(("launch", "replicas"), [([], 1), (LAUNCH, 2)])
@pytest.mark.usefixtures("warm")
def test_every_replica_learns_and_notes_its_rounds(launch, replicas, tmp_path):
    flags = ["--steps", "160", "--pause", "0", "--log", str(tmp_path / "rounds.jsonl")]
    ended = run_python(*launch, FILE, *flags, timeout_s=90)
    losses = re.findall(r"^process \d+: 10 rounds, 0 lost, 0 joined, loss ([\d.]+)$", ended.stdout, re.MULTILINE)
    assert len(losses) == replicas
    assert all(float(loss) < 3.5 for loss in losses)  # log(256) is 5.5
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert len(rounds) == 10 * replicas
    assert all(len(one["members"]) == replicas and one["member"] in one["members"] for one in rounds)


@pytest.mark.long
@pytest.mark.usefixtures("warm")
def test_one_that_dies_is_let_in_again_while_the_others_go_on():
    flags = ["--steps", "1000", "--dies_at", "200"]
    ended = run_python(*LAUNCH, FILE, *flags, timeout_s=120)
    assert "replica 1 is out: was killed by SIGKILL; training continues with 1 replica" in ended.stderr
    assert "replica 1 joined; 2 replicas train" in ended.stderr


def test_it_is_short():
    assert len(FILE.read_text().splitlines()) <= 75
