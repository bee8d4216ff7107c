# SPDX-License-Identifier: Apache-2.0
"""Runs on a Ray cluster of two and three nodes, all of them on this machine."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from farflung.testing.patience import patience
from tests.launch.engines.test_arguments import DUMP, make_arguments, seen
from tests.launch.engines.test_connections import RANK, WORST
from tests.launch.keyed import check_sealed_and_unseen, end_soon, write_key
from tests.launch.screen import Screen, started as start_farflung
from tests.python import call_farflung
from tests.waits import until

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.package, pytest.mark.server]
TRAINS = """
import time, torch
from pathlib import Path
from farflung import Accelerator
torch.set_num_threads(1)
accelerator, model = Accelerator(), torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
loop = accelerator.outer_loops[0]
while not (Path("last").exists() and loop.position > 40):
    accelerator.backward(model(torch.randn(8, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
print("trained")
accelerator.end_training()
"""
FIXED = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("rank", dist.get_rank(), "of", int(total), "is on a node of its own")
if sys.argv[1:] == [str(dist.get_rank())]:
    raise ValueError("a bad value")
dist.barrier()
"""
GAVE_UP = "timed out during startup"  # in Ray's words
DILOCO = ["--outer", "diloco", "--outer-every", "4"]


def tried(start):
    """Start nodes, again where Ray gives up: it gives them 30 s, however busy the machine is."""
    before = set(psutil.Process().children(recursive=True))
    for _ in range(3):
        try:
            return start()
        except Exception as error:
            if GAVE_UP not in str(error):
                raise
            for one in set(psutil.Process().children(recursive=True)) - before:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
    pytest.skip("Ray's nodes did not start within its 30 s, three times")


@pytest.fixture(scope="module")
def cluster():
    """A cluster whose head has no room for machines; tests add nodes. No process of it is left."""
    from ray.cluster_utils import Cluster

    few = {"object_store_memory": 80 * 1024 * 1024}
    head = {"num_cpus": 0, "include_dashboard": False, **few}
    others = set(psutil.Process().children(recursive=True))  # of other tests
    made = tried(lambda: Cluster(initialize_head=True, head_node_args=head))
    made.more = lambda count=1: [tried(lambda: made.add_node(num_cpus=1, **few)) for _ in range(count)]
    own = set(psutil.Process().children(recursive=True)) - others
    yield made
    made.shutdown()
    psutil.wait_procs(own, timeout=patience(30))
    left = [one for one in psutil.process_iter(["status"]) if one in own and one.info["status"] != psutil.STATUS_ZOMBIE]
    assert not left


@pytest.fixture
def started(home, cluster):
    """Return what starts a run on the cluster; what is left of runs and nodes is ended."""
    runs: list[Screen] = []

    def start(*words: str) -> Screen:
        line = ["launch", "--engine", "ray", "--cpu", "--run-dir", "run", *words]
        runs.append(start_farflung(*line, cwd=home, env=os.environ | {"RAY_ADDRESS": cluster.address}))
        return runs[-1]

    yield start
    for one in runs:
        if one.process.poll() is None:
            one.process.kill()
        one.end()
    for node in list(cluster.worker_nodes):
        cluster.remove_node(node)


def drain(cluster, node) -> None:
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    client = ray._raylet.GcsClient(address=cluster.address)
    assert client.drain_node(node.node_id, reason, "soon", int(time.time() * 1000) + 600_000)[0]


@pytest.mark.timeout(400)
def test_replicas_of_lost_and_draining_nodes_start_elsewhere_and_the_others_train_on(home, cluster, started):
    (home / "train.py").write_text(TRAINS)
    one, two = cluster.more(2)
    meet = f"file://{home}/meet"
    launched = started("--elastic", "1:3", "--replicas", "2", "--meet", meet, *DILOCO, "train.py")
    launched.wait_for(r"2 replicas train|begins with 2 replicas")
    # A node that drains: its replica signs out, and another one starts on the node that is new.
    cluster.more()
    drain(cluster, one)
    launched.wait_for(r"\d@\S+ signs out: its node drains")
    launched.wait_for(r"\[2@.*was let in; 2 replicas train")
    # A node that is gone, with the replica there.
    cluster.more()
    cluster.remove_node(two, allow_graceful=False)
    lost = launched.wait_for(r"replica (\d) is gone: .*died because its node has died.*; it starts again in 1 s")[1]
    launched.wait_for(rf"it starts again in 1 s[\s\S]*\[{lost}@.*was let in; 2 replicas train")
    # More replicas, and fewer.
    cluster.more()
    assert call_farflung("scale", "run", "3") == 0
    launched.wait_for(r"\[3@.*was let in; 3 replicas train")
    assert call_farflung("scale", "run", "2") == 0
    launched.wait_for(r"3@\S+ signs out: the run is to have fewer replicas")
    (home / "last").touch()
    launched.end(0)
    assert launched.text.count("trained") in (2, 3)  # one that is to leave may have finished before it does


def test_a_key_is_read_on_the_nodes_unseen_and_seals_the_run(home, cluster, started):
    cluster.more(2)
    key, meet = write_key(home), home / "meet"
    meet.mkdir()
    run = started("--elastic", "2:2", "--meet", meet.as_uri(), "--key_file", str(key), "train.py")
    run.wait_for("training begins with 2 replicas")
    end_soon(home)
    text = run.end(0)
    check_sealed_and_unseen(home, meet, text)


def test_a_fixed_run_has_a_node_for_each_machine_and_a_failure_is_one_box(home, cluster, started):
    (home / "train.py").write_text(FIXED)
    cluster.more(2)
    words = ["--num_machines", "2", "--num_processes", "2", "train.py"]
    launched = started(*words)
    launched.end(0)
    for rank in range(2):
        assert re.search(rf"^\[{rank}@.*\] rank {rank} of 2 is on a node", launched.text, re.MULTILINE), launched.text
    launched = started(*words, "1")
    launched.end(3)
    assert launched.text.count("ValueError: a bad value") >= 1
    assert launched.text.count("rank 1 failed") == 1, launched.text


def test_every_argument_reaches_an_actor_as_it_was(home, cluster, started):
    (home / "train.py").write_text(DUMP)
    cluster.more()
    arguments = make_arguments(is_text=True)
    launched = started("train.py", *arguments)
    launched.end(0)
    assert seen(home) == arguments


def test_lines_of_the_worst_kind_come_from_an_actor_once_and_as_they_were(home, cluster):
    draw = random.Random(1)
    lines = [*draw.choices(WORST, k=10_000), b"x" * 1_000_000 + b"\n", b"no newline at the end"]
    (home / "lines").write_text(repr(lines))
    (home / "train.py").write_text(RANK)
    cluster.more()
    words = [sys.executable, "-m", "farflung", "launch", "--engine", "ray", "--cpu", "--run-dir", "run", "train.py"]
    env = os.environ | {"RAY_ADDRESS": cluster.address}
    done = subprocess.run(words, cwd=home, env=env, capture_output=True, timeout=patience(120))
    for node in list(cluster.worker_nodes):
        cluster.remove_node(node)
    assert done.returncode == 0, done.stderr[-2000:]
    head = done.stdout.partition(b"] ")[0] + b"] "
    expected = b"".join(head + line.removesuffix(b"\n") + b"\n" for line in lines)
    assert done.stdout == expected
    own = head + b"farflung: "
    printed = [line for line in done.stderr.split(b"\n") if line.startswith(head) and not line.startswith(own)]
    assert b"\n".join(printed) + b"\n" == expected


def test_an_interrupt_and_a_cancel_end_what_runs_on_the_nodes(home, cluster, started):
    (home / "train.py").write_text("import os, time\nprint('up', os.getpid(), flush=True)\ntime.sleep(600)\n")
    cluster.more(2)
    for ends, expected in (
        (lambda it: it.process.send_signal(signal.SIGINT), 130),
        (lambda _: call_farflung("cancel", "run"), 143),
    ):
        launched = started("--num_machines", "2", "--num_processes", "2", "train.py")
        for number in range(2):
            launched.wait_for(rf"\[{number}@\S+\] up \d+")
        pids = [int(pid) for pid in re.findall(r"up (\d+)", launched.text)]
        ends(launched)
        launched.end(expected)
        until(lambda pids=pids: not any(map(psutil.pid_exists, pids)))


def test_a_cluster_of_this_machine_is_started_for_a_run_that_asks_for_one(home, started):
    (home / "train.py").write_text("print('hello')\n")
    launched = started("--engine-options", "address=local", "train.py")
    launched.end()
    code = launched.process.returncode
    if GAVE_UP in launched.text:
        pytest.skip("Ray's node did not start within its 30 s")
    assert code == 0, launched.text
    assert re.search(r"^\[0@\S+\] hello$", launched.text, re.MULTILINE), launched.text
