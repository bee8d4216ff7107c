# SPDX-License-Identifier: Apache-2.0
"""Replicas that are killed at every phase of a round, stopped and started, hundreds of times in one run.

`python benchmarks/soak_elastic.py --events 200` prints a line for each event and a summary: how long the others
waited, whether any step was lost or counted twice, and what has grown (memory, descriptors, threads, keys).
"""

import argparse
import itertools
import random
import signal
import statistics
import sys
import time
from pathlib import Path

import psutil
from _measure import report

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.faults import PHASES
from tests.outer.elastic_run import ElasticRun, wrong

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
        gaps += [after - before for before, after in itertools.pairwise(ends)]
    return max(gaps) - statistics.median(gaps) if len(gaps) > 2 else 0.0


class Soak:
    """One run, and what its events have cost so far."""

    def __init__(self, run, draw, grace_s):
        self.run, self.draw, self.grace_s = run, draw, grace_s
        self.there = {run.start(name): name for name in range(REPLICAS)}  # names by member
        self.keeper = min(self.there)  # it is never lost, so what it holds can be watched
        self.crashes, self.stops, self.mistakes = [], [], 0
        run.until(lambda: run.joined(*self.there))

    def event(self):
        """Let something happen, and wait until all are there again; return what it was, and how long others waited."""
        kind = self.draw.choice(["kill", "die", "die", "stop", "two", "late join"])
        others = [one for one in self.there if one != self.keeper]
        victims = self.draw.sample(others, 2 if kind == "two" else 1)
        if kind == "stop":
            self.stop(victims[0])
        else:
            self.crash(victims, kind)
        self.mistakes += len(wrong([one for one in list(self.run.said) if one["member"] == self.keeper]))
        del self.run.said[:-20_000], self.run.events[:]
        for one, process in [*self.run.processes.items()][: -2 * REPLICAS]:
            if process.exitcode is not None:
                self.run.notes.forget(one)  # as a launcher does
        return kind, (self.stops if kind == "stop" else self.crashes)[-1]

    def death(self):
        """Draw where a newcomer dies; it is let in once alone."""
        phase, number = self.draw.choice(DYING), self.draw.randint(1, 3)
        return phase, 1 if phase == "admission" else number

    def stop(self, victim):
        """Stop a replica until it is left out; then let it come back."""
        run, since, name = self.run, time.time(), f"replica {self.there[victim]}"
        run.signal(victim, signal.SIGSTOP)
        late = since + 3 * self.grace_s + 5.0  # it may have been left out just before
        run.until(lambda: any(name in event and " is out" in event for event in run.events) or time.time() > late)
        time.sleep(0.5)
        self.stops.append(waited(run, [one for one in self.there if one != victim], since))
        run.signal(victim, signal.SIGCONT)
        newest = max(one["epoch"] for one in list(run.said)[-100:])
        run.until(lambda: any(one["member"] == victim and one["epoch"] > newest for one in list(run.said)[-100:]))

    def crash(self, victims, kind):
        """Kill replicas, or one at some phase of its first rounds, and start them again."""
        run, since = self.run, time.time()
        for one in victims:
            run.signal(one, signal.SIGKILL)
        names = [self.there.pop(one) for one in victims]
        if kind == "die":
            dying = run.start(names[0], dies=self.death())
            run.until(lambda: run.has_ended(dying))
        if kind == "late join":
            time.sleep(0.5)
        time.sleep(0.5)
        self.crashes.append(waited(run, self.there, since))
        back = [run.start(name) for name in names]
        self.there |= dict(zip(back, names, strict=True))
        run.until(lambda: run.joined(*back), 30.0)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grace-s", type=float, default=1.0)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    begun, growth = time.time(), []
    with ElasticRun(step_s=0.01, numel=4096, expected=REPLICAS, grace_s=asked.grace_s) as run:
        soak = Soak(run, random.Random(asked.seed), asked.grace_s)
        for number in range(1, asked.events + 1):
            kind, seconds = soak.event()
            print(f"{number:4d} {kind:9} the others waited {seconds:.3f} s", flush=True)
            if number in (20, asked.events):
                growth.append(held(run, [soak.keeper]))
        run.finish()
    waits = {"crash": soak.crashes, "stop": soak.stops}
    report(
        "Do replicas that are killed, stopped and started lose steps, and what do the others wait and hold?",
        {
            "minutes": round((time.time() - begun) / 60, 1),
            "steps_lost_or_counted_twice": soak.mistakes,
            "waited_s": {
                kind: [round(statistics.median(all_), 3), round(max(all_), 3)] for kind, all_ in waits.items()
            },
            "held_at_event_20_and_last": growth,
        },
        seed=asked.seed,
        write_to="elastic_soak.jsonl" if asked.write else None,
        events=asked.events,
        grace_s=asked.grace_s,
    )


if __name__ == "__main__":
    main()
