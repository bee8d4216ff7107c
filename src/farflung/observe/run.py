# SPDX-License-Identifier: Apache-2.0
"""Reads a run's folder, again and again while it grows: only whole lines count, and what is gone is not asked for."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from farflung.base.errors import ConfigError
from farflung.base.events import Event, Kind, words
from farflung.base.signals import REQUEUE
from farflung.observe import records
from farflung.observe.attempts import Attempts, Life, is_gone
from farflung.observe.folder import FACTS
from farflung.observe.logged import Curves
from farflung.observe.records import RoundLine, Row
from farflung.process.identity import is_here, process_state
from farflung.process.run_files import EVENTS, METRICS, RANKS, ROUNDS, STEPS, name_of

SILENT_S = 3.0  # without a sign, which a rank gives each second
_STUCK_S = 5.0  # in one call
_DEAD_S = 60.0  # without a sign of anybody
_ENDS = {0: "finished", REQUEUE: "saved at a signal"}  # other exit codes are failures
_RATE_S = 4.0  # over which steps a second are counted, at least
KINDS = ("lost", "dropped", "joined", "ran", "away")  # what a round was for a replica, the most notable first


@dataclass
class StepLines:
    """How many steps a rank had made, in its latest life: the first line, and the latest ones."""

    life: Life
    first: Row
    latest: deque[Row] = field(default_factory=lambda: deque(maxlen=4))


@dataclass(frozen=True)
class Rank:
    """A rank as its latest sign shows it."""

    name: str  # `rank 0`, or as the launcher calls it, `replica 2`
    row: Row
    silent_s: float  # since that sign
    status: str  # of its process, if it is of this machine: `running`, `stopped`, `gone`; else empty
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
    def is_program(self) -> bool:
        """Whether a program has taken its place (`--no_python`), which gives no sign and doesn't tell how it ends."""
        return self.ended is None and self.row.get("program", False)

    @property
    def stuck_s(self) -> float:
        """How long it has been where it is, in one call; 0 for less than a moment."""
        stays = self.silent_s + self.row["time"] - self.row["since"]
        return stays if self.ended is None and stays > _STUCK_S and not self.is_program else 0.0

    @property
    def may_train(self) -> bool:
        """Whether it isn't known to be over: a program of an earlier life is, once its replica was started again."""
        return not (self.is_lost or self.ended or self.is_program)

    @property
    def is_lost(self) -> bool:
        """Whether it gives no sign, without having ended."""
        if self.is_program:
            return self.status == "stopped"
        return self.ended is None and (self.silent_s > SILENT_S or self.status in ("gone", "stopped"))

    @property
    def state(self) -> str:
        """What it does, in a word or some."""
        if self.ended is not None:
            return _ENDS.get(self.ended, f"failed ({self.ended})")
        if self.status == "gone":
            return "ended" if self.is_program else "died"
        if self.status == "stopped":
            return "stopped"
        if self.is_program:
            return "a program"
        if self.silent_s > SILENT_S:
            return f"no sign for {self.silent_s:.0f} s"
        if self.stuck_s:
            return f"in {self.where} for {self.stuck_s:.0f} s"
        return "training" if self.step else "starting"

    @property
    def where(self) -> str:
        """The call that it is in, or the line of the script."""
        return self.row.get("call") or self.row.get("at") or "native code"


