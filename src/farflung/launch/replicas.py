# SPDX-License-Identifier: Apache-2.0
"""Starts and supervises replicas that may fail, leave and join at any time, each a world of its own.

The first launcher serves the store in which they meet, so no replica's end affects it; or they meet in a folder or in a
bucket. Each launcher records there how its replicas have ended, which of them are stopped, and that it is alive itself.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil  # type: ignore[import-untyped]

from farflung.address import member_store
from farflung.address.board import numbers_below
from farflung.address.member_store import LauncherNotes
from farflung.address.objects import ObjectBoard
from farflung.base.causes import Cause
from farflung.base.events import EVENTS, FILES_ONLY, Event, Kind, record
from farflung.base.lazy import LazyModule
from farflung.base.signals import WARNINGS, handled, name_of
from farflung.base.words import counted
from farflung.comm.patience import aloud, waiting
from farflung.config import environ
from farflung.config.launch import LaunchSettings
from farflung.launch.agent import newest_checkpoint, read_report
from farflung.launch.codes import CODES, DONE, ENGINE, FAILED, HUNG, OF_REPLICAS
from farflung.launch.plan import has_launchers, lone_environment
from farflung.launch.report import Failure, in_short, show
from farflung.launch.supervisor import SUPERVISED, Supervisor, max_restarts
from farflung.process.failure import ERROR_FILE
from farflung.process.heard import SignalForwarder
from farflung.process.identity import address_of

if TYPE_CHECKING:
    from farflung.address import saved_state
    from farflung.address.saved_state import Saved
    from farflung.address.transport import Transport
    from farflung.launch import run_store
else:
    run_store = LazyModule("farflung.launch.run_store")
    saved_state = LazyModule("farflung.address.saved_state")

_ASK_S = 0.5
_END_WITHIN_S = 35.0  # launchers of replicas give their ranks half a minute
_PART_WITHIN_S = 10.0
_RENEW_S = 6 * 3600.0  # what is written once; purges and rules delete objects that are a day old, at the earliest
_LAST = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # at which replicas sign out


def started(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that is a world of its own."""
    return subprocess.Popen(command, env=lone_environment(variables))


def new_machine_name() -> str:
    """Return a name for a launcher in the store; containers share names of hosts and ids of processes.

    What people read ends before the last dot.
    """
    return f"{socket.gethostname()}:{os.getpid()}.{secrets.token_hex(4)}"


class ReplicaProcess(Protocol):
    """What runs a replica: a process, or a thread of this one."""

    @property
    def pid(self) -> int:
        """The number of the process."""

    def poll(self) -> int | None:
        """Return the exit code, -k for signal k; None: it runs."""

    def send_signal(self, number: int) -> None:
        """Send a signal."""


@dataclass(frozen=True, eq=False)
class _Replica:
    """A process of a replica. The one that is started in its place is another member.

    Args:
        report: the file for its error; None if its own launcher shows that.
    """

    name: str
    member: int
    process: ReplicaProcess
    report: Path | None
    forwarder: SignalForwarder

    def poll(self) -> int | None:
        return self.process.poll()

    def send(self, number: int) -> None:
        if number in WARNINGS:
            self.forwarder.pass_on(number, [self.process.pid])
            return
        started = []
        if number == signal.SIGKILL:  # which leaves nobody who would end what it has started
            with suppress(psutil.NoSuchProcess):
                started = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(number)
        for one in started:
            with suppress(psutil.NoSuchProcess):
                one.kill()


