# SPDX-License-Identifier: Apache-2.0
"""A dry run says what would be started, with which variables, and where each setting comes from; it starts nothing."""

from __future__ import annotations

import shlex

import pytest

from farflung.config import environ
from farflung.launch import main as command
from farflung.launch.network import get_free_port
from farflung.launch.plan import RANK
from farflung.launch.shell import start_of


@pytest.fixture
def dry(home, capsys):
    """Call `farflung launch --dry-run` in the empty home; return the lines that it prints."""
    (home / "train.py").write_text("open('started', 'w')\n")

    def run(line: str, variables: dict[str, str | None] | None = None) -> list[str]:
        with environ.patched(variables or {}), pytest.raises(SystemExit) as ended:
            command.main(["launch", "--dry-run", *shlex.split(line)])
        assert ended.value.code == 0
        assert not (home / "started").exists()
        return capsys.readouterr().out.splitlines()

    return run


def origins(lines: list[str]) -> dict[str, str]:
    rows = lines[lines.index("settings that are not defaults:") + 1 :]
    return {row.partition(":")[0].strip(): row.partition("# ")[2] for row in rows}


def test_command_ranks_variables_and_the_origin_of_each_setting_are_shown(dry, home):
    (home / "farflung.yaml").write_text("use_cpu: true\nlog_dir: logs\nsave_on_signal: a folder\n")
    variables = {"FARFLUNG_NUM_PROCESSES": "2", "ACCELERATE_MIXED_PRECISION": "bf16", "FARFLUNG_RUN_DIR": None}
    lines = dry("--outer diloco --outer-every 4 train.py --lr '0 1'", variables)
    (started,) = [line for line in lines if line.startswith("command: ")]
    assert shlex.split(started)[1:] == [*start_of(RANK, None, "-u"), "train.py", "--lr", "0 1"]
    assert "ranks: 0 and 1 of 2 (RANK, WORLD_SIZE)" in lines
    assert "  FARFLUNG_OUTER_EVERY=4" in lines
    assert "  ACCELERATE_MIXED_PRECISION=bf16" in lines
    assert origins(lines) == {
        "use_cpu": "file farflung.yaml:1",
        "num_processes": "environment FARFLUNG_NUM_PROCESSES",
        "mixed_precision": "environment ACCELERATE_MIXED_PRECISION",
        "outer_recipe": "flag --outer",
        "outer_every": "flag --outer_every",
        "log_dir": "file farflung.yaml:2",
        "save_on_signal": "file farflung.yaml:3",
        "dry_run": "flag --dry_run",
    }
    rows = lines[lines.index("environment:") + 1 : lines.index("settings that are not defaults:")]
    assert rows == sorted(rows)
    assert "  FARFLUNG_SAVE_ON_SIGNAL='a folder'" in rows
    assert not {home / "logs", home / "a folder"} & {*home.iterdir()}


def test_the_place_among_tasks_has_its_origins(dry):
    tasks = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": f"127.0.0.1:{get_free_port()}"}
    lines = dry("--cpu train.py", tasks | {"PET_NPROC_PER_NODE": "2"})
    assert "ranks: 2 and 3 of 4 (RANK, WORLD_SIZE)" in lines
    assert f"meeting: {tasks['PET_RDZV_ENDPOINT']}" in lines
    found = origins(lines)
    assert found["machine_rank"] == "environment PET_NODE_RANK"
    assert found["main_process_ip"] == "environment PET_RDZV_ENDPOINT"
    assert found["num_processes"] == "environment PET_NPROC_PER_NODE"


def test_replicas_that_come_and_go_are_described_as_one_of_them_is_started(dry, home):
    lines = dry(f"--cpu --elastic 2:4 --meet file://{home}/run train.py")
    assert f"replicas: 2 replicas on this machine, which meet at file://{home}/run; each is a world of its own" in lines
    assert "ranks: 0 of 1 (RANK, WORLD_SIZE)" in lines
    assert f"command: {shlex.join(start_of(RANK, None, '-u'))} train.py" in lines
    assert not (home / "run").exists()
    lines = dry("--cpu --elastic 2:4 --replicas 3 --ranks-per-replica 2 train.py")
    assert {"ranks: 0 and 1 of 2 (RANK, WORLD_SIZE)", "meeting: 127.0.0.1:0 (any free port)"} <= {*lines}
    assert any("3 replicas on this machine, which meet at a port of this machine; each" in line for line in lines)
    assert "which meet at a:1; each" in "".join(dry("--cpu --join a:1 train.py"))


def test_ranks_that_the_rendezvous_numbers_are_not_named(dry):
    lines = dry("--cpu --num_machines 2 --main_process_ip 127.0.0.1 --rdzv_backend c10d --num_processes 6 train.py")
    assert "ranks: 3 of 6, which the rendezvous numbers" in lines


def test_one_process_alone_is_described_as_the_script_itself(dry):
    lines = dry("--cpu --run-dir none train.py")
    assert any(line.endswith(" -u train.py") for line in lines)
    assert "meeting: none, as one process alone takes the place of the launcher" in lines
    assert "  WORLD_SIZE=1" in lines
