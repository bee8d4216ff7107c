# SPDX-License-Identifier: Apache-2.0
"""What launchers say of their replicas."""

import time
from types import SimpleNamespace

import pytest

from farflung.address.c10d_transport import C10dTransport
from farflung.address.member_store import DONE, LATE, Ask, Heartbeats, LauncherNotes, MemberStore
from farflung.base.events import Event, Kind
from farflung.testing.ranks import fork_context
from tests.outer.elastic_run import served


@pytest.fixture
def transport():
    return C10dTransport(served())


@pytest.fixture
def notes(transport):
    return LauncherNotes(transport.board)


def test_what_was_taken_back_is_gone_and_what_nobody_said_is_empty(notes):
    notes.put("name", 1, "replica 0")
    notes.put("stopped", 1)
    assert notes.get("stopped", 1)
    notes.forget(1, "stopped")
    assert not notes.get("stopped", 1)
    assert (notes.get("machine", 1), notes.get("gone", 1)) == ("", "")
    assert (notes.name_of(1), notes.name_of(2)) == ("replica 0", "member 2")
    assert (notes.count_late(1), notes.count_late(1), notes.number_of_loop(1), notes.number_of_loop(3)) == (1, 2, 1, 1)
    for what in ("machine", "process", "gone", "stopped", "in", "left"):
        notes.put(what, 1)
    notes.forget(1)
    assert set(notes.board.list("")) == {"board", "loops/3/1", "name/1", "gone/1"}  # as generations may name it


def test_a_question_and_its_answer_are_there_until_they_are_closed_or_taken(transport):
    members, asks = MemberStore(transport.board.part("loop1")), Ask(3, 2, True, "{}")
    name = members.ask(asks, ["w float32 [2]"], ["b"])
    members.mark_ready(name)
    members.begin_transfer(3, "g7/t3.1", 1)
    assert (members.asks(), members.tensors(name), members.is_ready(name)) == (
        {name: asks},
        (["w float32 [2]"], ["b"]),
        True,
    )
    assert [members.transfer(3, after) for after in (6, 7)] == [("g7/t3.1", 1), None]
    members.close(name)
    members.end_transfer(3)
    assert (members.asks(), members.tensors(name), members.is_ready(name)) == ({}, ([], []), False)
    assert members.transfer(3, 0) is None
    assert [members.answer("refused", name, "it is late") for _ in range(2)] == [True, False]
    assert [members.take_answer("refused", name) for _ in range(2)] == ["it is late", ""]


def test_a_launcher_is_silent_after_two_and_a_half_intervals_of_its_own(notes, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    heartbeats = Heartbeats(notes)
    notes.put("machine", 1, "node")

    def silent_s(seconds):
        clock.now += seconds
        return heartbeats.silent_s(1)

    for every_s, known in ((10.0, [0.0, 0.0, 26.0]), (10.0, [0.0, 0.0, 26.0]), (0.1, [0.0, 0.0, 3.0])):
        notes.beat("node", every_s)
        assert [silent_s(seconds) for seconds in (0, known[2] - 1, 1)] == known
    assert heartbeats.over(notes).silent_s(1) == 3.0
    assert heartbeats.unheard(1) == heartbeats.missing(1) == "its machine gave no sign for 3 s"
    notes.put("stopped", 2)
    assert (heartbeats.unheard(2), heartbeats.silent_s(2)) == ("its process is stopped", 0.0)
    assert heartbeats.missing(2) == "no launcher looks after it, so it is unknown whether it is alive"
    for member, how in ((3, DONE), (4, LATE)):
        notes.put("left", member, how)
    assert [heartbeats.ended(member) for member in (2, 3, 4)] == ["", "its work is done", LATE]


def test_the_launcher_of_a_member_is_told_unless_it_is_the_first_one(notes):
    notes.board.put("first", b"a")
    for member, machine in enumerate("ab", 1):
        notes.put("machine", member, machine)
        notes.note_launcher(machine, "")
        notes.send_to_launcher(member, Event.now(Kind.NOTE, message=f"{member}"))
    assert [[str(event) for event in notes.receive(machine)] for machine in "ab"] == [[], ["2"]]
    assert (notes.num_launchers(), notes.read("launchers/b")) == (2, "unknown")


def tell(port, teller):
    notes = LauncherNotes(C10dTransport(("127.0.0.1", port)).board)
    for number in range(100):
        notes.send(Event.now(Kind.NOTE, message=f"{teller}: {number}"))


def test_no_line_is_lost_while_several_members_tell_and_one_takes(notes, transport):
    context, port = fork_context(), int(transport.address.rpartition(":")[2])
    tellers = [context.Process(target=tell, args=(port, teller)) for teller in range(3)]
    for one in tellers:
        one.start()
    taken = []
    while any(one.is_alive() for one in tellers):
        taken += notes.receive()
    taken += notes.receive()
    assert sorted(map(str, taken)) == sorted(f"{teller}: {number}" for teller in range(3) for number in range(100))
    assert notes.receive() == []


@pytest.mark.parametrize("key", ["run", "loop0/agreed", "loop0/g3/ready/1", "name/1", "launchers/a"])
def test_what_a_run_needs_for_as_long_as_it_lasts_is_written_again_and_nothing_else(notes, monkeypatch, key):
    for one in (key, "loop0/g3/post/1", "first"):
        notes.board.put(one, one.encode())
    monkeypatch.setattr(type(notes.board), "put", lambda board, *row: written.append(row))
    written = []
    notes.renew()
    assert written == [(key, key.encode())]