class Launcher:
    """Supervises the replicas of one machine.

    Args:
        start: starts a replica's process, given variables that are this one's alone.
        reports: a folder for the errors of replicas.
        machine: the name of this launcher in the store.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        start: Callable[[Mapping[str, str]], ReplicaProcess],
        transport: Transport,
        reports: Path,
        machine: str,
    ) -> None:
        self._store = run_store.RunStore(transport, lambda: self._supervisor.signal != 0)
        self._start_process, self._where = start, transport.address
        self._machine = machine
        self._is_served = "://" not in transport.address
        self._lasting = "" if self._is_served else settings.meet or settings.join or transport.address
        self._heartbeat_s = settings.heartbeat_s or transport.board.heartbeat_s
        self._tells = transport.board.get("first") == self._machine.encode()  # and so prints all events
        self._supervisor = Supervisor(self._start, self._ended, _END_WITHIN_S, max_restarts(settings), _LAST)
        self._members: defaultdict[str, list[int]] = defaultdict(list)  # ids of each replica's last two processes
        self._places: dict[str, Mapping[str, str]] = {}  # variables of each replica's place
        self._stopped: set[int] = set()  # of these ids
        self._reports, self._num_started = reports, 0
        self._has_own_launchers = has_launchers(settings)
        self._shown: set[str] = set()  # errors
        self._code, self._has_finished, self._is_over = 0, False, False
        self._code_after = 0  # of a replica that has failed once its training was over; it counts if none has finished
        self._unrecorded: dict[int, tuple[int, str]] = {}  # ends of members' processes, while the store is away
        self._renew_at = time.monotonic() + _RENEW_S

    def run(self, places: Sequence[Mapping[str, str]]) -> int:
        """Start a replica at each place; return the exit code once all have ended.

        Args:
            places: variables of each replica's place on this machine, such as its GPUs.
        """
        self._store.ask(lambda notes: notes.note_launcher(self._machine, address_of(os.getpid())), None)
        where = "" if self._tells else f" of {self._machine.rsplit('.', 1)[0]}"
        with handled(self._supervisor.hear, SUPERVISED):
            for number, place in enumerate(places):
                name = f"replica {number}{where}"
                self._places[name] = place
                self._supervisor.add(name)
            self._supervisor.follow({self._beat: self._heartbeat_s})
            self._beat()
            if self._has_finished:
                self._compare_ends()
            self._part()
        if self._supervisor.code is not None:
            record(Kind.NOTE, message=self._how_to_continue())
            return self._supervisor.code
        if self._code or self._has_finished:
            return self._code
        return self._code_after or (DONE if self._is_over else FAILED)

    def _part(self) -> None:
        """Leave. The launcher that serves the store waits for replicas elsewhere that still need it, as to be let in.

        Then it waits a while for their launchers, whose replicas end at the same step.
        """
        self._store.ask(lambda notes: notes.forget_launcher(self._machine), None)
        if not (self._tells and self._is_served and self._has_finished):
            return
        until_s = _PART_WITHIN_S
        for waited_s in waiting(_ASK_S, say=aloud("this launcher", "for others, whose replicas have not ended")):
            self._beat()
            if self._supervisor.signal or not self._store.ask(lambda notes: notes.num_launchers(), 0):
                return
            if self._store.ask(self._is_needed, False):
                until_s = waited_s + _PART_WITHIN_S
            elif waited_s >= until_s:
                return

    def _compare_ends(self) -> None:
        """Compare the weights that the replicas at the end of a loop have, by the digests that these have left."""

        def ends(notes: LauncherNotes) -> dict[str, str]:
            there = [one for one in sorted(numbers_below(notes.board, "weights")) if not notes.get("gone", one)]
            return {notes.name_of(one): notes.get("weights", one) for one in there}

        nothing: dict[str, str] = {}
        found = self._store.ask(ends, nothing)
        loops = {text.partition(" ")[0] for text in found.values()}
        if len(found) > 1 and len(set(found.values())) == 1:
            record(Kind.NOTE, message=f"{counted(len(found), 'replica')} have ended with equal weights")
        elif len(found) > 1 and len(loops) == 1:
            digests = ", ".join(f"{name} with {text.partition(' ')[2]}" for name, text in found.items())
            record(Kind.WARNING, message=f"warning: replicas have ended with different weights, by digests: {digests}")

    def _is_needed(self, notes: LauncherNotes) -> bool:
        """Return whether replicas are at work elsewhere that have not come to the end of their training."""
        there = [one for one in numbers_below(notes.board, "process") if not notes.get("gone", one)]
        missing = self._store.heartbeats.missing
        return any(notes.why_left(one) != member_store.DONE and not missing(one) for one in there)

    def _how_to_continue(self) -> str:
        """Say where the state of a run is that a signal has ended here, and what continues it."""
        checkpoint = newest_checkpoint(self._reports)
        resume = "" if checkpoint is None else f" Its newest checkpoint is {checkpoint}."
        if self._is_served:
            return (
                "the state of this run was in its replicas alone, so none is left here. With --meet and a folder or a "
                f"bucket, the same line would continue the run.{resume}"
            )

        def newest(notes: LauncherNotes) -> Saved | None:
            board = notes.board.part("loop1")
            assert isinstance(board, ObjectBoard)  # as what lasts is
            return next(saved_state.SavedStates(board).newest(), None)

        if (found := self._store.ask(newest, None)) is None:
            return f"no state of this run lies at {self._lasting} yet, so the same line begins it again.{resume}"
        where = f"the state at step {found.position:,} lies at {self._lasting}"
        return f"{where}: the same line continues the run from there; {self._how_to_pull()}.{resume}"

    def _how_to_pull(self) -> str:
        return f"`farflung checkpoint pull {self._lasting} model.safetensors` gets its weights"

    def _start(self, name: str) -> _Replica | None:
        """Start a process of a replica; None if the system refuses it, or if the store, which has to know, is away."""
        member = self._store.ask(lambda notes: self._enroll(notes, name), None)
        if member is None:
            if self._store.is_gone:
                del self._supervisor.due[name]
                self._code = ENGINE
                record(Kind.FAILED, name, how="")
            return None
        report = None
        of_member = zip(environ.MEMBER_VARIABLES, (self._where, str(member)), strict=True)
        variables = {**self._places[name], **dict(of_member), environ.REPLICA: name}
        try:
            if not self._has_own_launchers:
                self._num_started += 1
                report = self._reports / f"attempt_{self._num_started}" / "0" / "error.json"
                report.parent.mkdir(parents=True)
                variables[ERROR_FILE] = str(report)
                variables |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # frameworks want all names of a rank or none
            process = self._start_process(variables)
        except OSError as error:  # no memory, processes or space are left just now
            self._not_started(name, member, f"could not be started ({error})")
            return None
        self._store.ask(lambda notes: notes.put("process", member, address_of(process.pid) or "unknown"), None)
        record(Kind.PROCESS, level=FILES_ONLY, member=member, name=name, pid=process.pid)
        return _Replica(name, member, process, report, SignalForwarder(self._reports.glob))

    def _not_started(self, name: str, member: int, how: str) -> None:
        """Start a replica again in a while, if it may be; the others continue meanwhile."""
        self._note_end(member, FAILED, how)
        del self._supervisor.due[name]
        if not self._supervisor.restart(name, how):
            record(Kind.FAILED, name, how=how)
            self._code = ENGINE

    def _ended(self, replica: _Replica, code: int) -> None:
        """Record the end of a process; restart its replica if it was lost, unless that can't help.

        One that never met the others, or ended by a wrong use, would end in the same way again. One whose training was
        over would not be admitted.
        """
        name = replica.name
        how = f"was killed by {name_of(-code)}" if code < 0 else f"ended with exit code {code}"
        was_in, left = self._note_end(replica.member, code, how)
        how = left if left == member_store.ASKED else how
        if code == 0:
            self._has_finished = True
            if not was_in:
                message = f"warning: {name} has finished, but none of its outer loops ever met the others. Pass "
                message += "membership=launched_membership() to an OuterLoop of your own"
                record(Kind.WARNING, name, message=message)
        if left == member_store.LATE:
            self._is_over = True
            why = "the others have finished the work"
            if self._lasting and not self._has_finished:  # which may have been long ago
                why = f"the run at {self._lasting} has finished its work. Begin another at an address of its own; "
                why += self._how_to_pull()
            record(Kind.REFUSED, name, why=why)
        if code == 0 or left == member_store.LATE or self._supervisor.signal:
            return
        text, cause = self._error_of(replica, code)
        if self._has_finished:  # so the work is done
            record(Kind.NOTE, name, message=f"{name} {how}{text}")
            return
        how += " by a wrong use, see above" if text and cause is Cause.WRONG_USE else text
        was_killed = code < 0 or code > 128  # a launcher under this one reports a signal by such a code
        is_done = left == member_store.DONE
        can_help = (was_in or was_killed) and cause is not Cause.WRONG_USE
        can_restart = can_help and not is_done and not self._store.is_gone
        if can_restart and self._supervisor.restart(name, how):
            return
        record(Kind.FAILED, name, how=f"{how} after its training was over" if is_done else how)
        code = CODES[cause]
        if is_done:
            self._code_after = code
        else:
            self._code = code

    def _enroll(self, notes: LauncherNotes, name: str) -> int:
        """Give a process that is about to start an id of its own; delete the records of the last but one before it.

        Those of the last one stay. The name and the end of each stay recorded: a generation may still name it.
        """
        member, members = notes.enroll(name, self._machine), self._members[name]
        while len(members) > 1:
            notes.forget(members.pop(0))
        members.append(member)
        return member

    def _note_end(self, member: int, code: int, how: str) -> tuple[bool, str]:
        """Record how a member's process has ended; return whether it had met others, and why it had left them."""
        self._unrecorded[member] = code, how
        end: tuple[bool, str] = self._store.ask(lambda notes: self._record_ends(notes)[member], (True, ""))
        return end

    def _record_ends(self, notes: LauncherNotes) -> dict[int, tuple[bool, str]]:
        """Record the ends of members' processes that are not in the store yet; return what `_note_end` does, by id."""
        ends = {}
        for member, (code, how) in list(self._unrecorded.items()):
            ends[member] = bool(notes.get("in", member)), notes.why_left(member)
            if code:
                notes.note_end(member, how)
            else:
                notes.put("left", member, "done")
            del self._unrecorded[member]
        return ends

    def _error_of(self, replica: _Replica, code: int) -> tuple[str, Cause]:
        """Return the error of a replica in brackets, and its cause; show all of it, once if several report the same.

        An import that fails twice in the same way is a wrong use.
        """
        if replica.report is None or not replica.report.exists():
            by_launcher = {HUNG: Cause.LATE, OF_REPLICAS[Cause.WRONG_USE]: Cause.WRONG_USE}
            return "", by_launcher.get(code, Cause.OWN) if self._has_own_launchers else Cause.OWN
        failure = Failure.of(0, code, read_report(replica.report))
        line = in_short(failure)
        is_missing_again = line in self._shown and failure.cause is Cause.MISSING
        if not self._has_finished and line not in self._shown:
            self._shown.add(line)
            show([failure], checkpoint=newest_checkpoint(self._reports), name=replica.name)
        return f" ({line})" if failure.traceback else "", Cause.WRONG_USE if is_missing_again else failure.cause

    def _beat(self) -> None:
        nothing: list[Event] = []
        for event in self._store.ask(self._heartbeats, nothing):
            EVENTS.log(logging.INFO, event)

    def _heartbeats(self, notes: LauncherNotes) -> list[Event]:
        """Record that this launcher is alive, and the states of its replicas; return events for it to record."""
        notes.beat(self._machine, self._heartbeat_s)
        self._record_ends(notes)
        for replica in self._supervisor.running.values():
            member, is_stopped = replica.member, _is_stopped(replica.process.pid)
            if is_stopped != (member in self._stopped):
                self._stopped ^= {member}
                if is_stopped:
                    notes.put("stopped", member)
                else:
                    notes.forget(member, "stopped")
        if not self._is_served:  # if another launcher may take the place of the first one
            first = notes.read("first")
            self._tells = first == self._machine
            if not self._tells and self._store.heartbeats.silent_machine_s(first):
                notes.board.put("first", self._machine.encode())
            if self._tells and time.monotonic() >= self._renew_at:
                self._renew_at = time.monotonic() + _RENEW_S
                self._store.renew()
        return [*(notes.receive() if self._tells else notes.receive(self._machine)), *notes.strangers()]


def _is_stopped(pid: int) -> bool:
    """Return whether a process, or one that it has started, is stopped."""
    try:
        process = psutil.Process(pid)
        return any(one.status() == psutil.STATUS_STOPPED for one in [process, *process.children(recursive=True)])
    except psutil.Error:
        return False
