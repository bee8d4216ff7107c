# SPDX-License-Identifier: Apache-2.0
"""How long do replicas stand still when another one joins them over a slow line?

Two machines made of namespaces with one replica each, and a newcomer on the second one: it gets the anchor and the
outer momentum, 8 bytes for each parameter, from the first one. Needs root and iproute2. With 100 million parameters at
50 Mbit/s it takes twenty minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _measure import report

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.drill_elastic import Screen
from tests.launch.machines import ADDRESSES, DEVICE, Machines, two_machines

WHERE = f"{ADDRESSES[0]}:29600"
TRAINS = """
import json, os, sys, time
import torch
from farflung.elastic import launched_membership
from farflung.outer import OuterLoop, diloco
step_s, every, numel, codec = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
model = torch.nn.Linear(numel // 10, 10, bias=False)
membership = launched_membership()
log = open(f"stops.{membership.member}", "a", buffering=1)
with OuterLoop(model, diloco(every, codec=codec), membership=membership) as outer:
    outer.listeners.append(lambda one: print(json.dumps(["round", len(one.members)]), file=log))
    while not os.path.exists("enough"):
        time.sleep(step_s)
        with torch.no_grad():
            model.weight += 1e-3 * membership.member
        began = time.time()
        outer.step()
        print(json.dumps(["stop", time.time() - began]), file=log)
"""


def run(folder: Path, machines: Machines, chosen: argparse.Namespace) -> dict[str, Any]:
    """Let a third replica join two; return how long these stood still in each round, by the number of members."""
    (folder / "train.py").write_text(TRAINS)
    script = ["train.py", *map(str, (chosen.step_s, chosen.every, chosen.numel, chosen.codec))]

    def start(machine: int, *flags: str) -> Screen:
        return Screen(machines.start(machine, ["farflung", "launch", "--cpu", *flags, *script], folder))

    first = start(
        0, "--elastic", "2:3", "--replicas", "1", "--main_process_ip", ADDRESSES[0], "--main_process_port", "29600"
    )
    start(1, "--join", WHERE)
    first.wait_for("training begins with 2 replicas")
    wait_for_rounds(folder, 2, 1)
    asked = time.time()
    start(1, "--join", WHERE)
    first.wait_for("3 replicas train", 3600)
    waited_s = time.time() - asked
    wait_for_rounds(folder, 3, 3)
    (folder / "enough").touch()
    first.process.wait()
    stops = [rounds_of(path) for path in sorted(folder.glob("stops.*"))[:2]]
    longest = [max(row) for row in zip(*stops, strict=False)]
    sizes = [size for size, _ in longest]
    seconds = [round(stop, 2) for _, stop in longest]
    after = [stop for size, stop in longest if size == 3][1:]
    admission = max(stop for size, stop in longest[: sizes.index(3) + 1])
    return {
        "replicas in each round": sizes,
        "others' stop in each round, s": seconds,
        "a round of three, s": round(statistics.median(after), 2),
        "longest stop until it takes part, s": round(admission, 2),
        "newcomer waited, s": round(waited_s, 1),
    }


def rounds_of(path: Path) -> list[tuple[int, float]]:
    """Return the number of members in each round of a replica, and how long it stood still there."""
    found: list[tuple[int, float]] = []
    size = 0
    for kind, value in map(json.loads, path.read_text().splitlines()):
        if kind == "round":
            size = value
        elif size:
            found.append((size, value))
            size = 0
    return found


def wait_for_rounds(folder: Path, size: int, number: int) -> None:
    """Wait until the first replica has taken part in rounds of so many members, so many times."""
    while True:
        paths = sorted(folder.glob("stops.*"))
        if paths and sum(one == size for one, _ in rounds_of(paths[0])) >= number:
            return
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabits", type=float, default=50)
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--codec", default="e3m0")
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--every", type=int, default=150)
    parser.add_argument("--code", default="this", help="what the figures are of, such as a commit (with PYTHONPATH)")
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, two_machines() as machines:
        for machine in range(2):
            shape = ["root", "tbf", "rate", f"{chosen.megabits}mbit", "burst", "64kb", "latency", "400ms"]
            space = machines.spaces[machine]
            subprocess.run(["tc", "-n", space, "qdisc", "add", "dev", DEVICE, *shape], check=True)
        figures = run(Path(folder), machines, chosen)
    settings = {key: value for key, value in vars(chosen).items() if key != "write"}
    write_to = "newcomer.jsonl" if chosen.write else None
    report("how long do others stop for a newcomer?", settings | figures, seed=0, write_to=write_to)


if __name__ == "__main__":
    main()
