# SPDX-License-Identifier: Apache-2.0
"""What happens in a run, as values: who records an event gives facts, and `words` alone turns them into English.

Sinks are handlers of the logger `EVENTS`: the screen, the run's folder. Replicas send theirs to launchers as JSON.
A warning of Python's is recorded where it is shown (`farflung.process.run_files`).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TextIO

from farflung.base.words import counted, in_seconds

EVENTS = logging.getLogger("farflung.events")
EVENTS.propagate = False
EVENTS.setLevel(logging.DEBUG)
FILES_ONLY = logging.DEBUG  # the level of events that no screen shows

_VERSION = 1  # of the JSON


class Kind(str, Enum):
    """The kinds of events, by their names in JSON."""

    # ---- of launchers
    SETTINGS = "settings"
    STARTED = "started"
    SUBMITTED = "submitted"
    STATE = "state"
    PROCESS = "process"
    RESTARTED = "restarted"
    FAILED = "failed"
    CUT_OFF = "cut_off"
    REACHED = "reached"
    ENDING = "ending"
    LEFT = "left"
    ENDED = "ended"
    NOTE = "note"
    WARNING = "warning"
    # ---- of replicas
    WAITS = "waits"
    BEGAN = "began"
    JOINED = "joined"
    DIFFERS = "differs"
    REFUSED = "refused"
    LOST = "lost"
    RECONNECTED = "reconnected"
    EXCLUDED = "excluded"
    # ---- of ranks
    MODEL = "model"
    SAVING = "saving"
    CHECKPOINT = "checkpoint"
    CHANGED = "changed"
    CHOSEN = "chosen"
    SKIPPED = "skipped"
    OUTVOTES = "outvotes"


_WAYS = {"NO": "in one process", "FSDP": "by FSDP"}
_OWN_KEYS = ("event", "v", "time", "replica", "generation")


@dataclass(frozen=True)
class Event:
    """Something that happened in a run.

    Args:
        time: in seconds since 1970.
        who: the replica or the rank that it is about, as people call it.
        generation: the number of the one that the replicas have from then on.
        facts: more, as JSON can hold it. A `message` is shown instead of the words of its kind.
    """

    kind: Kind
    time: float
    who: str = ""
    generation: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def now(cls, kind: Kind, who: str = "", generation: int | None = None, /, **facts: Any) -> Event:
        return cls(kind, time.time(), who, generation, facts)

    def row(self) -> dict[str, Any]:
        """Return what JSON has of it."""
        row: dict[str, Any] = {"event": self.kind.value, "v": _VERSION, "time": self.time}
        row |= {"replica": self.who} if self.who else {}
        row |= {} if self.generation is None else {"generation": self.generation}
        return row | dict(self.facts)

    def to_json(self) -> str:
        return json.dumps(self.row(), default=str)

    @classmethod
    def of_json(cls, line: str) -> Event | None:
        """Undo `to_json`; None for a line of another program."""
        with suppress(ValueError):
            row = json.loads(line)
            return cls.of_row(row) if isinstance(row, dict) and "v" in row else None
        return None

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Event | None:
        """Return the event of a JSON object; None: it is none. One of a later version, or kind, becomes a note."""
        name, at, version = row.get("event"), row.get("time"), row.get("v", _VERSION)
        who, generation = row.get("replica", ""), row.get("generation")
        if not isinstance(name, str) or not isinstance(at, (int, float)) or not isinstance(version, int):
            return None
        if not isinstance(who, str) or not isinstance(generation, int | None):
            return None
        facts = {key: value for key, value in row.items() if key not in _OWN_KEYS}
        if version > _VERSION or name not in [kind.value for kind in Kind]:
            return cls(Kind.NOTE, at, who, generation, {"message": name} | facts)
        return cls(Kind(name), at, who, generation, facts)

    def __str__(self) -> str:
        return words(self)


def record(
    kind: Kind, who: str = "", generation: int | None = None, /, *, level: int | None = None, **facts: Any
) -> None:
    """Record an event; `level` is that of `logging`, by default ERROR for failures and warnings, else INFO."""
    is_error = kind in (Kind.FAILED, Kind.WARNING) or facts.get("code", 0) != 0
    EVENTS.log(level or (logging.ERROR if is_error else logging.INFO), Event.now(kind, who, generation, **facts))


def words(event: Event) -> str:
    """Return an event in English, as stderr, `watch` and `report` show it; empty if there is nothing to say."""
    if "message" in event.facts:
        return str(event.facts["message"])
    try:
        sentence = _of_replicas(event) or _of_a_launcher(event)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, OSError):  # facts of another version
        return " ".join(filter(None, (event.who, event.kind.value, json.dumps(dict(event.facts), default=str))))
    return sentence if event.generation is None else f"generation {event.generation}: {sentence}"


def _of_replicas(event: Event) -> str:
    who, facts = event.who, event.facts
    why = facts.get("why", "")
    them = counted(facts["replicas"], "replica") if "replicas" in facts else ""
    match event.kind:
        case Kind.WAITS if "endpoint" in facts:
            machine = f"machine {facts['machine_rank']} of {facts['machines']}"
            return f"{machine} waits for the others at {facts['endpoint']}, over {facts['interface']}"
        case Kind.WAITS:
            return f"{who} can't begin: {why}" if facts.get("is_member") else f"{who} waits: {why}"
        case Kind.BEGAN if "step" in facts:
            lost = facts["rounds_lost"]
            lost = f"{counted(lost, 'later round')} lost" if lost else "no round lost"
            return f"training continues with {them} from the state at step {facts['step']}, {lost}"
        case Kind.BEGAN:
            return f"training begins with {them}"
        case Kind.JOINED:
            return f"{who} was let in; {them} train" if event.generation is None else f"{who} joined; {them} train"
        case Kind.DIFFERS:
            return f"{who} differs from the others: {why}"
        case Kind.REFUSED:
            return f"{who} is not let in: {why}"
        case Kind.LOST if facts.get("asks_again"):
            return f"{who} was left out: {why}; it asks to be let in again"
        case Kind.LOST if event.generation is not None:
            how = "continues" if facts["has_state"] else "begins again"
            return f"{who} is out: {why}; training {how} with {them}{_late_again(facts)}"
        case Kind.LOST:
            return f"{who} is lost: {why}"
        case Kind.EXCLUDED:
            return f"{who} does not count in rounds: {why}" if why else f"{who} counts in rounds again"
        case Kind.OUTVOTES if facts["replicas"] < facts["least"]:
            rule = f"the robust rule outvotes one of {facts['least']} or more"
            return f"with {them} at work one of them can spoil the weights: {rule}"
        case Kind.OUTVOTES:
            return f"with {them} at work the robust rule outvotes any one of them again"
        case Kind.RECONNECTED:
            return f"{them} connected again ({why})"
        case _:
            return ""


def _late_again(facts: Mapping[str, Any]) -> str:
    if facts.get("num_lates", 0) < 2:
        return ""
    return (
        f" (late {facts['num_lates']} times so far: rounds by time, such as diloco(seconds=...), fewer steps a round, "
        f"or a longer --grace_s would keep it; it asks again in {in_seconds(facts['pause_s'])})"
    )


def _of_a_launcher(event: Event) -> str:
    who, facts = event.who, event.facts
    match event.kind:
        case Kind.STARTED if "address" in facts:
            how = f"; {facts['join']}" if facts.get("join") else ""
            return f"{counted(facts['replicas'], 'replica')} of a run at {facts['address']}{how}"
        case Kind.STARTED:
            nouns = {"replicas": "replica", "machines": "machine", "processes": "process"}
            sizes = [counted(facts[name], noun) for name, noun in nouns.items() if name in facts]
            return f"started: {', '.join(sizes)}"
        case Kind.RESTARTED if "how" in facts:
            which = f"restart {facts['restart']} of {facts['max_restarts']} within an hour"
            return f"{who} {facts['how']}; it starts again in {facts['wait_s']:g} s ({which})"
        case Kind.RESTARTED:
            return f"the processes start again (restart {facts['restart']} of {facts['max_restarts']})"
        case Kind.FAILED if "why" in facts:
            return f"{who} failed: {(facts['why'].splitlines() or [''])[0]}"
        case Kind.FAILED:
            return f"{who} {facts['how']}; it is not started again" if facts["how"] else f"{who} is not started again"
        case Kind.CUT_OFF if facts.get("is_gone"):
            why = f": {facts['why']}" if facts.get("why") else ""
            return f"the run's store at {facts['address']} is gone; replicas train on, but none is started again{why}"
        case Kind.CUT_OFF if "gives_up_s" in facts:
            times = f"for {in_seconds(facts['cut_s'])}; it gives up after {in_seconds(facts['gives_up_s'])}"
            return f"still cut off from the run's store at {facts['address']}, {times}"
        case Kind.CUT_OFF:
            clock = time.strftime("%H:%M:%S", time.localtime(facts["since"]))
            return f"cut off from the run's store at {facts['address']} since {clock}; replicas train on"
        case Kind.REACHED:
            return f"reaches the run's store at {facts['address']} again, after {in_seconds(facts['cut_s'])}"
        case Kind.ENDED:
            return f"ended with exit code {facts['code']}"
        case Kind.MODEL:
            return f"{who} trains {facts['parameters']:,} parameters {_WAYS.get(facts['strategy'], 'by DDP')}"
        case Kind.SAVING:
            return f"{who} has trained on after {in_seconds(facts['seconds'])} for a checkpoint"
        case Kind.SKIPPED:
            numbers = f"{facts['in_a_row']} in a row, {facts['total']} so far"
            return f"a step was skipped, as its loss or gradients are not finite ({numbers})"
        case Kind.CHECKPOINT:
            return f"checkpoint {facts['folder']}"
        case Kind.CHANGED:
            delay = f", applied {counted(facts['delay'], 'step')} later" if facts["delay"] else ""
            return f"from step {facts['step']:,} on a round has {counted(facts['every'], 'step')}{delay}"
        case _:
            return ""


class Sink(logging.Handler):
    """Shows events somewhere. Telling never ends the work: a closed pipe or a full disk loses the line alone.

    Attributes:
        is_folder: it writes to the run's folder, where each event of a process shall be once.
    """

    is_folder = False

    def emit(self, log_record: logging.LogRecord) -> None:
        if isinstance(log_record.msg, Event):
            with suppress(OSError, ValueError):  # ValueError: a file that was closed
                self.show(log_record.msg)

    def show(self, event: Event) -> None:
        raise NotImplementedError


class Stderr(Sink):
    """Where a process shows its events that has been given no other sink."""

    def show(self, event: Event) -> None:
        if sentence := words(event):
            tell(f"farflung: {sentence}")


EVENTS.addHandler(Stderr(logging.INFO))


def tell(text: str) -> None:
    """Print a line on stderr; if that can't be written to, the work continues without the line."""
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except BrokenPipeError:  # for good
        _let_go(sys.stderr)
    except (OSError, ValueError, AttributeError):  # AttributeError: None, or a script's own stream
        pass


def flush_streams() -> None:
    """Write what stdout and stderr still hold, before the interpreter does, which ends with code 120 if it can't."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            _let_go(stream)


def _let_go(stream: TextIO) -> None:
    """Lead a stream that can't be written to nowhere: its buffer still has the lines that could not be written."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
