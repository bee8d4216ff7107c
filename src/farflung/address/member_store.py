# SPDX-License-Identifier: Apache-2.0
"""Records that the members of an elastic run and their launchers exchange, on one board.

The board alone decides which replicas take part: a log holds the generations, and the last one counts.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from farflung.address.board import Board, Log, forget, numbers_below, vanished
from farflung.base.events import Event, Kind
from farflung.base.words import in_seconds

DONE, LATE = "done", "too late"  # why a member has left: its work is done, or that of the others was before it came
ASKED = "was asked to end, and did so after a round"
_HEARTBEATS_LOST, _LEAST_LOST_S = 2.5, 2.5  # intervals without a heartbeat of a launcher; minimum in seconds
_OF_QUESTION = re.compile(r"(\d+)\.(\d+)")
_OF_GENERATION = re.compile(r"g(\d+)/")
# What is written once and needed for as long as the run lasts.
_OF_LOG = re.compile(r"(ends|loops/\d+|place/\d+|loop\d+/(?:generation|saved)|data/\d+/epochs)/\d+")
_LASTING = re.compile(
    r"run|(?:name|machine|process|in|gone|left|lates)/\d+|launchers/.+|loop\d+/(?:(?:g\d+/ready|left)/\d+|agreed)"
)
_FIRST = "first"  # the launcher that prints all events

_Row = TypeVar("_Row")


@dataclass(frozen=True)
class Record:
    """A generation, as the board records it."""

    number: int  # 1 for the first one
    by: int  # who has put it there
    ids: tuple[int, ...]  # of its members, in the order of their ranks
    newcomers: tuple[int, ...] = ()  # the ids of those that get the state that the others share
    common: Mapping[int, int] = field(default_factory=dict)  # buckets that all apply of open rounds, by vote
    past: int = 0  # the number of the first vote that no member has had yet
    lost: Mapping[int, str] = field(default_factory=dict)  # why members of the generation before are not in it, by id
    odd: tuple[int, ...] = ()  # those of them whose state was not that of the others
    began: int = 0  # the generation in which training began, as nobody had anything that was trained
    saved: str = ""  # the name of the state at the run's address that all of them begin with
    disputes: int = 0  # how many decisions in a row have left members in that accuse each other
    ended: int = 0  # after a loss: some member has closed each vote before this one that is not in `common`
    acts: int = 0  # how many acts outside of rounds some member has ended in the generation before

    @property
    def is_fresh(self) -> bool:
        """Whether nobody had anything that was trained, so all begin alike."""
        return self.began == self.number

    @property
    def giver(self) -> int:
        """The member that gives newcomers the state."""
        return next(one for one in self.ids if one not in self.newcomers)


@dataclass(frozen=True)
class Post:
    """How far a member's rounds have come when a generation ends."""

    votes: int  # the number of its next vote
    has_state: bool  # it has the state that members share
    complete: Mapping[int, int] = field(default_factory=dict)  # buckets that it could apply of open rounds, by vote
    odd: Mapping[int, str] = field(default_factory=dict)  # members to exclude: why, by id
    acts: int = 0  # how many acts outside of rounds it has ended
    in_act: bool = False  # it was in the next one


@dataclass(frozen=True)
class Ask:
    """A replica asks to be admitted."""

    member: int
    last: int  # the number of the generation that it was in before, 0 for none
    has_state: bool  # it has the state that members shared then
    description: str = "{}"  # of itself, as JSON


def encode(row: Any) -> bytes:
    """Return one of the above as JSON."""
    return json.dumps(asdict(row)).encode()


def decode(kind: type[_Row], content: bytes) -> _Row:
    """Undo `encode`: numbers that are keys become numbers again, and lists tuples."""

    def keyed(pairs: dict[str, Any]) -> dict[int | str, Any]:
        return {int(key) if key.isdecimal() else key: value for key, value in pairs.items()}

    row = json.loads(content, object_hook=keyed)
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in row.items()})


