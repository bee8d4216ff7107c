# SPDX-License-Identifier: Apache-2.0
"""Habits of Accelerate's users, on one process and on two, with `farflung launch` and with environment variables alone.

`habits.py` has what each of them does. Launchers side by side are in `test_tasks.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from farflung.config import environ
from farflung.launch.network import get_free_port
from farflung.testing.patience import patience
from tests.launch import habits

SCRIPT = Path(habits.__file__)
FILE = "distributed_type: MULTI_CPU\nuse_cpu: true\ndeepspeed_config: {zero_stage: 3}\n"
BOTH_WAYS = pytest.mark.parametrize("way", ["launcher", "environment"])
pytestmark = pytest.mark.usefixtures("warm")


def start(way: str, size: int, *words: str) -> tuple[list[int], str]:
    """Start the script in one of two ways; return the exit codes, and what its processes and the launcher print."""
    command, places = [sys.executable, str(SCRIPT), *words], []
    if way == "launcher":
        launch = ["-m", "farflung", "launch", "--config_file", "default.yaml", "--num_processes", str(size)]
        command[1:1], places = launch, [{}]
        Path("default.yaml").write_text(FILE)
    else:
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port()), "WORLD_SIZE": str(size)}
        places = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen(command, env=environ.snapshot() | place, **streams) for place in places]
    said = [process.communicate(timeout=patience(90))[0] for process in started]
    return [process.returncode for process in started], "".join(said)


@pytest.mark.long
@BOTH_WAYS
def test_another_number_of_processes_continues_in_the_middle_of_an_epoch(way, home):
    for size, deed in ((2, "epoch"), (3, "resumes")):
        codes, said = start(way, size, deed)
        assert not any(codes), said
    lines, rest = json.loads(Path("seen0.json").read_text())
    assert lines == ["farflung: the last 2 samples before it will be seen again, as 8 is no multiple of 6"]
    assert sorted(rest) == list(range(6, habits.SAMPLES))


@pytest.mark.long
@BOTH_WAYS
def test_a_process_alone_is_all_that_must_make_a_call(way, home):
    codes, said = start(way, 1, "alone")
    assert not any(codes), said
    assert not any(words in said for words in ("Traceback", "lacks the random states", "loaded it alone")), said
    assert said.count("`deepspeed_config` is not read") == (way == "launcher")


@pytest.mark.parametrize(
    ("way", "deed", "words"),
    [
        ("launcher", "waits", "Ranks wait for each other, rank 0 in `wait_for_everyone`"),
        (
            "environment",
            "saves_weights_of_shards",
            "save_model: every process must call it, as the model is sharded",
        ),
    ],
)
def test_a_call_that_others_do_not_make_is_named_with_the_line_where_they_train(way, deed, words, home):
    codes, said = start(way, 2, deed)
    assert all(codes)
    said = " ".join(said.replace("│", " ").split())  # the launcher draws a box around it
    assert words in said, said
    assert "self.accelerator.backward(self.model(batch[:, None]).sum())" in said.split(words)[1], said
