# SPDX-License-Identifier: Apache-2.0
"""The attempts of a run in one folder: `--run-dir` again, a job that was requeued, each with launchers of its own.

Several launchers write into one folder at the same time: those of the machines of a run, or of its replicas. Each has
an id, and its end is its own. The end that a submitter reports has no id: it is that of the attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farflung.base.events import Event, Kind
from farflung.observe.records import Lines, Row, event as event_of
from farflung.process.identity import is_here, process_state
from farflung.process.run_files import EVENTS

Life = tuple[int, int]  # of ranks: the attempt, and how often its launcher has started them again


@dataclass
class Attempt:
    """What the events of one attempt say of its launchers."""

    number: int = 1
    begun: float = 0.0
    launchers: dict[str, Row] = field(default_factory=dict)  # how they were started, by id
    codes: dict[str, int] = field(default_factory=dict)  # how they have ended, by id
    whole_code: int | None = None  # how all of it has ended
    is_elastic: bool = False
    is_submitted: bool = False  # to an engine, by whoever began the attempt

    def joins(self, world: Mapping[str, Any]) -> bool:
        """Return whether a launcher that starts with this world belongs to the attempt, as one of several."""
        if self.whole_code is not None or "engine" in world:
            return False
        if not self.launchers:
            return self.is_submitted
        if "address" in world:  # replicas come at any time
            may_live = [row for name, row in self.launchers.items() if name not in self.codes and not is_gone(row)]
            is_same = all(row.get("address") == world["address"] for row in may_live)
            return bool(may_live) and (is_same or not world.get("join"))
        places = [row.get("machine_rank") for row in self.launchers.values()]
        return not self.codes and "machine_rank" in world and world["machine_rank"] not in places

    def combined(self, codes: Mapping[str, int]) -> int | None:
        """Return the exit code by those of launchers: if one replica has finished, the run has."""
        if self.whole_code is not None or not codes:
            return self.whole_code
        return 0 if self.is_elastic and 0 in codes.values() else next(filter(None, codes.values()), 0)


def is_gone(launcher: Row) -> bool:
    """Return whether a launcher is known to have ended, as it was one of this machine."""
    return is_here(launcher) and process_state(launcher["pid"], launcher.get("identity")) == "gone"


def next_attempt(folder: Path, world: Mapping[str, Any]) -> int:
    """Return the attempt of a launcher that is about to start with this world and to write into this folder."""
    attempts = Attempts()
    Lines(folder / EVENTS, lambda row: attempts.take(event_of(row))).look()
    latest = attempts.latest
    return latest.number if not latest.begun or latest.joins(world) else latest.number + 1


class Attempts:
    """All attempts, as the events are read."""

    def __init__(self) -> None:
        self.all = [Attempt()]

    @property
    def latest(self) -> Attempt:
        return self.all[-1]

    def take(self, event: Event) -> int:
        """Read the next event; return the number of the attempt that it belongs to."""
        facts, launcher = event.facts, event.facts.get("launcher")
        number = self.latest.number
        if launcher is not None or "rank" in facts or event.kind is Kind.STARTED:  # in others it is another number
            number = int(facts.get("attempt", number))
        if event.kind is Kind.STARTED and number > self.latest.number:
            self.all = [*(one for one in self.all if one.begun), Attempt(number)]
        attempt = next((one for one in self.all if one.number == number), self.latest)
        if event.kind is Kind.STARTED:
            attempt.begun = attempt.begun or event.time
            attempt.is_elastic |= "replicas" in facts
            attempt.is_submitted |= "engine" in facts
            if launcher is not None and {"host", "pid"} <= facts.keys():
                attempt.launchers[launcher] = {"started": event.time, **facts}
        elif event.kind is Kind.ENDED and launcher is not None:
            attempt.codes[launcher] = facts["code"]
        elif event.kind is Kind.ENDED:
            self.latest.whole_code = facts["code"]
        return attempt.number

    def life(self, attempt: int | None, restart: int | None, time: float) -> Life:
        """Return the life of the rank that wrote a row; if its attempt is not known, its time tells which it was."""
        if attempt is None or attempt > self.latest.number:
            attempt = next((one.number for one in reversed(self.all) if one.begun <= time), self.all[0].number)
        return attempt, restart or 0
