# SPDX-License-Identifier: Apache-2.0
"""How long do replicas stand still, and what does each machine print, when a machine, a line or a launcher fails?

Two machines made of namespaces with two replicas each, and all settings as they are by default. Each event begins with
a run of its own; `python benchmarks/drill_elastic.py` plays all of them, in about twenty minutes, `--event cut-8` one.
Needs root and iproute2. `table()` returns the rows that `docs/elastic.md` shows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from _measure import RESULTS, report

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.launch.machines import ADDRESSES, Machines, two_machines, why_impossible

WHERE = f"{ADDRESSES[0]}:29600"
TRAINS = """
import os, sys, time
import torch
from farflung.elastic import launched_membership
from farflung.outer import OuterLoop, diloco
machine, step_s, every, width = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
model = torch.nn.Linear(width, 4)
steps = open(f"steps.{machine}.{os.getpid()}", "a", buffering=1)
with OuterLoop(model, diloco(every), membership=launched_membership()) as outer:
    while not os.path.exists("enough"):
        time.sleep(step_s)
        outer.step()
        print(time.time(), outer.position, file=steps)
"""
STEP_S, EVERY, WIDTH = 0.05, 20, 256
SETTLED_S = 15.0  # all that are left train again
OUTWAITED_S = 300.0  # no event is watched longer
RESULT = "elastic_events.jsonl"
STOPPED_S = 3.0  # between two steps: longer than an ordinary round takes, also on a busy machine


class Screen:
    """What a command prints, with the times."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[tuple[float, str]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.time(), line.rstrip()))

    def wait_for(self, words: str, within_s: float = 120.0) -> None:
        """Wait for a line."""
        deadline = time.time() + within_s
        while not any(words in line for _, line in list(self.lines)):
            if time.time() > deadline:
                raise TimeoutError(f"{words!r} is not among {self.lines}")
            time.sleep(0.05)


class Drill:
    """A run on two machines, and one event in it."""

    def __init__(self, machines: Machines, folder: Path, step_s: float, every: int, slow: float) -> None:
        self.machines, self.folder = machines, folder
        self.step_s, self.every = step_s, every
        (folder / "train.py").write_text(TRAINS)
        first = ["--elastic", "2:5", "--main_process_ip", ADDRESSES[0], "--main_process_port", "29600"]
        self.first = self.launch(0, "node0", first)
        self.first.wait_for("training begins with 2 replicas")
        self.second = self.launch(1, "node1", ["--join", WHERE, "--replicas", "2"])
        self.first.wait_for("joined; 4 replicas train")
        self.began = self.mended = self.ended = 0.0
        self.slow = slow

    def launch(self, machine: int, name: str, flags: Sequence[str], slow: float = 1.0, width: int = WIDTH) -> Screen:
        """Start a launcher; `name` is that of its replicas' files."""
        script = ["train.py", name, str(slow * self.step_s), str(self.every), str(width)]
        return Screen(self.machines.start(machine, ["farflung", "launch", "--cpu", *flags, *script], self.folder))

    def power_off(self, machine: int) -> None:
        """Let a machine vanish without a word."""
        self.lose(0, 1)
        self.machines.kill(machine)

    def lose(self, *machines: int) -> None:
        """Lose what machines send."""
        for machine in machines:
            self.machines.lose_sent(machine)

    def cut(self, seconds: float) -> None:
        """Cut the line for a while, in both directions."""
        self.lose(0, 1)
        time.sleep(seconds)
        for machine in (0, 1):
            self.machines.carry_sent(machine)
        self.mended = time.time()

    def kill_launcher(self, screen: Screen) -> None:
        """Kill a launcher alone; its replicas go on."""
        psutil.Process(screen.process.pid).kill()

    def stop(self) -> None:
        """Stop one of the first machine's replicas, and let it go on later."""
        replica = psutil.Process(self.first.process.pid).children(recursive=True)[-1]
        replica.send_signal(signal.SIGSTOP)
        time.sleep(45.0)
        replica.send_signal(signal.SIGCONT)
        self.mended = time.time()

    def steps(self, name: str) -> dict[str, list[float]]:
        """Return when each replica of a machine made its steps, by process."""
        found = {}
        for file in sorted(self.folder.glob(f"steps.{name}.*")):
            found[file.suffix[1:]] = [float(line.split()[0]) for line in file.read_text().splitlines()]
        return found

    def is_settled(self, screens: Sequence[tuple[str, Screen]]) -> bool:
        """Whether all that is left either has ended or trains undisturbed."""
        now = time.time()
        for name, screen in screens:
            if screen.process.poll() is None:
                mine = [times for times in self.steps(name).values() if times]
                recent = [times for times in mine if now - times[-1] < max(STOPPED_S, 2 * self.step_s)]
                calm = [times for times in recent if not _stops(times, now - SETTLED_S)]
                if len(calm) < 2 or now - max(self.mended, self.began) < SETTLED_S:
                    return False
        return True


