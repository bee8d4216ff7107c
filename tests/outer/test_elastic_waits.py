# SPDX-License-Identifier: Apache-2.0
"""What ends a wait for another replica: the silence of its machine, values that don't come, and that it is late."""

import time

import pytest

from farflung.base.errors import RankFailure
from farflung.comm import member_store
from farflung.comm.c10d_transport import C10dTransport
from farflung.comm.group import SoloGroup
from farflung.comm.member_store import Record
from farflung.comm.transport import Entered
from farflung.outer.generation_watch import GenerationWatch
from farflung.outer.peers import Peers
from farflung.process.sockets import serve_store


@pytest.fixture
def waiting():
    """A member that waits in a generation with another one, whose launcher has given a sign; and its watch."""
    peers = Peers(C10dTransport(serve_store("127.0.0.1", 0, wait_for_workers=False)), "loop1", 3.0)
    peers.notes.put("name", 2, "replica 1")
    peers.notes.put("machine", 2, "node1")
    peers.notes.beat("node1", 0.05)
    peers.record = record = Record(1, 1, (1, 2))
    assert peers.members.append(record)
    watch, place = GenerationWatch(peers, 1, SoloGroup(), record, 1.0), Entered("c0#7", 125_000)
    watch.look(place, 2.0)
    return peers, watch, lambda waited_s: watch.look(place, waited_s)


def test_who_waits_for_a_machine_that_is_gone_hears_of_it_even_if_its_member_had_come(waiting, monkeypatch):
    monkeypatch.setattr(member_store, "_LEAST_LOST_S", 0.2)
    peers, _, look = waiting
    peers.members.put(1, "wait0", 2, "c0#7")
    time.sleep(0.3)
    peers.notes.beat("node1", 0.05)
    look(2.0)
    time.sleep(0.3)
    with pytest.raises(RankFailure, match="replica 1: its machine gave no sign for"):
        look(2.0)


def test_who_waits_for_values_that_do_not_come_gives_up_after_the_grace_and_their_time_on_a_slow_line(waiting):
    peers, _, look = waiting
    peers.members.put(1, "wait0", 2, "c0#7")
    look(3.9)  # at 1 Mbit/s they take a second
    with pytest.raises(RankFailure, match=r"no values came for 4\.1 s, though all wait for them"):
        look(4.1)


def test_a_line_that_was_faster_leaves_values_less_time_and_a_slower_one_more(waiting):
    peers, watch, look = waiting
    peers.members.put(1, "wait0", 2, "c0#7")
    watch.note_end(Entered("c0#5", 1_250_000), 20.0)
    look(22.9)
    watch.note_end(Entered("c0#5", 12_500_000), 1.0)  # 100 Mbit/s, so 10 times longer is 0.1 s
    watch.note_end(Entered("c0#6", 100), 1.0)  # says nothing of the line
    look(3.05)
    with pytest.raises(RankFailure, match="no values came"):
        look(3.15)


def test_who_waits_for_one_that_is_elsewhere_gives_up_after_the_grace(waiting):
    peers, _, look = waiting
    peers.members.put(1, "wait0", 2, "c0#6")
    look(2.9)
    with pytest.raises(RankFailure, match="replica 1: late by more than 3 s"):
        look(3.1)
    assert peers.cause(2, 0.0) == "it was late by more than 3 s"
