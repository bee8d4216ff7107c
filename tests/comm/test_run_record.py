# SPDX-License-Identifier: Apache-2.0
"""A run has a name of its own: one that begins where another was deleted has none of its records, and takes none."""

import json
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from farflung.address.board import Log
from farflung.address.member_store import LauncherNotes, MemberStore, Record
from farflung.address.reader import Reader
from farflung.address.run_record import KeyMismatch, knock
from farflung.address.saved_state import Saved, SavedStates
from farflung.address.schemes import objects_at, transport_at
from farflung.address.seal import Seal
from farflung.base.errors import ConfigError, Unreachable
from farflung.base.events import Kind
from farflung.process.identity import address_of, has_ended

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
SETTINGS = json.dumps({"expected": 1}).encode()


@pytest.fixture(params=["folder", *(pytest.param(one, marks=pytest.mark.long) for one in ("bucket", "hub"))])
def address(request, tmp_path):
    if request.param != "folder":
        return request.getfixturevalue(request.param)
    (tmp_path / "run").mkdir()
    return (tmp_path / "run").as_uri()


def empty(address):
    """Delete all that lies there."""
    if address.startswith("file"):
        folder = Path(address.removeprefix("file://"))
        shutil.rmtree(folder)
        folder.mkdir()
    else:
        board = objects_at(address)
        board.delete(*board.list(""))


def begun(address):
    return transport_at(address).of_run(SETTINGS)


def with_state(transport):
    """Write a state, and what a member needs."""
    notes = LauncherNotes(transport.board)
    member = notes.enroll("replica 0", "node")
    assert notes.number_of_loop(member) == 1
    notes.put("in", member)
    notes.note_end(notes.enroll("replica 1"), "killed")
    assert MemberStore(transport.board.part("loop1")).append(Record(1, member, (member,)))
    states = SavedStates(transport.board.part("loop1"))
    states.write("1.8.a", 0, {"place": {"position": 8}})
    assert states.finish(Saved("1.8.a", 8, 1, ("place",)))
    return member


def saved_positions(transport):
    return [one.position for one in SavedStates(transport.board.part("loop1")).newest()]


def test_a_run_that_begins_where_another_was_deleted_is_not_that_of_a_forgotten_machine(address):
    old = begun(address)
    with_state(old)
    assert transport_at(old.address).board == old.board
    empty(address)
    new = begun(address)
    assert LauncherNotes(new.board).num_ends() == 0
    there = set(new.board.list(""))
    with pytest.raises(Unreachable, match="Another run has begun in the ") as told:
        old.check()
    assert told.value.is_gone
    if address.startswith("file"):  # nothing makes its folder again
        with pytest.raises(Unreachable, match="No such file"):
            old.board.patient(0).put("first", b"old")
    old.renew()
    new.check()
    assert set(new.board.list("")) == there
    with pytest.raises(ConfigError, match="No state was written there yet"):
        Reader(address).newest()


def test_launchers_that_begin_at_once_begin_one_run(address):
    with ThreadPoolExecutor(4) as launchers:
        found = list(launchers.map(begun, [address] * 4))
    assert len({run.address for run in found}) == 1


def test_a_launcher_that_another_one_is_quicker_than_takes_its_run_and_leaves_nothing(address, monkeypatch):
    board, launchers = transport_at(address).board, [begun]
    put_new = type(board).put_new

    def overtaken(self, key, value):
        quicker.extend(launchers.pop()(address).address for _ in launchers[:] if key == "run")
        return put_new(self, key, value)

    quicker = []
    monkeypatch.setattr(type(board), "put_new", overtaken)
    assert [begun(address).address] == quicker
    assert sorted(board.list("")) == ["run", f"{quicker[0].partition('#')[2]}/run"]


@pytest.mark.parametrize("settings", [SETTINGS, b""], ids=["former release", "kept by a replica"])
def test_records_without_a_name_of_the_run_are_continued(address, settings):
    transport = transport_at(address)
    if settings:
        transport.board.put("run", settings)
    with_state(transport)
    found = begun(address)
    assert found.board == transport.board
    assert found.board.get("run") == SETTINGS
    found.check()
    assert saved_positions(found) == [8]


def test_a_run_whose_own_record_has_vanished_is_named_and_not_begun_again(address, tmp_path):
    old = begun(address)
    with_state(old)
    root = transport_at(address).board
    root.delete("run")
    where = f"{address}/{old.address.partition('#')[2]}"
    for act in (lambda: begun(address), lambda: Reader(address).newest()):
        with pytest.raises(ConfigError, match=f"has vanished, but states .*Continue with --meet {where}, or delete"):
            act()
    assert saved_positions(begun(where)) == [8]
    old.renew()
    assert begun(address).address == old.address