def _stops(times: Sequence[float], since: float, limit_s: float = STOPPED_S) -> list[float]:
    """Return how long it took, each time a step took longer than any ordinary one since some time."""
    return [after - before for before, after in itertools.pairwise(times) if after > since and after - before > limit_s]


def longest_gap_s(drill: Drill, name: str, until: float, lines: Sequence[float] = ()) -> float:
    """Return the longest time for which a replica of a machine, that was there at the event, made no step after it.

    Args:
        lines: when its machine printed a line, which ends a gap too.
    """
    longest = 0.0
    for steps in drill.steps(name).values():
        if not steps or steps[0] > drill.began or steps[-1] < drill.began - 30.0:
            continue
        times = sorted([*steps, *lines])
        around = [one for one in times if drill.began - 1.0 < one <= until] or times[-1:]
        longest = max([longest, until - around[-1], *(b - a for a, b in itertools.pairwise(around))])
    return longest


def said(screen: Screen, since: float) -> list[tuple[float, str]]:
    """Return what a command printed after an event, with the seconds since; numbers that differ each time left out."""
    kept, seen = [], set()
    for at, line in list(screen.lines):
        text = re.sub(r"node(\d):\d+", r"node\1", line.removeprefix("farflung: "))
        if at >= since and text and text not in seen and not text.startswith(("[rank", "Traceback", " ", "│", "╰")):
            seen.add(text)
            kept.append((round(at - since, 1), text))
    return kept


@contextmanager
def drill(step_s: float = STEP_S, every: int = EVERY, slow: float = 1.0) -> Iterator[Drill]:
    """Keep a run for the length of a block."""
    with tempfile.TemporaryDirectory() as folder, two_machines() as machines:
        yield Drill(machines, Path(folder), step_s, every, slow)


# What happens, and which machines' replicas are looked at: those that are not hit themselves.
EVENTS: dict[str, tuple[str, Callable[[Drill], object], tuple[str, ...]]] = {
    "power-first": ("first machine loses power", lambda run: run.power_off(0), ("node1",)),
    "power-other": ("another machine loses power", lambda run: run.power_off(1), ("node0",)),
    "half-open-to": ("nothing arrives from the first machine", lambda run: run.lose(0), ("node0", "node1")),
    "half-open-from": ("nothing arrives at the first machine", lambda run: run.lose(1), ("node0", "node1")),
    "cut-8": ("line cut for 8 s", lambda run: run.cut(8.0), ("node0", "node1")),
    "cut-20": ("line cut for 20 s", lambda run: run.cut(20.0), ("node0", "node1")),
    "cut-60": ("line cut for 60 s", lambda run: run.cut(60.0), ("node0",)),
    "launcher-killed": ("another launcher killed", lambda run: run.kill_launcher(run.second), ("node0",)),
    "first-launcher-killed": ("first launcher killed", lambda run: run.kill_launcher(run.first), ("node0", "node1")),
    "stopped": ("replica stopped for 45 s", lambda run: run.stop(), ("node1",)),
    "wrong-newcomer": (
        "newcomer with another model",
        lambda run: run.launch(1, "wrong", ["--join", WHERE], width=WIDTH + 1),
        ("node0", "node1"),
    ),
    "slow": (
        "a replica five times slower joins",
        lambda run: run.launch(1, "slow", ["--join", WHERE], slow=5.0),
        ("node0", "node1"),
    ),
}
# A round of 8 s: with one of 1 s nobody would wait longer than ordinary grace for a replica that takes 5 s.
SLOW_STEP_S, SLOW_EVERY, SLOW_FOR_S = 0.4, 20, 150.0


