# SPDX-License-Identifier: Apache-2.0
"""What a supervisor does with its children: signals, the end, restarts. Children are values, and time is a counter."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from farflung.base.events import Event, Kind, Sink
from farflung.base.signals import Request
from farflung.launch import supervisor as room
from farflung.launch.codes import BY_SIGNAL, REQUEUE
from farflung.launch.events import showing
from farflung.launch.supervisor import Supervisor

GRACE_S = 30.0


class Child:
    """Ends with its code once it is to, or by one of the signals `heeds`."""

    def __init__(self, name: str, ends: int | None, heeds: tuple[int, ...]) -> None:
        self.name, self.code, self.heeds, self.sent = name, ends, heeds, list[int]()

    def poll(self) -> int | None:
        return self.code

    def send(self, number: int) -> None:
        self.sent.append(number)
        if number in self.heeds:
            self.code = -number


class Lab:
    """A supervisor of children that end as the test says, on a clock that each look moves by a second."""

    def __init__(self, max_restarts: int = 0) -> None:
        self.now, self.children, self.ends = 1000.0, list[Child](), dict[str, Iterator[int | None]]()
        self.heeds: tuple[int, ...] = (signal.SIGKILL,)
        self.acts: dict[int, list[Request]] = {}  # by second
        self.supervisor = Supervisor(self.start, self.ended, GRACE_S, max_restarts)
        self.lost: list[str] = []

    def start(self, name: str) -> Child | None:
        code = next(self.ends.get(name, iter([None])))
        if code == "later":
            return None
        self.children.append(Child(name, code, self.heeds))
        return self.children[-1]

    def ended(self, child: Child, code: int) -> None:
        if code and not self.supervisor.restart(child.name, f"ended with {code}"):
            self.lost.append(child.name)

    def look(self) -> None:
        self.now += 1.0
        for request in self.acts.pop(int(self.now) - 1000, []):
            self.supervisor.hear(request)

    def train(self, *names: str) -> None:
        """Start children, and follow them to their ends."""
        for name in names:
            self.supervisor.add(name)
        self.supervisor.follow({self.look: 0.0})

    def sent(self) -> list[list[int]]:
        return [child.sent for child in self.children]


@pytest.fixture
def lab(monkeypatch):
    made = Lab(max_restarts=2)

    def sleep(seconds):
        assert 0.01 <= seconds <= 0.1, "it looks neither without a pause nor late"

    monkeypatch.setattr(room.time, "monotonic", lambda: made.now)
    monkeypatch.setattr(room.time, "sleep", sleep)
    return made


@pytest.mark.parametrize(("number", "at", "killed_s"), [(signal.SIGINT, [1], GRACE_S), (signal.SIGHUP, [1, 4], 3)])
def test_children_that_heed_no_signal_are_killed_when_their_time_is_over_or_at_the_second_one(
    number, at, killed_s, lab
):
    lab.acts = {second: [Request(number if second == 1 else signal.SIGINT, 1, 0)] for second in at}
    lab.train("a", "b")
    assert lab.sent() == [[signal.SIGINT if number == signal.SIGINT else signal.SIGTERM, signal.SIGKILL]] * 2
    assert abs(lab.now - 1000 - killed_s) <= 3
    assert lab.supervisor.code == BY_SIGNAL + number


def test_sigkill_comes_again_until_a_child_has_ended(lab):
    lab.heeds = (signal.SIGHUP,)  # none of what is sent
    lab.supervisor.add("a")
    lab.acts = {k: [Request(signal.SIGTERM, 1, 0)] for k in (1, 2)}

    def look():
        lab.look()
        if lab.now > 1020:
            lab.children[0].code = -signal.SIGKILL

    lab.supervisor.follow({look: 0.0})
    assert lab.children[0].sent[:2] == [signal.SIGTERM, signal.SIGKILL]
    assert lab.children[0].sent.count(signal.SIGKILL) == 4, "every five seconds"


def test_a_warning_reaches_all_and_ends_none_unless_it_is_the_last_signal(lab):
    lab.ends = {"a": iter([None, None])}
    lab.heeds = (signal.SIGKILL, signal.SIGUSR1)
    lab.acts = {1: [Request(signal.SIGUSR1, 1, 0)], 9: [Request(signal.SIGTERM, 1, 0)]}
    lab.train("a")
    assert lab.sent()[0] == [signal.SIGUSR1]
    assert len(lab.children) == 2, "what has ended at a warning was not started again"
    lab.supervisor = Supervisor(lab.start, lab.ended, GRACE_S, 3, (signal.SIGUSR1,))
    lab.acts, lab.now, lab.ends = {1: [Request(signal.SIGUSR1, 1, 0)]}, 1000.0, {"a": iter([None])}
    lab.train("a")
    assert lab.supervisor.code == REQUEUE


def test_a_child_is_restarted_after_waits_that_double_and_only_so_often_within_an_hour(lab):
    lab.supervisor = Supervisor(lab.start, lab.ended, GRACE_S, max_restarts=8)
    lab.ends = {"a": iter([1] * 9), "b": iter([0])}
    events = list[Event]()
    sink = Sink()
    sink.show = events.append
    with showing(sink):
        lab.train("a", "b")
    waits = [event.facts["wait_s"] for event in events if event.kind is Kind.RESTARTED]
    assert (waits, lab.lost) == ([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0], ["a"])
    assert lab.supervisor.code is None
    lab.now += 3601
    lab.ends = {"a": iter([1, 0])}
    lab.train("a")
    assert lab.lost == ["a"]


def test_nothing_starts_after_a_signal_and_what_was_starting_is_ended_too(lab):
    lab.ends = {"a": iter([1, None]), "late": iter(["later"] * 100)}
    lab.acts = {1: [Request(signal.SIGTERM, 1, 0)]}
    lab.train("a", "late")
    assert not lab.supervisor.due
    assert [child.name for child in lab.children] == ["a"]

    def interrupted(name: str) -> Child:
        lab.supervisor.hear(Request(signal.SIGINT, 1, 0))
        return Child(name, None, (signal.SIGINT,))

    lab.supervisor = Supervisor(interrupted, lambda *_: None, GRACE_S)
    lab.supervisor.add("b")
    assert lab.supervisor.running["b"].sent == [signal.SIGINT]


def test_children_of_a_run_that_is_to_end_get_their_time_once(lab):
    lab.supervisor.add("a")
    lab.supervisor.end_within(5)
    lab.supervisor.end_within(20)
    times = []
    lab.supervisor.follow({lab.look: 0.0, lambda: times.append(lab.now): 10.0})
    assert times == [1001.0, 1011.0, 1021.0, 1031.0]
    assert not lab.supervisor.restart("a", "ended"), "the run is to end"
    assert lab.sent() == [[signal.SIGTERM, signal.SIGKILL]]
    assert abs(lab.now - 1000 - 5 - GRACE_S) <= 3
