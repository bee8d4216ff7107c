# SPDX-License-Identifier: Apache-2.0
"""How long the others wait when a replica is killed: Farflung's DiLoCo and torchft's, the same events in turns.

`pip install --no-deps torchft==0.2.0`, then `python benchmarks/bench_recovery.py --events 10 --replicas 3`. Both train
replicas of one model in steps of 10 ms, with a round every 4 steps; one is killed, and the longest gap between two
rounds of the others is taken, less the usual one. With `--meet` they meet in a folder and in a bucket too. torchft's
Lighthouse runs in this process; it counts a replica as lost after 1 s without a heartbeat (its default is 5 s), and
waits 0.1 s for others where a majority is there.
"""

import argparse
import itertools
import multiprocessing as mp
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch
import torch.distributed as dist
from _measure import report
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.outer.elastic_run import EVERY, ElasticRun
from tests.s3_server import s3_server

NUMEL, STEP_S = 4096, 0.01


def torchft_replica(pipe, number, lighthouse):
    """Train as torchft's own example does."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = nn.Linear(NUMEL, 1, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)

    def load(state):
        model.load_state_dict(state["model"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict()},
        use_async_quorum=False,
        replica_id=f"replica_{number}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=timedelta(seconds=10),
        hostname="127.0.0.1",
    )
    with DiLoCo(manager, [model], inner, outer, sync_every=EVERY):
        step = 0
        while True:
            time.sleep(STEP_S)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            inner.step()
            step += 1
            if step % EVERY == 0:
                pipe.send(time.time())


def gap(ends, since):
    """Return the longest gap between two rounds since a time, less the usual one."""
    near = [at for at in ends if since - 1.0 < at]
    gaps = [after - before for before, after in itertools.pairwise(near)]
    return max(gaps) - statistics.median(gaps)


def with_torchft(replicas):
    """Kill one; return how long the others waited."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, heartbeat_timeout_ms=1000)
    context, ends, pipes, processes = mp.get_context("spawn"), {}, {}, []
    for number in range(replicas):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=torchft_replica, args=(there, number, lighthouse.address()), daemon=True)
        process.start()
        processes.append(process)
        pipes[here], ends[number] = number, []

    def listen(until):
        while not until():
            for pipe in wait(list(pipes), timeout=0.05):
                try:
                    ends[pipes[pipe]].append(pipe.recv())
                except EOFError:
                    pipes.pop(pipe)

    listen(lambda: all(len(one) > 30 for one in ends.values()))
    killed = time.time()
    os.kill(processes[-1].pid, signal.SIGKILL)
    listen(lambda: time.time() > killed + 12.0)
    for process in processes:
        process.kill()
    lighthouse.shutdown()
    return max(gap(ends[number], killed) for number in range(replicas - 1))


def with_farflung(replicas, address=None):
    """Kill one; return how long the others waited."""
    with ElasticRun(step_s=STEP_S, numel=NUMEL, expected=replicas, grace_s=5.0, address=address) as run:
        members = [run.start(number) for number in range(replicas)]
        run.until(lambda: run.joined(*members))
        run.until(lambda: run.at(30 * EVERY))
        killed = time.time()
        run.signal(members[-1], signal.SIGKILL)
        time.sleep(3.0 if address is None else 8.0)
        said = list(run.said)
    rounds = {one: [each["at"] for each in said if each["member"] == one and "round" in each] for one in members[:-1]}
    return max(gap(ends, killed) for ends in rounds.values())


TRAINS = """
import time, torch
from farflung.elastic import launched_membership
from farflung.outer import OuterLoop, diloco
with OuterLoop(torch.nn.Linear(4, 1), diloco(4), membership=launched_membership()) as outer:
    while True:
        time.sleep(0.01)
        outer.step()
"""


def restarted(address):
    """Kill a launcher of two replicas, and these; return after how long they train on, once it is started again."""
    line = ["launch", "--cpu", "--elastic", "2:2", "--state_every", "2", "--meet"]
    with TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(TRAINS)

        def launch(until):
            began = time.time()
            command = [sys.executable, "-m", "farflung", *line, address, "train.py"]
            process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
            for row in process.stderr:
                print(row, end="", flush=True)
                if until in row:
                    return process, time.time() - began
            raise SystemExit("the launcher has ended")

        process, _ = launch("training begins")
        time.sleep(5.0)
        seconds = []
        for _ in range(2):
            below = psutil.Process(process.pid).children(recursive=True)
            for one in (process, *below):
                one.kill()
            process.wait()
            psutil.wait_procs(below, 10.0)
            if not seconds:
                process, took_s = launch("training continues")
                seconds.append(took_s)
        return seconds[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=10)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--meet", action="store_true", help="in a folder and in a bucket, in place of torchft")
    parser.add_argument("--restart", action="store_true", help="all are killed, and started again on the same machine")
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    write_to = "recovery.jsonl" if chosen.write else None
    if chosen.restart:
        with s3_server() as server, TemporaryDirectory() as folder:
            os.environ.update(server.variables)
            figures = {"in a folder": restarted(f"file://{folder}"), "in a bucket": restarted(server.address())}
        figures = {name: {"seconds": round(took_s, 1)} for name, took_s in figures.items()}
        return report(
            "When do replicas train on once all were killed and started again?", figures, seed=0, write_to=write_to
        )
    waits = {}
    with ExitStack() as stack:
        if chosen.meet:
            server = stack.enter_context(s3_server())
            os.environ.update(server.variables)
        for number in range(chosen.events):
            found = {"farflung": with_farflung(chosen.replicas)}
            if chosen.meet:
                folder = Path(stack.enter_context(TemporaryDirectory()))
                found["farflung in a folder"] = with_farflung(chosen.replicas, folder.as_uri())
                found["farflung in a bucket"] = with_farflung(chosen.replicas, server.address())
            else:
                found["torchft"] = with_torchft(chosen.replicas)
            for name, seconds in found.items():
                waits.setdefault(name, []).append(seconds)
            print(number, found, flush=True)
    report(
        "How long do the others wait when a replica is killed?",
        {
            name: {"median_s": round(statistics.median(one), 3), "worst_s": round(max(one), 3)}
            for name, one in waits.items()
        },
        seed=0,
        write_to=write_to,
        replicas=chosen.replicas,
        events=chosen.events,
    )


if __name__ == "__main__":
    main()
