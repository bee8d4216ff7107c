# SPDX-License-Identifier: Apache-2.0
"""Replicas that are killed at every phase of a round, stopped and started, hundreds of times in one run.

`python benchmarks/soak_elastic.py --events 200` prints a line for each event and a summary: how long the others
waited, whether any step was lost or counted twice, and what has grown (memory, descriptors, threads, keys).

    --storm admission    newcomers are killed and stopped on their way in, at each phase and at any moment
    --storm alternate    of two replicas each is killed as soon as the other one is back
    --storm many         `--members` of a bucket in memory, as threads on a virtual clock: ten minutes in rounds of one
    --storm launcher     two launchers, of which the one that joined is killed, and started again
    --storm recipes      kills under each of twelve recipes

with `--minutes` in place of `--events`, `--meet` of a folder or a bucket, and `--key_file` of a run's key. A run whose
weights begin anew counts as `fresh_weights`.
"""

import argparse
import itertools
import logging
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from _measure import report

sys.path.insert(0, str(Path(__file__).parent.parent))

from farflung import outer
from farflung.config.key import run_key
from tests.faults import PHASES, kill, stop
from tests.outer.elastic_run import ElasticRun, wrong
from tests.outer.storm import storm
from tests.virtual_time import virtual_time

REPLICAS = 4
DYING = [one for one in PHASES if one not in ("local step", "saving", "a state")]  # which a newcomer may never write
ON_THE_WAY = ["admission", "vote", "after the vote", "exchange", "arrival"]
KINDS = {None: ["kill", "die", "die", "stop", "two", "late join"], "admission": ["admission kill", "admission stop"]}
EXACT = {"lr": 1.0, "momentum": 0.0}
RECIPES = {
    "diloco": outer.diloco(4, **EXACT),
    "diloco with momentum": outer.diloco(4),
    "local_sgd": outer.local_sgd(4),
    "diloco int8": outer.diloco(4, codec="int8"),
    "slowmo": outer.slowmo(4),
    "streaming_diloco": outer.streaming_diloco(8, 2, delay=2),
    "eager_diloco": outer.eager_diloco(4),
    "sparse_loco": outer.sparse_loco(4),
    "edit": outer.edit(4),
    "quadratic": outer.quadratic(2, alpha=0.5),
    "gossip": outer.gossip(4),
    "noloco": outer.noloco(4),
}


