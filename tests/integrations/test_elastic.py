# SPDX-License-Identifier: Apache-2.0
"""`farflung.elastic.place()`: which part of the data a script reads that shares it out by itself."""

import json

import pytest

from farflung.comm.c10d_transport import C10dTransport
from farflung.comm.member_store import LauncherNotes
from farflung.elastic import launched_membership, place
from farflung.process.sockets import serve_store


class Launched:
    """A run with places for `expected` replicas, in which this process is one rank of one member after another."""

    def __init__(self, monkeypatch, expected):
        self.environment = monkeypatch
        self.store = serve_store("127.0.0.1", 0, wait_for_workers=False)
        self.notes = LauncherNotes(C10dTransport(self.store).board)
        self.notes.board.put("run", json.dumps({"expected": expected}).encode())
        self.environment.setenv("FARFLUNG_STORE", f"127.0.0.1:{self.store.port}")

    def place(self, member, rank=0, size=1):
        for name, value in {"FARFLUNG_MEMBER": member, "RANK": rank, "WORLD_SIZE": size}.items():
            self.environment.setenv(name, str(value))
        return place()


def test_where_replicas_are_fixed_a_place_is_the_rank_and_there_is_no_membership(monkeypatch):
    for name in ("FARFLUNG_STORE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert place() == (0, 1)
    assert launched_membership() is None
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert place() == (2, 3)


def test_each_replica_gets_the_first_free_place_and_keeps_it(monkeypatch):
    run = Launched(monkeypatch, expected=2)
    assert [run.place(member) for member in (5, 8, 5, 8)] == [(0, 2), (1, 2), (0, 2), (1, 2)]


def test_replicas_beyond_those_the_run_began_with_share_places(monkeypatch):
    run = Launched(monkeypatch, expected=2)
    assert [run.place(member) for member in range(4)] == [(0, 2), (1, 2), (0, 2), (1, 2)]


@pytest.mark.parametrize("end", ["gone", "left"])
def test_the_place_of_a_replica_that_is_no_more_is_free_again(monkeypatch, end):
    run = Launched(monkeypatch, expected=3)
    assert [run.place(member) for member in range(3)] == [(0, 3), (1, 3), (2, 3)]
    run.notes.put(end, 1)
    assert run.place(3) == (1, 3)
    assert run.place(2) == (2, 3)


def test_the_ranks_of_a_replica_share_its_place(monkeypatch):
    run = Launched(monkeypatch, expected=2)
    places = [run.place(member, rank, size=2) for member in (0, 1) for rank in (0, 1)]
    assert places == [(0, 4), (1, 4), (2, 4), (3, 4)]
