# SPDX-License-Identifier: Apache-2.0
"""Replicas that are killed at every phase of a round, stopped and started, hundreds of times in one run.

`python benchmarks/soak_elastic.py --events 200` prints a line for each event and a summary: how long the others
waited, whether any step was lost or counted twice, and what has grown (memory, descriptors, threads, keys).
"""

import argparse
import json
import random
import signal
import statistics
import sys
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.outer.elastic_run import PHASES, ElasticRun, wrong

REPLICAS = 4
DYING = [one for one in PHASES if one not in ("local step", "saving")]


def held(run, members):
    """Return what the members that have been there longest hold, and the number of keys in the store."""
    processes = [psutil.Process(run.processes[one].pid) for one in members]
    return {
        "rss_mb": max(one.memory_info().rss for one in processes) / 1e6,
        "descriptors": max(one.num_fds() for one in processes),
        "threads": max(one.num_threads() for one in processes),
        "keys": run.store.num_keys(),
    }


def rounds_of(run, member, since):
    """Return when a member ended its rounds, after a time."""
    return [one["at"] for one in list(run.said) if one["member"] == member and "round" in one and one["at"] > since]


def waited(run, members, since):
    """Return by how much the longest gap between two rounds exceeds the usual one, over all members."""
    gaps = []
    for member in members:
        ends = rounds_of(run, member, since - 1.0)
        gaps += [after - before for before, after in zip(ends, ends[1:], strict=False)]
    return max(gaps) - statistics.median(gaps) if len(gaps) > 2 else 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grace-s", type=float, default=1.0)
    asked = parser.parse_args()
    draw, begun = random.Random(asked.seed), time.time()
    crashes, stops, growth, mistakes = [], [], [], 0
    with ElasticRun(step_s=0.01, numel=4096, expected=REPLICAS, grace_s=asked.grace_s) as run:
        there = {run.start(name): name for name in range(REPLICAS)}
        keeper = min(there)  # it is never lost, so its memory can be watched
        run.until(lambda: run.joined(*there))
        for number in range(1, asked.events + 1):
            others = [one for one in there if one != keeper]
            kind = draw.choice(["kill", "die", "die", "stop", "two", "late join"])
            victims = draw.sample(others, 2 if kind == "two" else 1)
            since, name = time.time(), there[victims[0]]
            if kind == "stop":
                run.signal(victims[0], signal.SIGSTOP)
                run.until(lambda: any(f"replica {name} is out" in event for event in run.events))
                time.sleep(0.5)
                stops.append(waited(run, [one for one in there if one not in victims], since))
                run.signal(victims[0], signal.SIGCONT)
                run.until(lambda: any(f"replica {name} joined" in event for event in run.events))
                back = []
            else:
                if kind == "die":  # a newcomer that dies at some phase of its first rounds
                    run.signal(victims[0], signal.SIGKILL)
                    there.pop(victims[0])
                    victims = [run.start(name, dies=(draw.choice(DYING), draw.randint(1, 3)))]
                    since = time.time()
                    run.until(lambda: run.has_ended(*victims))
                else:
                    for one in victims:
                        run.signal(one, signal.SIGKILL)
                if kind == "late join":
                    time.sleep(0.5)
                names = [there.pop(one, name) for one in victims]
                time.sleep(0.5)
                crashes.append(waited(run, there, since))
                back = [run.start(one) for one in names]
                there |= dict(zip(back, names, strict=True))
            run.until(lambda: run.joined(*back), 30.0)
            for one, process in [*run.processes.items()][: -2 * REPLICAS]:  # as a launcher does
                if process.exitcode is not None:
                    run.notes.forget(one)
            run.events.clear()
            healthy = [one for one in run.said if one["member"] == keeper]
            mistakes += len(wrong(healthy))
            run.said[:] = [one for one in run.said if one["at"] > time.time() - 3.0 or "joined" in one]
            if number in (20, asked.events):
                growth.append(held(run, [keeper]))
            last = (stops if kind == "stop" else crashes)[-1]
            print(f"{number:4d} {kind:9} the others waited {last:.3f} s", flush=True)
        run.finish()
    summary = {
        "events": asked.events,
        "minutes": (time.time() - begun) / 60,
        "steps lost or counted twice": mistakes,
        "wait after a crash, median and worst (s)": [statistics.median(crashes), max(crashes)],
        "wait after a stop, median and worst (s)": [statistics.median(stops), max(stops)] if stops else [],
        "held at the 20th event and at the last": growth,
    }
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
