# SPDX-License-Identifier: Apache-2.0
"""What launchers say of their replicas."""

import time

import pytest

from farflung.base.events import Event, Kind
from farflung.comm.c10d_transport import C10dTransport
from farflung.comm.member_store import LauncherNotes
from farflung.process.sockets import serve_store
from farflung.testing.ranks import fork_context


@pytest.fixture
def transport():
    return C10dTransport(serve_store("127.0.0.1", 0, wait_for_workers=False))


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


def test_no_question_takes_the_time_that_the_store_needs_for_empty_values(notes):
    notes.put("name", 1, "replica 0")
    notes.put("stopped", 1)
    notes.forget(1, "stopped")

    def ask():
        began = time.perf_counter()
        notes.get("machine", 1), notes.get("stopped", 1)
        return time.perf_counter() - began

    assert min(ask() for _ in range(5)) < 0.2
