# SPDX-License-Identifier: Apache-2.0
"""How long do `farflung report` and `farflung watch` take for the folder of a long run?

A run of two ranks with a million rows of metrics, 100,000 rounds and 12,000 events. The report is written by a
process of its own, from its start to its end. `watch` shows its first screen while it still reads; `whole_s` is when
all is in the picture. A later look is the one after a thousand more rows. The floor is `json.loads` of each line of the
same files, which nothing is done with.

python benchmarks/bench_observe.py [--scale 1.0] [--write]
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _measure import report, seeded
from rich.console import Console

from farflung.observe.run import ObservedRun
from farflung.observe.watch import READ_S, screen

SEED = 0
ROWS, ROUNDS, EVENTS = 1_000_000, 100_000, 12_000
BEGUN = 1_790_000_000.0
STEP_S = 0.1
MEMBERS = [0, 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of all three counts")
    parser.add_argument("--write", action="store_true", help="append to benchmarks/results/observe.jsonl")
    options = parser.parse_args()
    seeded(SEED)
    counts = {"rows": ROWS, "rounds": ROUNDS, "events": EVENTS}
    counts = {name: int(count * options.scale) for name, count in counts.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        write_folder(folder, **counts)
        figures = {"floor_s": floor_s(folder), **reported(folder), **watched(folder)}
        size = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
    report(
        "How long do report and watch take for a long run's folder?",
        figures,
        seed=SEED,
        write_to="observe.jsonl" if options.write else None,
        **counts,
        ranks=len(MEMBERS),
        bytes=size,
    )


def write_folder(folder: Path, rows: int, rounds: int, events: int) -> None:
    """Write the folder of a run whose ranks have trained all the time."""
    (folder / "ranks").mkdir(parents=True)
    whole_s = rows * STEP_S
    facts = {
        "script": "train.py",
        "arguments": [],
        "started": BEGUN,
        "host": "node1",
        "pid": 7,
        "world": {"processes": 2},
    }
    (folder / "run.json").write_text(json.dumps(facts))
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(metric(k) for k in range(rows))
    with (folder / "rounds.jsonl").open("w") as file:
        file.writelines(one_round(number, whole_s / rounds, rows // rounds) for number in range(rounds))
    with (folder / "events.jsonl").open("w") as file:
        started = {
            "event": "started",
            "time": BEGUN,
            "processes": 2,
            "attempt": 1,
            "launcher": "a",
            "host": "node1",
            "pid": 7,
        }
        notes = [{"event": "note", "time": BEGUN + k, "message": f"checkpoint {k}"} for k in range(events)]
        file.writelines(f"{json.dumps(row)}\n" for row in [started, *notes])
    for rank in MEMBERS:
        row = {"time": BEGUN + whole_s, "attempt": 1, "rank": rank, "host": "node1", "pid": 7, "begun": BEGUN}
        row |= {"step": rows, "since": BEGUN + whole_s, "ended": 0}
        (folder / "ranks" / f"rank{rank}.json").write_text(json.dumps(row))


def metric(number: int) -> str:
    values = {"loss": 3 / (1 + number / 1000), "lr": 3e-4}
    return (
        f"{json.dumps({'time': BEGUN + STEP_S * number, 'attempt': 1, 'rank': 0, 'step': number, 'values': values})}\n"
    )


def one_round(number: int, each_s: float, steps: int) -> str:
    row = {"model": 0, "attempt": 1, "time": BEGUN + each_s * (number + 1), "number": number, "members": MEMBERS}
    row |= {"step": steps * (number + 1), "fragment": 0, "dropped": number % 97 == 0, "weights": [0.5] * 2}
    row |= {"norms": [1.0] * 2, "norm": 1.0, "cosine": 0.5, "bytes_sent": 1_000_000, "bytes_received": 1_000_000}
    row |= {"seconds_exposed": 0.1, "seconds_hidden": 0.0, "lost": {}, "joined": [], "seconds_voting": 0.01}
    row |= {"seconds_encoding": 0.02, "seconds_landing": 0.03, "seconds_recovering": 0.0}
    return f"{json.dumps(row)}\n"


def floor_s(folder: Path) -> float:
    begun = time.perf_counter()
    for path in folder.glob("*.jsonl"):
        with path.open("rb") as file:
            for line in file:
                json.loads(line)
    return round(time.perf_counter() - begun, 2)


def reported(folder: Path) -> dict[str, Any]:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-m", "farflung", "report", str(folder)], check=True, stdout=subprocess.DEVNULL)
    took_s = time.perf_counter() - begun
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    size = (folder / "report.html").stat().st_size
    return {"report_s": round(took_s, 2), "report_peak_bytes": 1024 * peak_kib, "page_bytes": size}


def watched(folder: Path) -> dict[str, float]:
    """Return how long the first look takes, all until the folder is read, and one after a thousand more rows, each with
    the screen."""
    begun, run = time.perf_counter(), ObservedRun(folder, look_s=READ_S)
    show(run)
    first_s = time.perf_counter() - begun
    while run.reading:
        run.look()
        show(run)
    whole_s = time.perf_counter() - begun
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(metric(ROWS + k) for k in range(1000))
    begun = time.perf_counter()
    run.look()
    show(run)
    look_s = time.perf_counter() - begun
    return {"first_look_s": round(first_s, 3), "whole_s": round(whole_s, 2), "look_s": round(look_s, 3)}


def show(run: ObservedRun) -> None:
    Console(file=io.StringIO(), width=100).print(screen(run, 100))


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"
    main()
