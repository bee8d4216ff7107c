# SPDX-License-Identifier: Apache-2.0
"""Each wait of a launcher and of what it starts ends at Ctrl-C and at SIGTERM: a table of all kinds."""

from __future__ import annotations

import ast
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from farflung.launch.network import get_free_port
from farflung.testing.patience import patience
from tests.launch.screen import launcher
from tests.s3_server import variables_for
from tests.test_house import SOURCE

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_WITHIN_S = 2.0
_LINE = r"waits.*,( for .*)? after [1-9]\d(\.\d)? s$"
TRAINS = """
import os, sys, time, torch
from farflung import Accelerator
if sys.argv[1:] == [os.environ["RANK"]]:
    time.sleep(300)
accelerator, model = Accelerator(cpu=True), torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
accelerator.backward(model(torch.randn(8, 4)).sum())
optimizer.step()
"""
DIES = """
import os, sys, time
time.sleep(300 if os.environ["RANK"] == "1" else 0)
"""


TRAINS_ON = """
import time, torch
from farflung import Accelerator
accelerator, model = Accelerator(cpu=True), torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
while True:
    time.sleep(0.05)
    accelerator.backward(model(torch.randn(8, 4)).sum())
    optimizer.step()
"""


AS_TOLD = {"kubernetes_api.py", "ray.py"}  # after a request that failed, and for as long as its answer says


def of_two(rank: int, where: str) -> list[str]:
    host, _, port = where.partition(":")
    return ["--num_machines", "2", "--machine_rank", str(rank), "--main_process_ip", host, "--main_process_port", port]


# What is waited for -> the lines of the launchers that wait, the first one, or let it wait, given an address at which
# nobody listens and one at which nobody answers.
WAITS = {
    "machine 0, which isn't there": lambda free, silent: [[*of_two(1, free), "train.py"]],
    "machine 0, where something else listens": lambda free, silent: [[*of_two(1, silent), "train.py"]],
    "machine 1": lambda free, silent: [[*of_two(0, free), "train.py"]],
    "the ranks of machine 1": lambda free, silent: [[*of_two(k, free), "dies.py"] for k in (0, 1)],
    "the name of machine 0": lambda free, silent: [[*of_two(1, "node0.invalid:29500"), "train.py"]],
    "a run": lambda free, silent: [["--join", free, "train.py"]],
    "a run, where something else listens": lambda free, silent: [["--join", silent, "train.py"]],
    "a bucket": lambda free, silent: [["--elastic", "1:2", "--meet", "s3://bucket/run", "train.py"]],
    "enough replicas": lambda free, silent: [["--elastic", "2:2", "--replicas", "1", "--outer", "diloco", "train.py"]],
    "another rank": lambda free, silent: [["--num_processes", "2", "train.py", "1"]],
}


def ended_s(kind: str, number: int, silent: str) -> float:
    """Start a launcher that waits, send it a signal once it has said so; return how long it still ran."""
    first, *others = (launcher(*words) for words in WAITS[kind](f"127.0.0.1:{get_free_port()}", silent))
    with ExitStack() as running:
        for screen in (first, *others):
            running.enter_context(screen)
        first.wait_for(_LINE)
        began = time.monotonic()
        first.process.send_signal(number)
        assert first.ended() in (128 + number, -number), first.text
        return time.monotonic() - began


@pytest.mark.usefixtures("warm")
def test_each_wait_is_said_after_ten_seconds_and_ends_at_a_signal(home, monkeypatch):
    (home / "train.py").write_text(TRAINS)
    (home / "dies.py").write_text(DIES)
    with closing(socket.create_server(("127.0.0.1", 0))) as nobody, ThreadPoolExecutor(2 * len(WAITS)) as pool:
        silent = f"127.0.0.1:{nobody.getsockname()[1]}"
        for name, value in variables_for(f"http://{silent}").items():
            monkeypatch.setenv(name, value)
        rows = {(kind, number): pool.submit(ended_s, kind, number, silent) for kind in WAITS for number in SIGNALS}
        lasted = {f"{kind}, {number.name}": row.result() for (kind, number), row in rows.items()}
    late = {row: seconds for row, seconds in lasted.items() if seconds > patience(_WITHIN_S)}
    assert not late


@pytest.mark.usefixtures("warm")
def test_a_replica_ends_at_a_signal_though_the_launcher_that_serves_its_run_is_silent(home):
    (home / "train.py").write_text(TRAINS_ON)
    port, words = get_free_port(), ["--replicas", "1", "--outer", "diloco", "--outer-every", "4", "train.py"]
    with launcher("--elastic", "1:2", "--main_process_port", str(port), *words) as first:
        first.wait_for("round 1")
        with launcher("--join", f"127.0.0.1:{port}", *words) as other:
            other.wait_for("was let in")
            first.process.send_signal(signal.SIGSTOP)
            try:
                time.sleep(1)
                began = time.monotonic()
                other.process.send_signal(signal.SIGTERM)
                assert other.ended() in (128 + signal.SIGTERM, -signal.SIGTERM), other.text
                assert time.monotonic() - began < patience(_WITHIN_S)
            finally:
                first.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("room", ["launch", "process"])
def test_the_loops_of_a_launcher_sleep_in_one_function_alone(room):
    """Only `farflung.comm.patience.waiting` sleeps: it hears signals, and says what is waited for."""
    sleeps = set()
    for path in sorted((SOURCE / room).rglob("*.py")):
        for loop in ast.walk(ast.parse(path.read_text())):
            if isinstance(loop, (ast.While, ast.For)):
                calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
                sleeps |= {path.name for call in calls if ast.unparse(call.func) == "time.sleep"}
    assert sleeps == (AS_TOLD if room == "launch" else set())