Note: TypeAlias = Literal["name", "machine", "process", "gone", "stopped", "in", "left", "weights"]


class LauncherNotes:
    """Records of members and launchers by the ids of the members: of launchers about processes they have started, too.

        name, machine      how a member is called; which launcher looks after it, if any does
        process            its process, as its launcher identifies it
        gone, stopped      how its process has ended; there while it is stopped
        in                 there once it has been in a generation
        left               why it no longer takes part: `done` if its process has ended well, `too late` if it asked to
                           be admitted after the run had ended
        weights            the latest outer loop that has ended on it, and a digest of its weights then
        loop<number>/left  why it no longer takes part in one of its outer loops: `done` if that has ended
        lates              how often it was excluded because it was late
        loops              its outer loops, which are numbered as other members number theirs
        ends               a log in which each end of a process gets a number
        launchers          those that are at work, each with the identity of its process
        beat               the latest heartbeat of the launcher of a machine
        events             those that the first launcher has yet to record, or that of a machine
        first              the machine of the first launcher, or of its successor

    Args:
        board: the run's.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self._ends = Log(board, "ends")

    def read(self, key: str) -> str:
        """Return a text; empty if there is none."""
        return (self.board.get(key) or b"").decode()

    # ---- of members

    def enroll(self, name: str, machine: str = "") -> int:
        """Give a process that is about to start an id that no other has had, whatever records have vanished.

        It is the time in milliseconds, as the oldest of those that ask for admission comes first.
        """
        member = time.time_ns() // 1_000_000
        while not self.board.put_new(f"name/{member}", f"{name}\n{secrets.token_hex(4)}".encode()):
            member += 1  # another one was enrolled in the same moment
        if machine:
            self.put("machine", member, machine)
        return member

    def put(self, what: Note, member: int, text: str = "1") -> None:
        self.board.put(f"{what}/{member}", text.encode())

    def get(self, what: Note, member: int) -> str:
        return self.read(f"{what}/{member}")

    def forget(self, member: int, *what: Note) -> None:
        self.board.delete(*(f"{key}/{member}" for key in what or {*get_args(Note), "lates"} - {"name", "gone"}))
        if not what:
            forget(self.board, f"loops/{member}/")

    def number_of_loop(self, member: int) -> int:
        """Return a number for one more outer loop of a member."""
        number = self._loops_of(member).count()
        if number == 1 and self.get("in", member):
            raise vanished(f"loops/{member}")
        return number

    def leave_loop(self, loop: str, member: int, why: str) -> None:
        """Record why a member no longer takes part in one of its outer loops; a script may continue to another."""
        self.board.put(f"{loop}/left/{member}", why.encode())

    def why_left(self, member: int, loop: str = "") -> str:
        """Return why a member no longer takes part in an outer loop, or else in its latest; empty if it does."""
        if left := self.get("left", member):
            return left
        return self.read(f"{loop or f'loop{self._loops_of(member).last()[0]}'}/left/{member}")

    def have_left(self, loop: str) -> set[int]:
        """Return the members that may no longer take part in an outer loop: records say why."""
        return {*numbers_below(self.board, "left"), *numbers_below(self.board, f"{loop}/left")}

    def is_done_with(self, member: int, loop: str) -> bool:
        """Return whether a member's work in an outer loop is done, or it has continued from there to a later one."""
        left = self.why_left(member, loop)
        return left == DONE or (bool(left) and self._loops_of(member).last()[0] > int(loop.removeprefix("loop")))

    def _loops_of(self, member: int) -> Log:
        return Log(self.board, f"loops/{member}")

    def note_end(self, member: int, how: str) -> None:
        self.put("gone", member, ASKED if self.why_left(member) == ASKED else how)
        self._ends.count()

    def num_ends(self) -> int:
        """Return how many processes have ended that were not done."""
        return self._ends.last()[0]

    def num_lates(self, member: int) -> int:
        return int(self.read(f"lates/{member}") or 0)

    def count_late(self, member: int) -> int:
        """Count one more exclusion of a late member; return how many there were. The member that decides calls this."""
        num_lates = self.num_lates(member) + 1
        self.board.put(f"lates/{member}", str(num_lates).encode())
        return num_lates

    def name_of(self, member: int) -> str:
        return self.get("name", member).partition("\n")[0] or f"member {member}"

    # ---- of launchers

    def note_launcher(self, machine: str, process: str) -> None:
        self.board.put(f"launchers/{machine}", (process or "unknown").encode())

    def forget_launcher(self, machine: str) -> None:
        self.board.delete(f"launchers/{machine}")

    def num_launchers(self) -> int:
        return len(self.board.list("launchers/"))

    def take_over(self, machine: str, has_ended: Callable[[str], bool]) -> None:
        """Record ends of members that no launcher has seen, and take the place of the first launcher if it has ended.

        Args:
            has_ended: returns whether the process of an identity is known to have ended.
        """
        for member in numbers_below(self.board, "process"):
            if has_ended(self.read(f"process/{member}")):
                if not self.get("gone", member) and not self.why_left(member):
                    self.note_end(member, "ended after its launcher")
                self.forget(member, "process")
        for key in self.board.list("launchers/"):
            if has_ended(self.read(key)):
                ended = key.partition("/")[2]
                if self.read("first") == ended:
                    self.board.put("first", machine.encode())
                self.forget_launcher(ended)

    def renew(self) -> None:
        """Write again what is needed for as long as the run lasts, as a purge or a rule on old objects deletes it."""
        keys = self.board.list("")
        for name in {found[1] for key in keys if (found := _OF_LOG.fullmatch(key))}:
            Log(self.board, name).renew()
        for key in filter(_LASTING.fullmatch, keys):
            if content := self.board.get(key):
                self.board.put(key, content)

    def beat(self, machine: str, every_s: float) -> None:
        """Write a heartbeat of a launcher, which writes one every `every_s` seconds."""
        self.board.put(f"beat/{machine}", f"{every_s:g} {secrets.token_hex(4)}".encode())

    def latest_beat(self, machine: str) -> str:
        return self.read(f"beat/{machine}")

    # ---- what they print

    def send(self, event: Event, machine: str = _FIRST) -> None:
        """Send an event to the first launcher, or to that of a machine, which records it."""
        key = f"events/{machine}/{time.time_ns():020}.{secrets.token_hex(4)}"
        self.board.put(key, event.to_json().encode())

    def strangers(self) -> list[Event]:
        """Return, once, what this process has found on the board that was not sealed with the run's key."""
        notices = [] if self.board.seal is None else self.board.seal.versions.notices
        return [Event.now(Kind.REFUSED, message=notices.pop(0)) for _ in range(len(notices))]

    def send_to_launcher(self, member: int, event: Event) -> None:
        """Send an event to the launcher of a member, unless it is the first one, which records all events."""
        machine = self.get("machine", member)
        if machine and machine != self.read("first"):
            self.send(event, machine)

    def receive(self, machine: str = _FIRST) -> list[Event]:
        """Return the events sent to the first launcher, or to that of a machine, since the last call."""
        keys = sorted(self.board.list(f"events/{machine}/"))
        lines = list(filter(None, map(self.read, keys)))  # one that is sealed otherwise is none
        self.board.delete(*keys)
        events = [Event.of_json(line) or Event.now(Kind.NOTE, message=line) for line in lines]
        if self.board.seal is None:
            return events
        is_news = self.board.seal.versions.is_news  # several members find the same objects of strangers
        of_strangers = [event.kind is Kind.REFUSED and "message" in event.facts for event in events]
        return [event for event, is_one in zip(events, of_strangers, strict=True) if not is_one or is_news(str(event))]


