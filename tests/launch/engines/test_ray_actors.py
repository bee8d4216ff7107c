# SPDX-License-Identifier: Apache-2.0
"""What the engine ray asks of actors and does with their answers, by a stand-in for the package; test_ray.py has it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from unittest.mock import Mock

import pytest

from farflung.launch.codes import BY_SIGNAL, DONE, ENGINE, FAILED
from farflung.launch.engines import connections
from farflung.process.identity import this_process
from tests.launch.engines.launchers import ENDS, launched, make_python
from tests.launch.engines.rays import StandIn
from tests.launch.engines.test_engine import submitted
from tests.python import call_farflung
from tests.waits import until

RUN = ["--engine", "ray", "--cpu", "--run-dir", "run"]
# Prints its number; ends well at SIGTERM, and by itself once there is a file.
STAYS = f"""
import threading
print("up", of("--meet"), flush=True)
threading.Thread(target=lambda: (signal(), open("signed out", "a").write("x"), os._exit(0)), daemon=True).start()
while not os.path.exists("last"):
    time.sleep(0.02)
{ENDS}"""


@pytest.fixture
def nodes(home, monkeypatch):
    """A cluster of two nodes, and what launchers do there."""
    cluster = StandIn(one="10.0.0.1", two="10.0.0.2")
    for name, module in cluster.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(connections, "_LOOK_S", 0.02)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (home / "train.py").touch()

    def act(acts: str) -> StandIn:
        monkeypatch.setattr(sys, "executable", make_python(home, acts))
        return cluster

    return act


def test_machines_of_a_fixed_run_have_nodes_of_their_own_and_meet_at_the_first(nodes, home, capsys):
    cluster = nodes("print('rank', of('--machine_rank', '0'), os.read(0, 1))\n" + ENDS)
    options = ["--engine-options", "address=auto,folder=" + str(home)]
    assert call_farflung("launch", *RUN, *options, "--num_machines", 2, "--num_processes", 4, "train.py") == DONE
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == [f"[{k}@10.0.0.{k + 1}] rank {k} b'\\x00'" for k in range(2)]  # a heartbeat
    commands = [json.loads(line) for line in (home / "commands").read_text().splitlines()]
    assert all(words[words.index("--main_process_ip") + 1] == "10.0.0.1" for words in commands)
    assert len({words[words.index("--main_process_port") + 1] for words in commands}) == 1
    assert [actor.asked["num_cpus"] for actor in cluster.actors] == [1.0, 1.0]
    assert [actor.asked["num_gpus"] for actor in cluster.actors] == [0.0, 0.0]
    assert not cluster.connected


def test_replicas_wait_for_nodes_sign_out_of_draining_ones_and_are_more_or_fewer(nodes, home, capsys):
    cluster, text = nodes(STAYS), ""

    def shown(words: str) -> bool:
        nonlocal text
        text += "".join(capsys.readouterr())
        return bool(re.search(words, text))

    code = launched(*RUN, "--elastic", "1:4", "--replicas", "2", "--max_restarts", "0", "train.py")
    until(lambda: shown(r"\[1@10.0.0.2\] up tcp://10.0.0.1:\d+"), lambda: text)
    cluster.places["three"] = "10.0.0.3"
    cluster.draining.add("two")
    until(lambda: shown("1@10.0.0.2 signs out: its node drains") and shown(r"\[2@10.0.0.3\] up"), lambda: text)
    assert (home / "signed out").read_text() == "x"
    cluster.draining.clear()
    cluster.lose("three")
    until(lambda: shown("2@10.0.0.3 is gone: It died because its node has died.; the others continue"), lambda: text)
    fewer = r"\b4 signs out: the run is to have fewer replicas"
    for count, number, words in ((2, 4, r"\[3@10.0.0.2\] up"), (3, 5, ""), (2, 5, fewer), (3, 6, "")):
        assert call_farflung("scale", "run", count) == 0
        until(lambda number=number: len(cluster.actors) == number, lambda: text)
        until(lambda words=words: shown(words), lambda: text)
    cluster.places.clear()  # none becomes free for the last one
    (home / "last").touch()
    assert code() == DONE
    assert not cluster.connected


def test_a_signal_reaches_the_launchers_and_those_without_a_node_are_not_waited_for(nodes, home):
    nodes("open('up', 'a').write('x')\nsys.exit(128 + signal())")

    def end() -> None:
        until(lambda: (home / "up").exists() and (home / "up").read_text() == "xx")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end).start()
    words = [*RUN, "--elastic", "1:4", "--replicas", "3", "--meet", f"file://{home}/meet", "train.py"]
    assert call_farflung("launch", *words) == BY_SIGNAL + signal.SIGTERM


TOO_MUCH = [
    ("--num_machines 3", "3 nodes with 1 CPUs and 0 GPUs each are needed, but the cluster has 2; its nodes have 1 CPU"),
    ("--engine-options gpus=1", "1 node with 1 CPUs and 1 GPUs each are needed, but the cluster has 0"),
    ("--engine-options address=127.0.0.1:1", "Ray's cluster at 127.0.0.1:1 can't be reached: [Errno 111]"),
    ("--engine-options wait=0 --elastic 1:2", "No node was free within 0 s. Use wait=SECONDS."),
]


@pytest.mark.parametrize(("flags", "words"), TOO_MUCH)
def test_what_a_cluster_does_not_have_is_told_before_anything_starts(flags, words, nodes, home, capsys):
    cluster = nodes(ENDS)
    cluster.draining |= {"one", "two"}
    assert call_farflung("launch", *RUN, *flags.split(), "train.py") == ENGINE
    assert words in capsys.readouterr().err
    assert not (home / "commands").exists()
    assert not cluster.connected


def test_a_folder_that_a_node_does_not_have_ends_the_run_with_its_name(nodes, capsys):
    nodes(ENDS)
    assert call_farflung("launch", *RUN, "--engine-options", "folder=/nowhere", "train.py") == FAILED
    assert "nothing could be started in /nowhere: No such file" in capsys.readouterr().err


def test_a_missing_package_is_named_and_a_dry_run_needs_none(home, monkeypatch, capsys):
    (home / "train.py").touch()
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ["launch", "--engine", "ray", "--run-dir", "run", "--num_machines", "2"]
    assert call_farflung(*words, "train.py") == 5
    assert "pip install 'farflung[ray]'" in capsys.readouterr().err
    assert call_farflung(*words, "--dry-run", "train.py") == 0
    shown = capsys.readouterr().out
    assert re.search(r"\[1\] .*--machine_rank 1 .*train.py", shown)


@pytest.mark.parametrize(
    ("word", "answer"),
    [("follow", "process 7 on elsewhere shows what it prints"), ("cancel", "was started on elsewhere")],
)
def test_a_run_of_another_launcher_is_answered_without_a_cluster(word, answer, home, monkeypatch, capsys):
    submitted(home, {"pid": 7, "host": "elsewhere"}, engine="ray")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert call_farflung(word, "run") == ENGINE
    assert answer in capsys.readouterr().err


def test_the_run_of_another_user_is_not_cancelled(home, monkeypatch, capsys):
    submitted(home, this_process(), engine="ray")
    monkeypatch.setattr(os, "kill", Mock(side_effect=PermissionError))
    assert call_farflung("cancel", "run") == ENGINE
    assert f"run is of another user, as its process {os.getpid()} is" in capsys.readouterr().err
