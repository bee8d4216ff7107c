# SPDX-License-Identifier: Apache-2.0
"""A folder as a board: which files there are, and what happens if it can't be used."""

import errno
import os
import threading
from collections import Counter

import pytest

from farflung.address import folder as folder_module
from farflung.address.folder import FolderTransport
from farflung.base.errors import ConfigError, Unreachable


@pytest.fixture
def folder(tmp_path):
    """A folder, and a function that returns its files."""
    transport = FolderTransport(tmp_path)
    transport.files = lambda: sorted(path for path in tmp_path.rglob("*") if path.is_file())
    return transport


@pytest.mark.parametrize("key", ["../../etc/x", ".", "..", "a/../b", "a b:c%2E/ü", ".aside/x", "x.value"])
def test_no_key_leaves_the_folder_or_is_taken_for_another_one(folder, tmp_path, key):
    folder.board.put("a/b", b"another")
    folder.board.put(key, b"1")
    assert folder.board.get(key) == b"1"
    assert [one for one in folder.board.list("") if one != "a/b"] == [key]
    assert folder.board.get("a/b") == b"another"
    assert len(folder.files()) == 2
    folder.board.delete(key)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".aside"] == ["a"]


def test_a_key_may_be_the_beginning_of_others_and_foreign_files_are_none(folder, tmp_path):
    folder.board.put("log", b"1")
    folder.board.put("log/1", b"2")
    (tmp_path / "log" / ".nfs0001").write_bytes(b"?")
    (tmp_path / "log" / "no quoted name.value").write_bytes(b"?")
    assert sorted(folder.board.list("")) == ["log", "log/1"]
    assert (folder.board.get("log"), list(folder.board.list("log/"))) == (b"1", ["log/1"])


def test_a_folder_that_is_gone_ends_requests_with_its_name_and_one_that_comes_back_does_not(folder, tmp_path):
    folder.board.put("key", b"1")
    away = tmp_path.with_suffix(".away")
    tmp_path.rename(away)
    board = folder.board.patient(0)
    requests = [(board.get, "key"), (board.has, ["key"]), (board.list, "")]
    for request, *arguments in [*requests, (board.put, "key", b"2"), (board.put_new, "new", b"2")]:
        with pytest.raises(Unreachable, match=rf"run's folder {tmp_path} can't be used: No such file.* \({tmp_path}"):
            request(*arguments)
    assert not tmp_path.exists()
    back = threading.Timer(0.3, lambda: away.rename(tmp_path))
    back.start()
    assert folder.board.get("key") == b"1"
    back.join()


REFUSED = [*((act, errno.ENOTSUP, "not supported") for act in ("replace", "link", "unlink", "open"))]


@pytest.mark.parametrize(("act", "number", "why"), [*REFUSED, ("replace", errno.ENOENT, "No such file")])
def test_a_mount_that_can_not_do_what_a_run_needs_is_refused_before_anything_begins(
    tmp_path, monkeypatch, act, number, why
):
    def refused(*args, **more):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(folder_module if act == "open" else os, act, refused, raising=False)
    with pytest.raises(ConfigError, match=f"can't meet in the folder {tmp_path}: .*{why}.*rename"):
        FolderTransport(tmp_path)


@pytest.mark.parametrize("what", ["missing", "a file"])
def test_a_place_where_nobody_can_meet_is_refused_before_anything_begins(tmp_path, what):
    path = tmp_path / "x"
    if what == "a file":
        path.touch()
    with pytest.raises(ConfigError, match=f"can't meet in the folder {path}: (No such|Not a dir)"):
        FolderTransport(path)


def test_what_a_killed_writer_has_left_is_deleted_after_a_day(folder, tmp_path):
    old, new = (tmp_path / ".aside" / name for name in ("old", "new"))
    for path in (old, new):
        path.touch()
    os.utime(old, (1, 1))
    FolderTransport(tmp_path)
    assert (old.exists(), new.exists()) == (False, True)


def test_a_link_in_the_place_of_the_folder_aside_is_refused_and_nothing_is_deleted_where_it_leads(tmp_path):
    meeting, home = tmp_path / "meeting", tmp_path / "home"
    for path in (meeting, home):
        path.mkdir()
    (home / "mine").touch()
    os.utime(home / "mine", (1, 1))
    (meeting / ".aside").symlink_to(home)
    with pytest.raises(ConfigError, match=r"\.aside there is a link"):
        FolderTransport(meeting)
    assert [path.name for path in home.iterdir()] == ["mine"]


def test_what_is_no_file_or_no_folder_is_an_error_without_a_key(folder, tmp_path):
    board = folder.board.patient(0)
    (tmp_path / "x.value").mkdir()
    (tmp_path / "log").touch()
    for request, name, why in ((board.get, "x", "Is not a file"), (board.list, "log/", "Not a directory")):
        with pytest.raises(Unreachable, match=why):
            request(name)


def test_nothing_is_asked_of_the_file_system_twice(folder, tmp_path, monkeypatch):
    asked = Counter()

    def count(name):
        real = getattr(os, name)

        def counted(path, *more, **options):
            asked[name, os.path.relpath(path, tmp_path)] += 1
            return real(path, *more, **options)

        monkeypatch.setattr(os, name, counted)

    board = folder.board.part("run").part("group")
    board.put("0", b"1")
    for name in ("open", "unlink", "rmdir"):
        count(name)
    for key in ("1", "2", "3"):
        board.put(key, b"1")
    assert not asked  # what is written aside is there no more
    assert board.get("late") is None
    late = "run/group/late.value"
    assert asked == {("open", late): 2, ("open", "."): 1, ("open", "run"): 1, ("open", "run/group"): 1}
    asked.clear()
    assert board.part("missing").get("late") is None
    assert max(asked.values()) == 1
    asked.clear()
    board.delete("1", "2", "3")
    assert asked == {("rmdir", "run/group"): 1, **{("unlink", f"run/group/{key}.value"): 1 for key in "123"}}
    board.delete("0")
    assert not (tmp_path / "run").exists()
