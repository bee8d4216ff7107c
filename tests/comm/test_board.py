# SPDX-License-Identifier: Apache-2.0
"""Records that several write, and logs of decisions over them: one decides, and nothing grows."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from farflung.address import board as board_module
from farflung.address.board import Log
from farflung.address.c10d_transport import C10dTransport
from farflung.address.folder import FolderTransport
from farflung.address.seal import Seal
from farflung.base.errors import Unreachable
from tests.outer.elastic_run import served


@pytest.fixture(params=["store", "folder", "store with a key", "folder with a key"])
def board(request, tmp_path):
    seal = Seal(bytes(range(32))) if request.param.endswith("key") else None
    if request.param.startswith("folder"):
        return FolderTransport(tmp_path, seal=seal).board
    return C10dTransport(served(seal), seal=seal).board


def test_keys_of_a_part_are_its_own(board):
    part = board.part("one").part("two")
    part.put("key", b"\xff1")
    assert part.put_new("other", b"2")
    assert (part.put_new("key", b"3"), part.put_new("other", b"2")) == (False, True)
    assert (board.get("one/two/key"), part.get("other"), part.get("nothing")) == (b"\xff1", b"2", None)
    assert (part.has(["key", "other"]), part.has(["key", "nothing"])) == (True, False)
    assert [sorted(part.list("")), [*part.list("k")], [*board.part("two").list("")]] == [["key", "other"], ["key"], []]
    part.delete("nothing", "key")
    assert (part.get("key"), list(part.list(""))) == (None, ["other"])
    part.delete()
    part.delete("key", "other")
    assert list(part.list("")) == []


def test_of_several_who_decide_one_does_and_all_know_it(board):
    logs = [Log(board, "log") for _ in range(3)]
    assert [log.last() for log in logs] == [(0, None)] * 3
    assert [log.append(0, bytes([number + 1])) for number, log in enumerate(logs)] == [True, False, False]
    assert [log.last() for log in logs] == [(1, b"\1")] * 3
    assert [log.append(after, b"x") for log, after in zip(logs, (0, 2, 1), strict=True)] == [False, False, True]
    assert [log.last() for log in logs] == [(2, b"x")] * 3


def filled(board, numbers):
    """A log with decisions of these numbers, each with the number after it as its value."""
    log = Log(board, "log")
    for number in numbers:
        assert log.append(number, b"%d" % (number + 1))
    return log


@pytest.mark.parametrize("known", [0, 1, 3, 16])
def test_one_that_has_slept_through_decisions_learns_the_latest_and_undoes_none(board, known):
    filled(board, range(known))
    late, later = Log(board, "log"), Log(board, "log")
    assert late.last() == later.last() == (known, b"%d" % known if known else None)
    log = filled(board, range(known, known + 40))
    assert not late.append(known, b"mine")
    assert f"log/{known + 1}" not in board.list("log/")
    last = known + 40
    assert [one.last() for one in (late, later, Log(board, "log"))] == [(last, b"%d" % last)] * 3
    assert late.append(last, b"mine")
    assert log.last() == (last + 1, b"mine")


def test_a_log_keeps_the_last_decisions_alone(board):
    log, sizes = Log(board, "log"), []
    for number in range(200):
        log.append(number, b"value")
        sizes.append(len(board.list("log/")))
    assert max(sizes) == max(sizes[:40]) < 40


@pytest.mark.parametrize("gone", [range(1, 21), [20], range(21)])
def test_a_log_whose_records_vanish_says_so_and_never_begins_again(board, monkeypatch, gone):
    monkeypatch.setattr(board_module, "_LATE_S", 0.05)
    log = filled(board, range(20))
    board.delete(*(f"log/{number}" for number in gone))
    for act in (log.last, log.count, lambda: log.append(3, b"x")):
        with pytest.raises(Unreachable, match="Records of the run have vanished: log/20 ") as told:
            act()
        assert told.value.is_gone


def test_one_that_knows_nothing_of_a_log_finds_no_first_record_where_others_were_deleted(board, monkeypatch):
    monkeypatch.setattr(board_module, "_LATE_S", 0.05)
    filled(board, range(20))
    board.delete(*(f"log/{number}" for number in range(1, 21)))
    with pytest.raises(Unreachable, match="have vanished"):
        Log(board, "log").count()


def test_a_listing_may_be_late_in_what_it_shows_and_hides(board, monkeypatch):
    monkeypatch.setattr(board_module, "_LATE_S", 5.0)
    filled(board, range(10))
    shown = board.list("log/")
    filled(board, range(10, 20))
    monkeypatch.setattr(type(board), "list", lambda self, prefix: shown)
    for number in range(20, 24):
        board.put_new(f"log/{number + 1}", b"%d" % (number + 1))
    assert Log(board, "log").last() == (24, b"24")


def test_numbers_that_are_counted_by_several_are_each_given_once(board):
    with ThreadPoolExecutor(3) as threads:
        given = threads.map(lambda log: {log.count() for _ in range(40)}, [Log(board, "log") for _ in range(3)])
        assert len(set().union(*given)) == 120


def test_a_decision_that_another_writer_takes_back_at_once_is_none(board, monkeypatch):
    log, get, seen = filled(board, range(3)), type(board).get, [b"by one that was overtaken"]
    monkeypatch.setattr(type(board), "get", lambda self, key: seen.pop() if key == "log/4" and seen else get(self, key))
    monkeypatch.setattr(board_module, "_LATE_S", 0.05)
    assert log.last() == (3, b"3")
    assert not seen