def held(run, members):
    """Return what the members that have been there longest hold, and the number of keys in the store."""
    processes = [psutil.Process(run.processes[one].pid) for one in members]
    return {
        "rss_mb": max(one.memory_info().rss for one in processes) / 1e6,
        "descriptors": max(one.num_fds() for one in processes),
        "threads": max(one.num_threads() for one in processes),
        "keys": len(run.board.list("")),
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


def fresh(run):
    """Return how many replicas have begun with weights that nobody has trained, after the first ones."""
    return sum(one.get("joined") == 0 for one in list(run.said))


class Soak:
    """One run, and what its events have cost so far."""

    def __init__(self, run, draw, grace_s, kinds):
        self.run, self.draw, self.grace_s, self.kinds = run, draw, grace_s, kinds
        self.there = {run.start(name): name for name in range(REPLICAS)}  # names by member
        self.keeper = min(self.there)  # it is never lost, so what it holds can be watched
        self.crashes, self.stops, self.mistakes = [], [], 0
        run.until(lambda: run.joined(*self.there))
        run.said.clear()

    def event(self):
        """Let something happen, and wait until all are there again; return what it was, and how long others waited."""
        kind = self.draw.choice(self.kinds)
        others = [one for one in self.there if one != self.keeper]
        victims = self.draw.sample(others, 2 if kind == "two" else 1)
        if kind == "stop":
            self.stop(victims[0])
        elif kind.startswith("admission"):
            self.admission(victims[0], kind)
        else:
            self.crash(victims, kind)
        self.mistakes += len(wrong([one for one in list(self.run.said) if one["member"] == self.keeper]))
        del self.run.said[:-20_000], self.run.events[:]
        for one in [*self.run.processes][: -2 * REPLICAS]:
            if one in self.run.codes:
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
        newest = max(one["generation"] for one in list(run.said)[-100:])
        run.until(lambda: any(one["member"] == victim and one["generation"] > newest for one in list(run.said)[-100:]))

    def admission(self, victim, kind):
        """Kill a replica; kill or stop the one that comes in its place on its way in; then let it come."""
        run, since, act = self.run, time.time(), stop if kind.endswith("stop") else kill
        run.signal(victim, signal.SIGKILL)
        name = self.there.pop(victim)
        if self.draw.random() < 0.5:
            coming = run.start(name, dies=(self.draw.choice(ON_THE_WAY), 1, act))
            until = time.monotonic() + self.draw.uniform(1.0, 3.0)
        else:
            coming = run.start(name)
            until = time.monotonic() + self.draw.uniform(0.0, 1.0)
        run.until(lambda: run.has_ended(coming) or time.monotonic() > until)
        if act is stop and not run.has_ended(coming):
            run.signal(coming, signal.SIGSTOP)
            time.sleep(self.draw.uniform(0.0, 2 * self.grace_s))
            run.signal(coming, signal.SIGCONT)
            time.sleep(0.5)
        elif not run.has_ended(coming):
            run.signal(coming, signal.SIGKILL)
            run.until(lambda: run.has_ended(coming))
        self.crashes.append(waited(run, self.there, since))
        if run.has_ended(coming):
            coming = run.start(name)
        self.there[coming] = name

        def is_back():
            run.signal(coming, signal.SIGCONT)  # on a busy machine it may stop itself only now
            return run.joined(coming)

        run.until(is_back, 60.0)

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


def going_on(asked):
    """Yield the numbers of events, until there were enough or the time is over."""
    end = time.monotonic() + 60 * asked.minutes
    for number in itertools.count(1):
        if number > asked.events if not asked.minutes else time.monotonic() > end:
            return
        yield number


def soak(asked):
    """Let events happen to one of four replicas after the other."""
    growth, last = [], 0
    with ElasticRun(step_s=0.01, numel=4096, address=asked.meet, expected=REPLICAS, grace_s=asked.grace_s) as run:
        soak = Soak(run, random.Random(asked.seed), asked.grace_s, KINDS[asked.storm])
        for last in going_on(asked):
            kind, seconds = soak.event()
            print(f"{last:4d} {kind:15} the others waited {seconds:.3f} s", flush=True)
            if last == 20:
                growth.append(held(run, [soak.keeper]))
        growth.append(held(run, [soak.keeper]))
        num_fresh = fresh(run)
        run.finish()
    waits = {"crash": soak.crashes, "stop": soak.stops}
    return {
        "events": last,
        "steps_lost_or_counted_twice": soak.mistakes,
        "fresh_weights": num_fresh,
        "waited_s": {
            kind: [round(statistics.median(all_), 3), round(max(all_), 3)] for kind, all_ in waits.items() if all_
        },
        "held_at_event_20_and_last": growth,
    }


def alternate(asked):
    """Kill one of two replicas, then the other one as soon as the first is back."""
    mistakes = num_fresh = last = 0
    with ElasticRun(step_s=0.01, numel=4096, address=asked.meet, expected=2, grace_s=asked.grace_s) as run:
        there = [run.start(name) for name in range(2)]
        run.until(lambda: run.joined(*there))
        run.said.clear()
        for last in going_on(asked):
            lost, kept = there
            run.signal(lost, signal.SIGKILL)
            run.until(lambda lost=lost: run.has_ended(lost))
            there = [kept, run.start(last % 2)]
            run.until(lambda back=there[1]: run.joined(back), 60.0)
            mistakes, num_fresh = mistakes + len(wrong(list(run.said))), num_fresh + fresh(run)
            del run.said[:], run.events[:]
            run.notes.forget(lost)
            print(f"{last:4d} replica {(last - 1) % 2} is back", flush=True)
        run.until(lambda: len(run.said) > 20)
        run.finish()
    return {"events": last, "steps_lost_or_counted_twice": mistakes, "fresh_weights": num_fresh}


def recipes(asked):
    """Kill replicas under each recipe; those that are there at the end have the same weights."""
    unlike, num_fresh, last = {}, 0, 0
    for name, recipe in RECIPES.items():
        with ElasticRun(step_s=0.01, numel=256, recipe=recipe, expected=3, grace_s=asked.grace_s) as run:
            there = [run.start(name) for name in range(3)]
            run.until(lambda there=there, run=run: run.joined(*there))
            run.said.clear()
            draw = random.Random(asked.seed)
            for last in going_on(asked):
                victim = draw.choice(there)
                run.signal(victim, signal.SIGKILL)
                run.until(lambda victim=victim, run=run: run.has_ended(victim))
                there = [*(one for one in there if one != victim), run.start(last % 3)]
                run.until(lambda back=there[-1], run=run: run.joined(back), 60.0)
            num_fresh += fresh(run)
            ends = [one["weight"] for one in run.finish(40) if "end" in one]
            unlike[name] = len(set(map(str, ends))) != 1 or len(ends) != 3
            print(
                f"{name}: {'other weights at the end' if unlike[name] else 'the same weights at the end'}", flush=True
            )
    return {"kills_each": last, "fresh_weights": num_fresh, "unlike_at_the_end": [one for one in unlike if unlike[one]]}


TRAINS = """
import os, pathlib, time
from dataclasses import replace
import torch
from farflung.elastic import launched_membership
from farflung.outer import OuterLoop, diloco
model = torch.nn.Linear(64, 1, bias=False)
torch.nn.init.constant_(model.weight, 2.0 ** 20)
recipe = replace(diloco(4, lr=1.0, momentum=0.0), same_data=True)
with OuterLoop(model, recipe, membership=launched_membership()) as loop:
    print("joined at", loop.position, flush=True)
    while not pathlib.Path("last").exists():
        time.sleep(0.01)
        with torch.no_grad():
            model.weight -= 1
        loop.step()
        right = bool((model.weight == 2.0 ** 20 - loop.position).all())
        if not right or loop.position % 100 == 0:
            print("step", loop.position, "right" if right else "WRONG", flush=True)
"""


def launcher(asked):
    """Kill the launcher that joined, whose replicas go on for a while; then start one again."""
    last = 0
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(TRAINS)

        def launch(name, *flags):
            command = [
                sys.executable,
                "-m",
                "farflung",
                "launch",
                "--cpu",
                "--grace_s",
                str(asked.grace_s),
                *flags,
                "train.py",
            ]
            screen = (Path(folder) / name).open("w")
            return subprocess.Popen(
                command, cwd=folder, stdout=screen, stderr=subprocess.STDOUT, start_new_session=True
            )

        def said(words, times=1):
            deadline = time.monotonic() + 120
            while len(found := re.findall(words, (Path(folder) / "first").read_text())) < times:
                lines = (Path(folder) / "first").read_text().splitlines()
                assert time.monotonic() < deadline, [line for line in lines if not line.startswith("step")][-20:]
                time.sleep(0.1)
            return found

        first = launch("first", "--elastic", "2:4", "--replicas", "2")
        (where, *_) = said(r"--join (\S+) ")
        said("training begins with 2 replicas")
        for last in going_on(asked):
            before = (Path(folder) / "first").read_text().count(" joined; ")
            second = launch("second", "--join", where, "--replicas", "1")
            said(" joined; ", before + 1)
            orphans = psutil.Process(second.pid).children(recursive=True)
            second.kill()
            second.wait()
            time.sleep(5.0)
            for one in orphans:
                if one.is_running():
                    one.kill()
            print(f"{last:4d} the second launcher was killed", flush=True)
        (Path(folder) / "last").touch()
        code = first.wait(120)
        screen = (Path(folder) / "first").read_text()
    return {
        "events": last,
        "exit_code": code,
        "steps_lost_or_counted_twice": screen.count("WRONG"),
        "fresh_weights": screen.count("joined at 0") - 2,
    }


def many(asked):
    """Let something happen to one of many members at an address every so many seconds, in virtual time."""
    figures, usual_s = {}, 0.0
    logging.disable(logging.CRITICAL)
    for every_s in (0.0, 30.0, 10.0, 3.0, 1.0):
        with virtual_time() as clock:
            run, landed = storm(clock, 60 * (asked.minutes or 10.0), every_s, num_members=asked.members, step_s=6.0)
            run.finish()
        round_s = (landed[-1] - landed[0]) / (len(landed) - 1)
        usual_s = usual_s or round_s
        row = {"round_s": round(round_s, 2), "share_of_rounds": round(usual_s / round_s, 3), "left": len(run.ends)}
        figures[f"a fault in {every_s:g} s" if every_s else "no faults"] = row
        print(figures, flush=True)
    return {"rounds": figures}


STORMS = {None: soak, "many": many, "admission": soak, "alternate": alternate, "launcher": launcher, "recipes": recipes}

WRITE_TO = {None: "elastic_soak.jsonl", "many": "elastic_many.jsonl"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storm", choices=[one for one in STORMS if one])
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--members", type=int, default=32, help="of the storm `many`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grace-s", type=float, default=1.0)
    parser.add_argument("--meet", help="the address of a folder or a bucket; without it replicas meet at a port")
    parser.add_argument("--key_file")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if asked.meet and asked.storm in ("launcher", "many", "recipes"):
        parser.error(f"--meet: the storm {asked.storm} makes its runs itself")
    if asked.key_file:
        os.environ["FARFLUNG_KEY"] = run_key(asked.key_file).hex()
    begun = time.time()
    figures = STORMS[asked.storm](asked)
    place = (asked.meet or "tcp").partition(":")[0] + " with a key" * bool(asked.key_file)
    place = "a bucket in memory" if asked.storm == "many" else place
    report(
        "Do replicas that are killed, stopped and started lose steps, and what do the others wait and hold?",
        {"minutes": round((time.time() - begun) / 60, 1), **figures},
        seed=asked.seed,
        write_to=WRITE_TO.get(asked.storm, "elastic_storms.jsonl") if asked.write else None,
        grace_s=asked.grace_s,
        meet=place,
        **({"members": asked.members, "request_ms": 20} if asked.storm == "many" else {}),
        **({"storm": asked.storm} if asked.storm else {"events": figures.pop("events")}),
    )


if __name__ == "__main__":
    main()