class ObservedRun:
    """The latest attempt of a run, as its folder shows it at the latest `look`.

    Args:
        look_s: how long a look may read lines. What it does not reach is left to the next one, and `reading` names it.

    Attributes:
        facts: how the latest launcher was started.
        events: what happened, in all attempts.
        current: those of this attempt.
        models: what the first life of each of its replicas said of its models, by member.
        curves: what the script has logged, in all attempts; steps that were made again count once.
        rounds: a line for each round and replica that writes here, since the ranks have started.
        lives: the ranks that have given a sign in this attempt, in order of their replicas' ids.
        ranks: those of them that no other life of their replica follows.
        state: `running`, `finished`, `saved at a signal`, `failed (1)`, `dead`: nobody gives a sign any more;
            or `unknown`: nobody does, and a program would give none.
        code: the exit code; None while the run has none.

    Raises:
        ConfigError: it is no folder of a run, or its file can't be read.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time, look_s: float = inf) -> None:
        self.path, self._clock, self._look_s = path, clock, look_s
        try:
            self.facts, self._odd = records.facts_of(records.json_of(path / FACTS))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is no folder of a run: {FACTS} can't be read ({error}).") from None
        self.attempts = Attempts()
        self.events, self.current = list[Event](), list[Event]()
        self.models = defaultdict[int | None, list[Event]](list)
        self.saving = defaultdict[int | None, list[Event]](list)  # of this attempt, by member
        self.curves = Curves(self.attempts)
        self.rounds: list[RoundLine] = []
        self._rounds = defaultdict[int | None, list[RoundLine]](list)  # by the replica that wrote them
        self._voted: dict[tuple[int, int], RoundLine] = {}  # the first line of each, by number and model
        self._life: Life = (1, 0)  # of the ranks that wrote them
        self._steps: dict[str, StepLines] = {}
        readers = {
            EVENTS: self._take_event,  # first, as they tell the attempts
            STEPS: self._take_steps,
            ROUNDS: self._take_round,
            METRICS: self.curves.take,
        }
        self._files = {name: records.Lines(path / name, take) for name, take in readers.items()}
        self._names: dict[tuple[int, int], str] = {}  # of replicas, by attempt and id
        self._signs: dict[str, tuple[Row, float]] = {}  # by name of the file, with since when
        self._ended: dict[str, int] = {}  # when the files of ranks that have ended were written, by name, in ns
        self._odd_signs: set[str] = set()
        self.look()

    def look(self) -> None:
        """Read what has come since."""
        self.now, until = self._clock(), time.monotonic() + self._look_s
        for file in self._files.values():
            file.look(until)
        for path in sorted((self.path / RANKS).glob("*.json")):
            self._look_at_sign(path)
        number = self.attempts.latest.number
        self.lives = [self._rank(row, since) for row, since in self._signs.values() if self._life_of(row)[0] == number]
        self.lives.sort(key=lambda one: (one.row.get("member") or 0, one.row["rank"]))
        latest = {one.name: one for one in self.lives}  # a replica that was started again is a new member of its name
        self.ranks = [one for one in self.lives if latest[one.name] is one or one.may_train]
        self.state, self.code = self._state()

    def _look_at_sign(self, path: Path) -> None:
        """Keep a sign, and since when by the clock of this machine it is the latest one.

        Another machine's clock tells that at the first look alone, when nothing has been seen to change.
        """
        name = path.name
        try:
            found = records.read_sign(path, self._ended.get(name))
        except ValueError:
            self._odd_signs.add(name)
            return
        if found is None:  # being written, or as before
            return
        self._odd_signs.discard(name)
        row, written_ns = found
        if row.get("ended") is not None:
            self._ended[name] = written_ns
        if name not in self._signs:
            self._signs[name] = row, min(written_ns / 1e9, self.now)
        elif row != self._signs[name][0]:
            self._signs[name] = row, self.now

    @property
    def reading(self) -> str:
        """The share read so far of each file that is not read completely, in words; empty if all are."""
        shares = {name: file.share_read for name, file in self._files.items()}
        parts = [f"{share:.0%} of {name}" for name, share in shares.items() if share is not None]
        return f"still reading; shown so far: {', '.join(parts)}" if parts else ""

    @property
    def unread(self) -> str:
        """What this release can't read of the folder, in words; empty if it can read all."""
        left_out = [f"{file.num_unread:,} of {name}" for name, file in self._files.items() if file.num_unread]
        left_out += [f"{name} of {FACTS}" for name in self._odd] + sorted(self._odd_signs)
        return f"not shown, as this release can't read it: {', '.join(left_out)}" if left_out else ""

    # ---- lines

    def _take_event(self, row: Any) -> float:
        event = records.event(row)
        before = self.attempts.latest.number
        attempt = self.attempts.take(event)
        latest = self.attempts.latest.number
        if latest != before:
            self.current = []
            self.saving.clear()
            self.models.clear()
            self._begin_rounds((latest, 0))
        if attempt == latest:
            self.current.append(event)
            if event.kind is Kind.MODEL:
                models = self.models[event.facts.get("member")]
                if not models or models[0].facts.get("restart") == event.facts.get("restart"):
                    models.append(event)
            if event.kind is Kind.SAVING:
                self.saving[event.facts.get("member")].append(event)
        if event.kind is Kind.PROCESS:
            self._names[attempt, event.facts["member"]] = event.facts["name"]
        self.events.append(event)
        return event.time

    def _take_round(self, row: Any) -> float:
        this = records.logged_round(row)
        life = self.attempts.life(this.attempt, this.restart, this.time)
        self._begin_rounds(life)
        if life == self._life:
            self.rounds.append(this)
            self._rounds[this.member].append(this)
            self._voted.setdefault((this.number, this.model), this)
        return this.time

    def _begin_rounds(self, life: Life) -> None:
        """Forget the rounds of ranks that others have followed."""
        if life > self._life:
            self._life = life
            self.rounds.clear()
            self._rounds.clear()
            self._voted.clear()

    def _take_steps(self, row: Any) -> float:
        line = records.steps(row)
        name, life = name_of(line), self.attempts.life(line.get("attempt"), line.get("restart"), line["time"])
        if name not in self._steps or self._steps[name].life < life:
            self._steps[name] = StepLines(life, line)
        if self._steps[name].life == life:
            self._steps[name].latest.append(line)
        return float(line["time"])

    # ---- ranks

    def _life_of(self, row: Row) -> Life:
        return self.attempts.life(row.get("attempt"), row.get("restart"), row["begun"])

    def _rank(self, row: Row, since: float) -> Rank:
        ended = row.get("ended") is not None
        silent_s = 0.0 if ended else max(0.0, self.now - since)
        status = process_state(row["pid"], row.get("identity")) if is_here(row) and not ended else ""
        return Rank(self.title(row), row, silent_s, status, self._rate(row))

    def steps_of(self, row: Row) -> StepLines | None:
        """Return how many steps the rank of a sign has made by when; None if that is not known."""
        steps = self._steps.get(name_of(row))
        return steps if steps is not None and steps.life == self._life_of(row) else None

    def _rate(self, row: Row) -> float:
        """Return the steps a second: since the latest line that is some seconds older than the sign."""
        begun, done, steps = row["begun"], 0, self.steps_of(row)
        for line in steps.latest if steps is not None else ():
            if row["time"] - line["time"] >= _RATE_S:
                begun, done = line["time"], line["step"]
        return float(max(row["step"] - done, 0) / max(row["time"] - begun, 1e-9))

    def title(self, row: Row) -> str:
        """Return what people call the rank of a line: replicas as their launcher calls them, which started them."""
        member, rank = row.get("member"), row.get("rank", 0)
        if member is None:
            return f"rank {rank}"
        attempt = row.get("attempt", self.attempts.latest.number)
        return self._names.get((attempt, member), f"member {member}") + (f", rank {rank}" if rank else "")

    # ---- the whole

    def _codes(self) -> tuple[dict[str, int], list[Row]]:
        """Return how launchers have ended, by id, and those that have not, as far as is known."""
        attempt = self.attempts.latest
        codes, others = dict(attempt.codes), []
        former = {"": {**self.facts, "processes": self.facts["world"].get("processes")}}
        for name, launcher in (attempt.launchers or former).items():
            code = codes.get(name, self._code_of_a_rank_alone(launcher))
            if code is None:
                others.append(launcher)
            else:
                codes[name] = code
        return codes, others

    def _code_of_a_rank_alone(self, launcher: Row) -> int | None:
        """Return how the only rank of a launcher has ended, if it took the place of the launcher."""
        ranks = [one for one in self.ranks if one.row["host"] == launcher["host"]]
        if launcher.get("processes") != 1 or len(ranks) != 1:
            return None
        is_it = all(ranks[0].row.get(name) == launcher.get(name) for name in ("pid", "identity"))
        return ranks[0].ended if is_it or not self._may_live(launcher) else None

    def _state(self) -> tuple[str, int | None]:
        attempt = self.attempts.latest
        codes, others = self._codes()
        living = [one for one in self.ranks if one.ended is None and one.status != "gone" and one.silent_s < _DEAD_S]
        if attempt.whole_code is None and others and (living or any(map(self._may_live, others))):
            return "running", None
        code = attempt.combined(codes)
        if code is None:
            return "unknown" if any(one.is_program for one in self.ranks) else "dead", None
        return _ENDS.get(code, f"failed ({code})"), code

    def _may_live(self, launcher: Row) -> bool:
        """Return whether a launcher may be about to start ranks, again or for the first time."""
        if is_here(launcher):
            return not is_gone(launcher)
        has_ranks = any(one.row["host"] == launcher["host"] for one in self.ranks)
        return not has_ranks and self.now - launcher["started"] < _DEAD_S

    @property
    def label(self) -> str:
        """What a legend calls the run: its folder's name, and its recipe, if the launcher was given one."""
        setting = self.facts["settings"].get("outer_recipe")
        return f"{self.path.name} ({setting['value']})" if records.is_setting(setting) else self.path.name

    @property
    def code_so_far(self) -> int | None:
        """The exit code by the launchers that have ended, though others may run; None if none has."""
        return self.attempts.latest.combined(self._codes()[0])

    @property
    def begun(self) -> float:
        return self.attempts.latest.begun or float(self.facts["started"])

    @property
    def first_begun(self) -> float:
        """When the first attempt began."""
        return self.attempts.all[0].begun or float(self.facts["started"])

    @property
    def last(self) -> float:
        """When the last thing happened that is known."""
        times = [one.row["time"] for one in self.ranks] + [file.last for file in self._files.values()]
        return float(max(times) or self.begun)

    @property
    def lasted_s(self) -> float:
        """How long it has trained, by the clocks of those that did."""
        silent_s = min((one.silent_s for one in self.ranks), default=0.0) if self.state == "running" else 0.0
        return max(0.0, self.last - self.begun + silent_s)

    def rounds_of(self, member: int | None) -> list[RoundLine]:
        """Return the lines about rounds that a replica has written; None: the first rank of a run without replicas."""
        return self._rounds.get(member, [])

    @property
    def longest(self) -> list[RoundLine]:
        """The lines about rounds of the replica that wrote the most."""
        return max(self._rounds.values(), key=len, default=[])

    @property
    def voted(self) -> list[RoundLine]:
        """The rounds, oldest first: of each the first line."""
        return [self._voted[key] for key in sorted(self._voted)]

    # ---- as the screen and the page show it

    def timeline(self, rounds: Sequence[RoundLine]) -> dict[str, list[str]]:
        """Return what each round was for each replica that took part in one, by name: one of `KINDS`.

        A replica that was started again is a new member of its name.
        """
        members = sorted({member for this in rounds for member in this.members})
        noun = "rank" if rounds and rounds[0].member is None else "member"
        names = {member: self.title({noun: member}) for member in members}
        rows = {name: ["away"] * len(rounds) for name in names.values()}
        for k, this in enumerate(rounds):
            lost = rounds[k + 1].lost if k + 1 < len(rounds) else {}
            for member in sorted(this.members, reverse=True):
                kind = "joined" if member in this.joined else "dropped" if this.dropped else "ran"
                rows[names[member]][k] = "lost" if str(member) in lost else kind
        return rows

    def described(self, event: Event) -> str:
        """Return what happened, in words."""
        return words(event if event.who else replace(event, who=self.title(event.facts)))
