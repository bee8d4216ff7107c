# SPDX-License-Identifier: Apache-2.0
"""Finds late ranks: a thread on each rank notices a wait that takes too long, and asks the other ranks where they are.

A rank that has waited in one collective for longer than the time allowed asks all ranks which collectives they have
entered and what they are doing. Their watchdogs answer, whatever the ranks are busy with. The waits end in an error,
which names the ranks that have not entered the collective, with their stacks. If these wait as well, it names the ranks
that they wait for instead. If all have entered it, the collective is slow but not stuck, and the wait continues. While
no rank asks, this costs one read of the store per tick.

Much earlier a rank asks whether its wait and those of other ranks are for each other: then none of them can end.

The store lives on the main machine. If that machine or the connection to it is lost, nobody answers questions any more,
and the ranks that ask wait forever. A second thread, which never touches the store, notices that and ends the process.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from farflung.base.causes import Cause
from farflung.base.errors import ConfigError, RankFailure, StateError
from farflung.base.events import tell
from farflung.comm.frames import innermost_calls, user_call
from farflung.comm.mismatch import waits_differ
from farflung.comm.preemption import PreemptionVote
from farflung.comm.presence import PresenceStore
from farflung.comm.torch_group import TORCHS, TorchGroup
from farflung.comm.waits import Wait
from farflung.config import environ
from farflung.process.failure import has_report, record_failure
from farflung.process.sockets import address_on_route_to

_TICK_S = 0.5  # how often a watchdog looks
_ANSWER_S = 5.0  # how long it waits for answers
_TURN_S = 2.0  # how long the others leave it to a rank that asks: it has its answers by then, unless a rank is gone
_CYCLE_S = 5.0  # after which a rank asks for the first time whether it waits for ranks that wait for it

# Where a thread is when it waits in a collective of torch's own: called by its name, by DDP's forward or in a backward.
_WAITS_IN = tuple(f"{Path(dist.__file__).parents[1]}/{part}/" for part in ("distributed", "nn/parallel", "autograd"))

_Tell = Callable[[dict[str, int], dict[int, Any], list[int]], None]  # what a wait needs, answers by rank, silent ranks


class Watchdog:
    """Ends waits for ranks that do not come; each rank has one.

    Collectives of Farflung raise a `RankFailure` with the report. torch's own (DDP's, the script's) can only be ended
    by closing their connections, which gloo allows: the report is printed then. NCCL's are left to torch's watchdog.
    """

    def __init__(self, group: TorchGroup) -> None:
        self._group = group
        self._waits = group.waits
        self._is_gloo = dist.get_backend(group.pg) == "gloo"
        self._timeout_s = 0.0
        self._is_default = False
        self._thread: threading.Thread | None = None
        self._halt = threading.Event()
        self.vote: PreemptionVote | None = None  # that it takes part in for this rank

    def start(self, timeout_s: float, is_default: bool = False) -> None:
        """Watch over the thread that calls this; if it is watched already, do nothing.

        Args:
            timeout_s: how long a rank may wait in a collective that another one has not entered; ConfigError if it is
                watched with another time.
            is_default: this time is a default, which a later call may replace.
        """
        if self._thread is not None:
            if self._is_default and not is_default:
                self._timeout_s, self._is_default = timeout_s, False
            elif timeout_s != self._timeout_s and not is_default:
                raise ConfigError(
                    f"A hang time of {timeout_s:g} s, but this process has {self._timeout_s:g} s already."
                )
            return
        self._timeout_s, self._is_default = timeout_s, is_default
        self._watched = threading.get_ident()
        presence = self._group.presence
        self._presence = PresenceStore(presence.prefix, presence.rank, presence.size, own_connection=True)
        self._presence.hosts = presence.hosts
        self._presence.publish_host(_machine())
        self._seen = self._presence.asked()
        self._beat = time.monotonic()  # when the store last answered
        self._heard_at = -float("inf")  # when any rank last asked
        self._wait: Wait | None = None
        self._since, self._look_s = 0.0, _CYCLE_S
        self._halt.clear()
        self._is_over = False
        self._waits.is_watched = True
        self._thread = threading.Thread(target=self._run, name="farflung watchdog", daemon=True)
        self._thread.start()
        self._second = threading.Thread(target=self._guard, name="farflung watchdog guard", daemon=True)
        self._second.start()
        # A thread that is in the store while the interpreter ends would abort the process. Not by `atexit` alone, which
        # children that `multiprocessing` has forked don't call.
        self._at_exit = Finalize(None, self.stop, exitpriority=0)

    def stop(self) -> None:
        """End the threads, and publish that this rank comes to nothing more."""
        if self._thread is not None:
            self._is_over = True
            self._halt.set()
            self._second.join()
            self._thread.join(_ANSWER_S)  # not for ever: the store may have gone away under it
            self._thread = None
            self._at_exit.cancel()

    def _run(self) -> None:
        with suppress(dist.DistError):  # without a store there is nothing to watch over
            with suppress(StateError):  # nor without a group
                self._watch()
            if self._is_over or self._group.is_destroyed:
                self._presence.mark_ended()
        self._waits.is_watched = False
        if self.vote is not None:
            self.vote.end()

    def _watch(self) -> None:
        while not self._halt.wait(_TICK_S):
            self._answer()
            if self.vote is not None:
                self.vote.look(self._presence)
            self._presence.read_hosts()
            self._beat = now = time.monotonic()
            wait, is_my_turn = self._current_wait(), now - self._heard_at > _TURN_S
            overdue = self._waits.overdue
            if overdue is not None and is_my_turn:
                self._ask_all(overdue[0], partial(self._tell_late, overdue[1], True), is_overdue=True)
                self._waits.overdue = None
            elif wait != self._wait:
                self._wait, self._since, self._look_s = wait, now, _CYCLE_S
            elif wait is None or not is_my_turn:
                continue
            elif now - self._since > self._timeout_s:
                self._ask_all(wait, partial(self._tell_late, self._timeout_s, False))
                self._since, self._look_s = time.monotonic(), _CYCLE_S
            elif now - self._since > self._look_s:
                self._ask_all(wait, self._tell_cycle)
                self._look_s *= 2

    def _answer(self) -> None:
        """Answer what was asked since the last look; obey a report, after which there is nothing more to watch."""
        asked = self._presence.asked()
        if asked == self._seen:
            return
        self._seen, self._heard_at = asked, time.monotonic()
        report = self._presence.published("hang") or self._presence.published("mismatch")
        if not report:
            wait = self._current_wait()
            answer = {
                "question": asked,
                "entered": self._waits.entered | self._entered_torchs(),
                "needs": self._needs(wait) if wait == self._wait else {},  # a wait of a moment explains nothing
                "is_overdue": self._waits.overdue is not None,
                "stack": "".join(innermost_calls(self._frame()).format()).rstrip() or "  (it has ended)",
                "started": {} if self._is_gloo else self._group.collectives_of_torch(),
                "doing": str(user_call(self._frame())),
            }
            self._presence.post(json.dumps(answer), "answer")
            return
        self._halt.set()
        wait = self._current_wait()
        if wait is not None and wait.group == TORCHS:
            _publish(f"Rank {self._group.rank} stopped waiting: {report}.")
            for group in self._group.with_parts():
                group.abort()

    def _guard(self) -> None:
        """End this process when it waits for the others and the store has not answered for the time allowed."""
        beat, silent_s = self._beat, 0.0
        while not self._halt.wait(_TICK_S):
            # Counted, not measured: time in which this process was stopped, or its lock held, says nothing.
            silent_s = silent_s + _TICK_S if beat == self._beat else 0.0
            beat = self._beat
            is_over = silent_s > self._timeout_s + _ANSWER_S
            if is_over and self._frame() is not None and self._current_wait() is not None:
                _publish(self._loss(silent_s))
                os._exit(1)  # a thread that waits for the store can't be woken up

    def _loss(self, silent_s: float) -> str:
        hosts = self._presence.hosts
        there = [rank for rank in range(self._group.size) if hosts.get(rank) == hosts.get(0)] if hosts else [0]
        endpoint = f"{environ.text('MASTER_ADDR')}:{environ.text('MASTER_PORT')}"
        return (
            f"Rank {self._group.rank} stopped waiting: {self._presence.describe(there)} ({endpoint}, where the run's "
            f"store is) did not answer for {silent_s:.0f} s, so that machine or the line to it is gone. This rank was "
            f"in {user_call(self._frame())}."
        )

    def _current_wait(self) -> Wait | None:
        wait = self._waits.waiting.get(self._watched)
        if wait is not None:
            return wait
        frame = self._frame() if self._is_gloo else None
        if frame is not None and frame.f_code.co_filename.startswith(_WAITS_IN):
            return Wait(TORCHS, sum(self._entered_torchs().values()), "")
        return None

    def _entered_torchs(self) -> dict[str, int]:
        return self._group.collectives_of_torch() if self._is_gloo else {}

    def _needs(self, wait: Wait | None) -> dict[str, int]:
        """Return how many collectives of each group the others must have entered before this wait can end."""
        if wait is None:
            return {}
        # Nothing tells which group torch waits in.
        return self._entered_torchs() if wait.group == TORCHS else {wait.group: wait.number}

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._watched)

    def _ask_all(self, wait: Wait, tell: _Tell, is_overdue: bool = False) -> None:
        """Ask all ranks where they are; pass `tell` what this wait needs, their answers, and the silent ranks.

        Args:
            is_overdue: this rank waits no longer; a collective of torch's own may have run out of time.
        """
        needs = self._needs(wait) | (self._entered_torchs() if is_overdue else {})
        question = self._presence.ask()
        deadline = time.monotonic() + _ANSWER_S
        answers: dict[int, Any] = {}
        missing = set(range(self._group.size))
        while missing and time.monotonic() < deadline and not self._halt.wait(_TICK_S / 5):
            self._answer()  # and give this rank's own answer
            posts = self._presence.posts("answer", ranks=missing)
            came = {rank: json.loads(text) for rank, text in posts.items()}
            answers |= {rank: answer for rank, answer in came.items() if answer["question"] >= question}
            missing -= answers.keys()
            self._beat = time.monotonic()
        if (is_overdue or self._current_wait() == wait) and not self._halt.is_set():
            tell(needs, answers, sorted(missing))

    def _tell_late(
        self, seconds: float, is_overdue: bool, needs: dict[str, int], answers: dict[int, Any], silent: list[int]
    ) -> None:
        """Publish which ranks have not entered the collective that this rank waits or waited in, and where they are.

        Args:
            seconds: how long it has waited.
        """
        found = _find_late(needs, answers)
        if is_overdue and not found:  # DDP's first passes have collectives that torch does not count
            found = {rank for rank, one in answers.items() if _is_elsewhere(one)}
        late = {rank: answers[rank]["stack"] for rank in sorted(found)}
        if late or silent:
            self._presence.publish_hang(self._hang_report(late, silent, seconds, is_overdue))

    def _tell_cycle(self, needs: dict[str, int], answers: dict[int, Any], silent: list[int]) -> None:
        """Publish where the ranks are, if all that hold up this wait are waiting for one of themselves."""
        ranks = _holding_up(needs, answers)
        if ranks and not silent and all(_behind(answers[rank]["needs"], answers) for rank in ranks):
            ranks.add(self._group.rank)
            self._presence.publish_mismatch(waits_differ({rank: answers[rank]["doing"] for rank in ranks}))

    def _is_machine(self, ranks: list[int]) -> bool:
        """Return whether `ranks` are all those of other machines."""
        hosts = self._presence.hosts
        lost = {hosts.get(rank) for rank in ranks}
        rest = {hosts.get(rank) for rank in range(self._group.size) if rank not in ranks}
        return None not in lost and not lost & rest

    def _hang_report(self, late: dict[int, str], silent: list[int], seconds: float, is_overdue: bool) -> str:
        call, named = user_call(self._frame()), self._presence.describe
        lines = [f"{call} has not ended for {seconds:g} s"]
        if late:
            lines = [f"{named(sorted(late))} did not reach {call} within {seconds:g} s"]
        for stack in dict.fromkeys(late.values()):
            who = named([rank for rank, other in late.items() if other == stack])
            lines.append(f"{who} was here, innermost call last:\n{stack}")
        if silent:
            why = "the process is gone or stopped, or in native code that holds Python's lock"
            if self._is_machine(silent):
                why = "the machine is gone, or the line to it"
            lines.append(f"{named(silent)} did not answer: {why}")
        allowed = "--hang_timeout_s, WatchdogKwargs(timeout_s=) or FARFLUNG_HANG_TIMEOUT_S"
        if is_overdue or (
            self._is_default and not environ.text("FARFLUNG_HANG_TIMEOUT_S")
        ):  # the watchdog may be first
            allowed = "InitProcessGroupKwargs(timeout=), the time-out of the process group"
        lines.append(f"If it may take so long, allow more: {allowed}")
        return "\n".join(lines)


def _find_late(needs: dict[str, int], answers: dict[int, Any]) -> set[int]:
    """Return the ranks that hold up a wait in the end and wait for nobody; if there are none, those it waits for."""
    ranks = _holding_up(needs, answers)
    return {rank for rank in ranks if _is_elsewhere(answers[rank])} or _behind(needs, answers)


def _is_elsewhere(answer: dict[str, Any]) -> bool:
    """Return whether a rank waits in no collective, nor has waited in one that ran out of time."""
    return not answer["needs"] and not answer["is_overdue"]


def _holding_up(needs: dict[str, int], answers: dict[int, Any]) -> set[int]:
    """Return the ranks that a wait is for, and those that these wait for, and so on."""
    found = new = _behind(needs, answers)
    while new:
        new = {other for rank in new for other in _behind(answers[rank]["needs"], answers)} - found
        found = found | new
    return found


def _behind(needs: dict[str, int], answers: dict[int, Any]) -> set[int]:
    """Return the ranks that have entered too few; ranks outside a group are never late in it."""
    counts = {rank: answer["entered"] for rank, answer in answers.items()}
    return {rank for rank, count in counts.items() if any(count.get(name, n) < n for name, n in needs.items())}


def _publish(text: str) -> None:
    """Report a failure to the launcher, or print it if there is none."""
    if has_report():
        record_failure(RankFailure(text, Cause.LATE))
    else:
        tell(text)


def _machine() -> str:
    """Return the name of this machine, and its address for the main one: cloned machines have the same name."""
    address = ""
    with suppress(OSError):
        main = socket.getaddrinfo(environ.text("MASTER_ADDR") or "localhost", None)[0][4][0]
        address = address_on_route_to(str(main))
    return f"{socket.gethostname()} {address}"