class Heartbeats:
    """Decides from the heartbeats of launchers whether their members are alive; nothing else does.

    Args:
        loop: the outer loop that they are members of.
    """

    def __init__(self, notes: LauncherNotes, loop: str = "") -> None:
        self._notes, self._loop = notes, loop
        self._beats: dict[str, tuple[str, float]] = {}  # by machine: the latest one, and since when it is there

    def over(self, notes: LauncherNotes) -> Heartbeats:
        """Return the same, read from a board with another patience."""
        found = Heartbeats(notes, self._loop)
        found._beats = self._beats
        return found

    def ended(self, member: int) -> str:
        """Return how a member has ended, or left the loop; empty while no record says that it has."""
        if gone := self._notes.get("gone", member):
            return gone
        left = self._notes.why_left(member, self._loop)
        return "its work is done" if left == DONE else left

    def silent_s(self, member: int) -> float:
        """Return how many seconds the launcher of a member has been silent, if those are too many; else 0."""
        machine = self._notes.get("machine", member)
        return self.silent_machine_s(machine) if machine else 0.0

    def silent_machine_s(self, machine: str) -> float:
        """Return how many seconds a launcher has been silent, if those are too many; else 0."""
        beat, now = self._notes.latest_beat(machine), time.monotonic()
        before, since = self._beats.get(machine, ("", now))
        self._beats[machine] = (beat, since if beat == before else now)
        silent = now - self._beats[machine][1]
        every_s = float(beat.partition(" ")[0] or 0)
        return silent if silent > max(_LEAST_LOST_S, _HEARTBEATS_LOST * every_s) else 0.0

    def unheard(self, member: int) -> str:
        """Return why a member that may be alive can do nothing now; empty if no reason is known."""
        if silent_s := self.silent_s(member):
            return f"its machine gave no sign for {in_seconds(silent_s)}"
        return "its process is stopped" if self._notes.get("stopped", member) else ""

    def missing(self, member: int) -> str:
        """Return why a member that has not ended may never come; empty if its launcher says that it runs."""
        if not self._notes.get("machine", member):
            return "no launcher looks after it, so it is unknown whether it is alive"
        return self.unheard(member)