@pytest.mark.parametrize(
    ("theirs", "ours", "why"),
    [
        (KEY, None, "it has a key, and none was given"),
        (KEY, OTHER, "it is sealed with another key"),
        (None, KEY, "it is not sealed with any key"),
    ],
    ids=["none", "another", "one too many"],
)
def test_a_launcher_with_another_key_is_refused_and_both_sides_know(address, tmp_path, theirs, ours, why):
    run = transport_at(address, seal=theirs and Seal(theirs)).of_run(SETTINGS)
    with_state(run)
    before = {name: run.board.get(name) for name in run.board.list("")}
    there = transport_at(address, seal=ours and Seal(ours))
    for act in (lambda: there.of_run(SETTINGS), lambda: Reader(address, ours).newest()):
        with pytest.raises(KeyMismatch, match=f"The record of the run at .* can't be used: {why}. Give the key"):
            act()
    knock(there.board, "node:1")
    notes = LauncherNotes(run.board)
    told = notes.receive()
    assert {name: run.board.get(name) for name in run.board.list("")} == before
    if theirs is None:
        assert [str(event) for event in told] == ["node:1 was refused: it has another key, or only one side has any"]
    else:
        (event,) = notes.strangers()
        assert told == []
        assert (event.kind, notes.strangers()) == (Kind.REFUSED, [])
        assert "events/first/refused%20node%3A1" in str(event)
        Reader(address, theirs).newest()


def test_a_run_whose_settings_have_vanished_says_so(address):
    begun(address).board.delete("run")
    with pytest.raises(Unreachable, match="Records of the run have vanished: run-"):
        begun(address)


def test_what_is_needed_for_ever_outlives_a_purge_of_old_files(tmp_path):
    transport = begun(tmp_path.as_uri())
    member, notes = with_state(transport), LauncherNotes(transport.board)
    states = SavedStates(transport.board.part("loop1"))
    states.write("1.16.b", 0, {"place": {"position": 16}})
    assert states.finish(Saved("1.16.b", 16, 1, ("place",)))
    logs = ["place/7", "data/0/epochs", "loop2/generation"]
    keys = [
        f"{what}/7" for what in ("process", "in", "gone", "left", "lates", "launchers", "loop1/g1/ready", "loop1/left")
    ]
    for name in logs:
        assert Log(transport.board, name).append(0, b"1")
    for key in keys:
        transport.board.put(key, b"1")
    files = [one for one in tmp_path.rglob("*.value") if "/state/" not in str(one)]
    for file in files:
        os.utime(file, (0, 0))
    transport.renew()
    notes.renew()
    for file in files:
        if file.exists() and file.stat().st_mtime < 1:
            file.unlink()
    again = begun(tmp_path.as_uri())
    assert again.address == transport.address
    notes = LauncherNotes(again.board)
    assert (notes.name_of(member), notes.get("machine", member), notes.num_ends()) == ("replica 0", "node", 1)
    assert MemberStore(again.board.part("loop1")).record().ids == (member,)
    assert saved_positions(again) == [16, 8]
    assert [Log(again.board, name).last() for name in logs] == [(1, b"1")] * 3
    assert [key for key in keys if not again.board.get(key)] == []
    assert notes.number_of_loop(member) == 2


def test_no_id_is_given_twice_whatever_has_vanished(address, monkeypatch):
    given = []
    for names in (("ids", "name"), ("name", "machine", "in", "left", "gone"), ()):
        notes = LauncherNotes(begun(address).board)
        given += [notes.enroll("replica", "node") for _ in range(3)]
        time.sleep(0.005)
        notes.board.delete(*(key for one in names for key in notes.board.list(f"{one}/")))
    empty(address)
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)  # as many in one moment
    notes = LauncherNotes(begun(address).board)
    with ThreadPoolExecutor(4) as launchers:
        given += launchers.map(lambda _: notes.enroll("replica", "node"), range(4))
    assert len(given) == len(set(given)) == 13


def test_a_member_whose_count_of_loops_has_vanished_does_not_take_the_first_one_again(tmp_path):
    notes = LauncherNotes(begun(tmp_path.as_uri()).board)
    member = notes.enroll("replica")
    assert notes.number_of_loop(member) == 1
    notes.put("in", member)
    notes.board.delete(*notes.board.list("loops/"))
    with pytest.raises(Unreachable, match="have vanished: loops/"):
        notes.number_of_loop(member)


def test_one_that_begins_records_the_ends_that_no_launcher_has_seen(tmp_path):
    notes = LauncherNotes(begun(tmp_path.as_uri()).board)
    processes = [subprocess.Popen(["sleep", "100"]) for _ in range(3)]
    addresses = [address_of(one.pid) for one in processes]
    for number in (1, 2):
        processes[number].kill()
        processes[number].wait()
    container, rest = addresses[1].split(" ", 1)
    addresses += [f"pid:[1] {rest}", f"{container} {rest.replace('-', 'f', 1)}", "unknown"]
    members = [notes.enroll(f"replica {number}", "old") for number in range(6)]
    for member, address in zip(members, addresses, strict=True):
        notes.put("process", member, address)
    notes.put("left", members[2], "done")
    notes.board.put("first", b"old")
    notes.note_launcher("old", addresses[1])
    notes.note_launcher("other", addresses[0])
    notes.take_over("new", has_ended)
    processes[0].kill()
    processes[0].wait()
    assert [bool(notes.get("gone", one)) for one in members] == [False, True] + 4 * [False]
    assert (notes.num_ends(), notes.read("first"), notes.num_launchers()) == (1, "new", 1)
    notes.take_over("third", has_ended)
    assert (notes.num_ends(), notes.num_launchers(), notes.read("first")) == (2, 0, "new")
    assert [bool(notes.get("process", one)) for one in members] == 3 * [False] + 3 * [True]
