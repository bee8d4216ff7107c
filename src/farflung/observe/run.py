# SPDX-License-Identifier: Apache-2.0
"""Reads a run's folder, again and again while it grows: only whole lines count, and what is gone is not asked for."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from farflung.base.errors import ConfigError
from farflung.base.events import Event, Kind
from farflung.observe import records
from farflung.observe.folder import FACTS
from farflung.observe.records import Row
from farflung.process.identity import process_state
from farflung.process.preemption import REQUEUE
from farflung.process.run_files import EVENTS, METRICS, RANKS, ROUNDS, STEPS, name_of

SILENT_S = 3.0  # without a sign, which a rank gives each second
_STUCK_S = 5.0  # in one call
_DEAD_S = 60.0  # without a sign of anybody
_ENDS = {0: "finished", REQUEUE: "saved at a signal"}  # other exit codes are failures
_READERS = {
    EVENTS: records.event,
    ROUNDS: records.logged_round,
    METRICS: records.metrics,
    STEPS: records.steps,
}
_RATE_S = 4.0  # over which steps a second are counted, at least


@dataclass(frozen=True)
class Rank:
    """A rank as its latest sign shows it."""

    name: str  # `rank 0`, or as the launcher calls it, `replica 2`
    row: Row
    silent_s: float  # since that sign
    is_here: bool  # it runs, or ran, on this machine
    status: str  # of its process, if it is here: `running`, `stopped`, `gone`; else empty
    rate: float  # steps a second

    @property
    def step(self) -> int:
        return int(self.row.get("step", 0))

    @property
    def ended(self) -> int | None:
        """Its exit code, None while it has none."""
        code: int | None = self.row.get("ended")
        return code

    @property
    def stuck_s(self) -> float:
        """How long it has been where it is, in one call; 0 for less than a moment."""
        stays = self.silent_s + self.row["time"] - self.row["since"]
        return stays if self.ended is None and stays > _STUCK_S else 0.0

    @property
    def is_lost(self) -> bool:
        """Whether it gives no sign, without having ended."""
        return self.ended is None and (self.silent_s > SILENT_S or self.status in ("gone", "stopped"))

    @property
    def state(self) -> str:
        """What it does, in a word or some."""
        if self.ended is not None:
            return _ENDS.get(self.ended, f"failed ({self.ended})")
        if self.status == "gone":
            return "died"
        if self.status == "stopped":
            return "stopped"
        if self.silent_s > SILENT_S:
            return f"no sign for {self.silent_s:.0f} s"
        if self.stuck_s:
            return f"in {self.where} for {self.stuck_s:.0f} s"
        return "training" if self.step else "starting"

    @property
    def where(self) -> str:
        """The call that it is in, or the line of the script."""
        return self.row.get("call") or self.row.get("at") or "native code"


class Run:
    """A run, as its folder shows it at the latest `look`.

    Raises:
        ConfigError: it is no folder of a run, or its file can't be read.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path, self._clock = path, clock
        try:
            self.facts, self._odd = records.facts_of(records.json_of(path / FACTS))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is no folder of a run: {FACTS} can't be read ({error}).") from None
        self._files = {name: records.Lines(path / name, read) for name, read in _READERS.items()}
        self._odd_signs: set[str] = set()
        self._events, self._num_read = list[Event](), 0
        self._ranks: dict[str, tuple[Row, float]] = {}  # by name, with since when
        self._names: dict[int, str] = {}  # of replicas, by their ids as members, of the first events
        self._num_named = 0
        self.now = clock()
        self.look()

    def look(self) -> None:
        """Read what has come since."""
        self.now = self._clock()
        for file in self._files.values():
            file.look()
        for path in sorted((self.path / RANKS).glob("*.json")):
            try:
                found = records.read_sign(path)
            except ValueError:
                self._odd_signs.add(path.name)
                continue
            if found is not None:  # being written: the one before counts
                self._note(path.stem, *found)
                self._odd_signs.discard(path.name)

    def _note(self, name: str, row: Row, written: float) -> None:
        """Keep a sign, and since when by the clock of this machine it is the latest one.

        Another machine's clock tells that at the first look alone, when nothing has been seen to change.
        """
        if name not in self._ranks:
            self._ranks[name] = row, min(written, self.now)
        elif row != self._ranks[name][0]:
            self._ranks[name] = row, self.now

    @property
    def unread(self) -> str:
        """What this release can't read of the folder, in words; empty if it can read all."""
        left_out = [f"{file.num_unread:,} of {name}" for name, file in self._files.items() if file.num_unread]
        left_out += [f"{name} of {FACTS}" for name in self._odd] + sorted(self._odd_signs)
        return f"not shown, as this release can't read it: {', '.join(left_out)}" if left_out else ""

    @property
    def events(self) -> list[Event]:
        """What happened, oldest first."""
        rows = self._files[EVENTS].rows
        self._events += filter(None, map(Event.of_row, rows[self._num_read :]))
        self._num_read = len(rows)
        return self._events

    rounds = property(lambda self: self._files[ROUNDS].rows, doc="A line for each round and replica that writes here.")
    metrics = property(lambda self: self._files[METRICS].rows, doc="What the script logged.")
    steps = property(lambda self: self._files[STEPS].rows, doc="How many steps each rank had made, now and then.")

    @property
    def ranks(self) -> list[Rank]:
        """Those that have given a sign, in order of their replicas' ids."""
        found = [self._rank(name, row, at) for name, (row, at) in self._ranks.items()]
        found.sort(key=lambda one: (one.row.get("member") or 0, one.row.get("rank", 0)))
        latest = {one.name: one for one in found}  # a replica that was started again is a new member of its name
        return [one for one in found if latest[one.name] is one or not (one.is_lost or one.ended)]

    def _rank(self, name: str, row: Row, since: float) -> Rank:
        is_here = row.get("host") == socket.gethostname()
        ended = row.get("ended") is not None
        silent_s = 0.0 if ended else max(0.0, self.now - since)
        status = process_state(row["pid"], row.get("identity"), row["begun"]) if is_here and not ended else ""
        return Rank(self.title(row), row, silent_s, is_here, status, self._rate(name, row))

    def title(self, row: Row) -> str:
        """Return what people call the rank of a line: replicas as their launcher calls them, which started them."""
        member, rank = row.get("member"), row.get("rank", 0)
        if member is None:
            return f"rank {rank}"
        for event in self.events[self._num_named :]:
            if event.kind is Kind.PROCESS:
                self._names[event.facts["member"]] = event.facts["name"]
        self._num_named = len(self.events)
        return self._names.get(member, f"member {member}") + (f", rank {rank}" if rank else "")

    def _rate(self, name: str, row: Row) -> float:
        """Return the steps a second: since the latest line that is some seconds older than the sign."""
        begun, done = float(row["begun"]), 0
        for line in reversed(self.steps):
            if name_of(line) == name and row["time"] - line["time"] >= _RATE_S:
                begun, done = line["time"], line["step"]
                break
        return float(max(row["step"] - done, 0) / max(row["time"] - begun, 1e-9))

    @property
    def code(self) -> int | None:
        """The launcher's exit code, or that of a rank alone; None while the run has none."""
        for event in reversed(self.events):
            if event.kind is Kind.ENDED:
                return int(event.facts["code"])
        alone = self.facts["world"].get("processes") == 1 and len(self._ranks) == 1
        code: int | None = next(iter(self._ranks.values()))[0].get("ended") if alone else None
        return code

    @property
    def state(self) -> str:
        """`running`, `finished`, `saved at a signal`, `failed (1)`, or `dead`: nobody gives a sign any more."""
        if self.code is not None:
            return _ENDS.get(self.code, f"failed ({self.code})")
        if self.facts["host"] == socket.gethostname():  # a launcher may wait before it starts a rank again
            has_launcher = process_state(self.facts["pid"], self.facts["identity"], self.begun) != "gone"
        else:
            has_launcher = not self._ranks and self.now - self.begun < _DEAD_S
        living = [one for one in self.ranks if one.ended is None and one.status != "gone" and one.silent_s < _DEAD_S]
        return "running" if living or has_launcher else "dead"

    @property
    def lasted_s(self) -> float:
        """How long it has trained, by the clocks of those that did."""
        silent_s = min((one.silent_s for one in self.ranks), default=0.0) if self.state == "running" else 0.0
        return max(0.0, self.last - self.begun + silent_s)

    @property
    def begun(self) -> float:
        return float(self.facts["started"])

    @property
    def last(self) -> float:
        """When the last thing happened that is known."""
        times = [row["time"] for row, _ in self._ranks.values()]
        times += [file.rows[-1]["time"] for file in self._files.values() if file.rows]
        return float(max(times, default=self.begun))

    def series(self, name: str | None = None) -> Iterator[tuple[float, int | None, float]]:
        """Yield (time, step, value) of a metric of the first replica that logs it; None: of the loss."""
        name = name or self.loss_name
        writers = [(row.get("member"), row["rank"]) for row in self.metrics if name in row["values"]]
        for row in self.metrics:
            value = row["values"].get(name)
            if isinstance(value, float) and (row.get("member"), row["rank"]) == writers[0]:
                yield row["time"], row["step"], value

    @property
    def not_finite(self) -> str:
        """Which values of the loss are no numbers, in words; empty if all are."""
        values = list(self.series())
        odd = [(step, value) for _, step, value in values if not math.isfinite(value)]
        if not odd:
            return ""
        step = odd[0][0]
        since = "" if step is None else f", first at step {step:,}"
        return f"{self.loss_name} is not finite in {len(odd):,} of {len(values):,} values{since}"

    @property
    def loss_name(self) -> str | None:
        """The metric that is the loss: of those with that word in their names, the shortest."""
        names = {name for row in self.metrics for name in row["values"] if "loss" in name.lower()}
        return min(names, key=lambda name: (len(name), name), default=None)

    @property
    def voted(self) -> list[list[Row]]:
        """The rounds, oldest first: of each, the lines of those that write here."""
        by_number: dict[tuple[int, int], list[Row]] = {}
        for row in self.rounds:
            by_number.setdefault((row["model"], row["number"]), []).append(row)
        return [by_number[key] for key in sorted(by_number, key=lambda key: (key[1], key[0]))]