class MemberStore:
    """Records that the members of one outer loop exchange.

        generation               the log of each `Record`
        ask, tensors             replicas that ask to be admitted, and the tensors they train, by the question's name
        transfer                 the latest transfer of the shared state to a replica that asks
        ready                    replicas that ask, and have got so much of it that they may be admitted
        refused, differs         why a replica is not admitted, which ends it alone; how an admitted one differs
        g<number>/<what>/<member>    the latest record of a member in a generation
        g<number>/broken         why a generation is over, as a collective in it can't end; the first reason stays

    Args:
        board: for this loop alone.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self._log = Log(board, "generation")

    def record(self) -> Record | None:
        content = self._log.last()[1]
        return None if content is None else decode(Record, content)

    def current(self) -> Record:
        """Return the latest generation, on a member that has been in one; Unreachable if all of them have vanished."""
        if (record := self.record()) is None:
            raise vanished("generation")
        return record

    def record_of(self, number: int) -> Record | None:
        """Return a generation by its number; None if it is not there, or not any more."""
        content = self._log.get(number)
        return None if content is None else decode(Record, content)

    def append(self, record: Record) -> bool:
        """Append a generation to the log, unless the current one no longer has the number before it."""
        return self._log.append(record.number - 1, encode(record))

    # ---- asking to be admitted

    def ask(self, asks: Ask, tensors: Iterable[str] = (), could: Iterable[str] = ()) -> str:
        """Ask to be admitted, with a line for each tensor that is exchanged or could be; return the question's name."""
        name = f"{asks.member}.{asks.last}"
        self.board.put(f"tensors/{name}", json.dumps([list(tensors), list(could)]).encode())
        self.board.put(f"ask/{name}", encode(asks))
        return name

    def has_asks(self) -> bool:
        return bool(self.board.list("ask/"))

    def askers(self) -> dict[str, tuple[int, int]]:
        """Return who asks by each question: the member, and the number of the generation that it was in before."""
        found = {
            name: _OF_QUESTION.fullmatch(name) for name in (key.removeprefix("ask/") for key in self.board.list("ask/"))
        }
        return {name: (int(one[1]), int(one[2])) for name, one in found.items() if one}

    def asks(self) -> dict[str, Ask]:
        keys = self.board.list("ask/")
        found = zip(keys, self.board.map(self.board.get, keys), strict=True)
        return {key.removeprefix("ask/"): decode(Ask, content) for key, content in found if content is not None}

    def tensors(self, name: str) -> tuple[list[str], list[str]]:
        """Return what a replica that asks exchanges, and what it could exchange; nothing if its question is closed."""
        content = self.board.get(f"tensors/{name}")
        trained, could = ([], []) if content is None else json.loads(content)
        return trained, could

    def close(self, name: str) -> None:
        """Delete a question that is answered, or that no replica waits with any more."""
        self.board.delete(*(f"{what}/{name}" for what in ("ask", "tensors", "ready")))

    def mark_ready(self, name: str) -> None:
        """Record that a replica that asks may be admitted."""
        self.board.put(f"ready/{name}", b"1")

    def is_ready(self, name: str) -> bool:
        return self.board.has([f"ready/{name}"])

    def begin_transfer(self, to: int, name: str, giver: int) -> None:
        """Tell a replica that asks where the shared state comes from; `name` begins with `g<number>/`."""
        self.board.put(f"transfer/{to}", f"{name} {giver}".encode())

    def end_transfer(self, to: int) -> None:
        self.board.delete(f"transfer/{to}")

    def transfer(self, to: int, after: int) -> tuple[str, int] | None:
        """Return the latest transfer to a replica, begun in a generation after the number `after`, and its giver."""
        name, _, giver = (self.board.get(f"transfer/{to}") or b"").decode().partition(" ")
        found = _OF_GENERATION.match(name)
        return (name, int(giver)) if found and int(found[1]) > after else None

    def answer(self, what: Literal["refused", "differs"], name: str, why: str) -> bool:
        """Answer a question; return whether this answer is the first one."""
        return self.board.put_new(f"{what}/{name}", f"{secrets.token_hex(4)} {why}".encode())

    def take_answer(self, what: Literal["refused", "differs"], name: str) -> str:
        """Return an answer, once; empty if there is none."""
        content = self.board.get(f"{what}/{name}")
        if content is None:
            return ""
        self.board.delete(f"{what}/{name}")
        return content.decode().partition(" ")[2]

    # ---- in a generation

    def put(self, generation: int, what: str, member: int, text: str = "1") -> None:
        self.board.put(f"g{generation}/{what}/{member}", text.encode())

    def all_put(self, generation: int, what: str, members: Iterable[int]) -> bool:
        return self.board.has(f"g{generation}/{what}/{member}" for member in members)

    def get(self, generation: int, what: str, members: Iterable[int]) -> dict[int, str]:
        members = [*members]
        found = self.board.map(self.board.get, [f"g{generation}/{what}/{member}" for member in members])
        return {one: content.decode() for one, content in zip(members, found, strict=True) if content is not None}

    def mark_broken(self, generation: int, reason: str) -> None:
        self.board.put_new(f"g{generation}/broken", reason.encode())

    def broken(self, generation: int) -> str:
        return (self.board.get(f"g{generation}/broken") or b"").decode()

    def forget_before(self, generation: int, kept: Sequence[str] = ()) -> None:
        """Delete the entries of earlier generations, but for those of transfers with names in `kept`."""
        below = tuple(f"{name}/" for name in kept)
        found = {key: _OF_GENERATION.match(key) for key in self.board.list("g") if not key.startswith(below)}
        self.board.delete(*(key for key, one in found.items() if one and int(one[1]) < generation))