def play(event: str) -> dict[str, object]:
    """Let an event happen in a run of its own, and return what it did."""
    _, act, looked_at = EVENTS[event]
    is_slow = event == "slow"
    with drill(*(SLOW_STEP_S, SLOW_EVERY) if is_slow else (STEP_S, EVERY)) as run:
        time.sleep(3.0)
        run.began = time.time()
        third = act(run)
        screens = {"node0": run.first, "node1": run.second, **({"third": third} if isinstance(third, Screen) else {})}
        left = [(name, screens[name]) for name in looked_at]
        deadline = run.began + (SLOW_FOR_S if is_slow else OUTWAITED_S)
        while time.time() < deadline and (is_slow or not run.is_settled(left)):
            time.sleep(0.5)
        until = time.time()
        alive = {name: screen.process.poll() is None for name, screen in left}
        ended = {name: at for name, screen in left if not alive[name] for at, _ in screen.lines[-1:] if at > run.began}
        ends = {name: ended.get(name, until) for name in looked_at}
        lines = {name: [at for at, _ in screens[name].lines] for name in looked_at}
        standstill = {name: round(longest_gap_s(run, name, ends[name]), 1) for name in looked_at}
        return {
            "standstill_s": max(standstill.values()),
            "silence_s": max(round(longest_gap_s(run, name, ends[name], lines[name]), 1) for name in looked_at),
            "by_machine_s": standstill,
            "ended_after_s": {name: round(at - run.began, 1) for name, at in ended.items()},
            "watched_s": round(until - run.began),
            "said": {name: said(screen, run.began) for name, screen in screens.items()},
        }


def newest() -> dict[str, dict[str, object]]:
    """Return the newest result of each event."""
    lines = map(json.loads, (RESULTS / RESULT).read_text(encoding="utf-8").splitlines())
    return {line["event"]: line["figures"] for line in lines}


def table(*, with_lines: bool = False) -> list[str]:
    """Return the rows of the page's table; `with_lines` adds what each machine printed."""
    names = ["event", "longest standstill", "longest silence"]
    names += ["the first machine prints", "the other one prints"] * with_lines
    rows = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    found = newest()
    for event, (what, _, _) in EVENTS.items():
        if event not in found:
            continue
        figures = found[event]
        cells = [what, f"{figures['standstill_s']} s", f"{figures['silence_s']} s"]
        if with_lines:
            printed = figures["said"]
            assert isinstance(printed, dict)
            others = {"node1": printed.get("third", [])}
            cells += [_cell(printed[name] + others.get(name, [])) for name in NODES]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


NODES = ("node0", "node1")


def _cell(lines: Sequence[tuple[float, str]]) -> str:
    """Return what was printed, with the seconds before it; of lines that differ in a number alone the first."""
    kept: dict[str, str] = {}
    for at, text in lines:
        if text.startswith("╭"):  # the box of an error, of which a line follows
            continue
        kept.setdefault(re.sub(r"replica \d of|[\d.]+ s", "", text), f"{at:.0f} s: `{text}`")
    return "<br>".join(kept.values()) or "-"


def main() -> None:
    """Play the events that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--event", action="append", choices=EVENTS)
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--table", action="store_true", help="print what was written as a table, with all lines, and do nothing else"
    )
    asked = parser.parse_args()
    if asked.table:
        print("\n".join(table(with_lines=True)))
        return
    if why := why_impossible():
        raise SystemExit(why)
    for event in asked.event or EVENTS:
        report(
            "How long do replicas stand still, and what does each machine print, after an event?",
            play(event),
            seed=0,
            write_to=RESULT if asked.write else None,
            event=event,
        )


if __name__ == "__main__":
    main()
