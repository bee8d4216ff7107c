# SPDX-License-Identifier: Apache-2.0
"""What a key does to objects: those that have it read what was written, and nobody else brings anything in."""

import os
import sys
import time
from dataclasses import replace
from io import BufferedReader, BytesIO
from unittest import mock

import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists

from farflung.address import seal as module
from farflung.address.board import Log
from farflung.address.folder import FolderTransport
from farflung.address.seal import Seal, SealError, SeenVersions
from farflung.base.errors import ConfigError

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
MIB = 2**20


def closed(value, name="first", seal=None):
    return b"".join((seal or Seal(KEY)).close(name, [value]))


def opening(seal, name, content):
    return seal.open(name, BufferedReader(BytesIO(content)), len(content), time.monotonic())


def opened(seal, name, content):
    file, size = opening(seal, name, content)
    found = file.read()
    assert len(found) == size
    return found


@given(sizes=lists(integers(0, 40), max_size=6), take=integers(1, 40))
def test_what_was_closed_opens_however_it_was_cut_and_read(sizes, take):
    parts = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    with mock.patch.object(module, "_PIECE", 8):
        content = b"".join(Seal(KEY).close("a/b", parts))
        file, size = opening(Seal(KEY), "a/b", content)
        found = b"".join(iter(lambda: file.read(take), b""))
    assert (found, size) == (b"".join(parts), sum(sizes))
    assert not any(part in content for part in parts if len(part) > 6)


def test_large_objects_are_read_into_the_memory_of_their_reader():
    content = bytes(range(256)) * (10 * 1024 + 3)  # two pieces and a half
    file, _ = opening(Seal(KEY), "x", b"".join(Seal(KEY).close("x", [content[:5], memoryview(content)[5:]])))
    memory = bytearray(len(content))
    at = 0
    while count := file.readinto(memoryview(memory)[at : at + 4 * MIB]):
        at += count
    assert memory == content


HEAD, PIECE = 56, MIB + 16
NAME = "g5/ready/1"
LONG = closed(b"x" * (2 * MIB + 7), NAME)
CHANGES = {
    "a bit of the head": lambda x: x[:30] + bytes([x[30] ^ 1]) + x[31:],
    "the number of the write": lambda x: x[:55] + bytes([x[55] ^ 1]) + x[56:],
    "a bit of the first piece": lambda x: x[:60] + bytes([x[60] ^ 1]) + x[61:],
    "a bit of the last piece": lambda x: x[:-1] + bytes([x[-1] ^ 1]),
    "without its last piece": lambda x: x[: HEAD + 2 * PIECE],
    "cut off": lambda x: x[:-5],
    "with more behind it": lambda x: x + b"more",
    "with a piece more": lambda x: x[: HEAD + PIECE] + x[HEAD : HEAD + PIECE] + x[HEAD + PIECE :],
    "with two pieces swapped": lambda x: (
        x[:HEAD] + x[HEAD + PIECE : HEAD + 2 * PIECE] + x[HEAD : HEAD + PIECE] + x[HEAD + 2 * PIECE :]
    ),
    "with the head of another": lambda x: closed(b"y", NAME)[:HEAD] + x[HEAD:],
    "the head alone": lambda x: x[:HEAD],
    "half a head": lambda x: x[:20],
    "empty": lambda x: b"",
    "plain": lambda x: b"1",
    "of another key": lambda x: closed(b"x", NAME, Seal(OTHER)),
    "of another member": lambda x: closed(b"x", "g5/ready/2"),
    "of another generation": lambda x: closed(b"x", "g4/ready/1"),
    "of another run": lambda x: closed(b"x", NAME, Seal(KEY).below("run-00000000")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_not_written_so_does_not_open_and_is_named_once(change):
    seal = Seal(KEY)
    assert opened(Seal(KEY), NAME, LONG) == b"x" * (2 * MIB + 7)
    for _ in range(2):
        with pytest.raises(SealError):
            opened(seal, NAME, CHANGES[change](LONG))
    (line,) = seal.versions.notices
    assert line.startswith("someone without this run's key may write there: 'g5/ready/1' is not taken, as it")


@pytest.mark.parametrize("change", ["with more behind it", "with a piece more", "cut off", "without its last piece"])
def test_an_object_of_another_size_does_not_even_begin_to_open(change):
    with pytest.raises(SealError):
        opening(Seal(KEY), NAME, CHANGES[change](LONG))


def test_each_notice_is_reported_once_and_the_last_one_says_that_no_more_are():
    versions = SeenVersions()
    for number in range(2 * module._MOST_NOTICES):
        versions.notice(f"a{number // 2}", "it is empty")
    assert len(set(versions.notices)) == len(versions.notices) == module._MOST_NOTICES + 1
    assert sum("reports no more" in line for line in versions.notices) == 1
    assert not versions.is_news("another")


def replaced(make):
    return lambda path: (path.unlink(), make(path))


OBSTACLES = {
    "a terabyte": lambda path: os.truncate(path, 2**40),
    "a named pipe": replaced(os.mkfifo),
    "a folder": replaced(os.mkdir),
    "a device": replaced(lambda path: path.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_is_no_file_of_this_size_is_not_taken_and_named_without_a_wait(obstacle, tmp_path):
    seal = Seal(KEY)
    board = FolderTransport(tmp_path, seal=seal).board
    board.put("log/1", b"right" * MIB)
    (file,) = (tmp_path / "log").iterdir()
    OBSTACLES[obstacle](file)
    assert board.patient(0).get("log/1") is None
    assert not board.patient(0).has(["log/1"])
    assert ["'log/1' is not taken" in line for line in seal.versions.notices] == [True]


def test_names_that_no_text_has_are_named_and_end_no_listing(tmp_path):
    board = FolderTransport(tmp_path, seal=Seal(KEY)).board
    board.put("log/1", b"1")
    for name in (b"\xff.value", b"\x1b[31m.value", b"%FF.1.value"):
        (tmp_path / "log" / os.fsdecode(name)).touch()
    assert list(board.list("log/")) == ["log/1"]
    assert len(board.seal.versions.notices) == 3
    assert "".join(board.seal.versions.notices).isprintable()


def test_an_older_version_that_is_put_back_is_noticed_whoever_has_written_it():
    a, b, reader = Seal(KEY), Seal(KEY), Seal(KEY)
    older, newer, of_another = closed(b"1", seal=a), closed(b"2", seal=a), closed(b"3", seal=b)

    def read(content):
        try:
            return opened(reader, "first", content)
        except SealError:
            return None

    assert [read(one) for one in (older, older, newer, newer, of_another)] == [b"1", b"1", b"2", b"2", b"3"]
    assert [read(one) for one in (older, newer, of_another)] == [None, None, b"3"]
    assert "an older version of it was put back" in reader.versions.notices[0]
    assert opened(Seal(KEY), "first", older) == b"1"  # one that has read none can't know
    reader.versions.delete("first")
    assert read(of_another) is None
    assert read(closed(b"4", seal=b)) == b"4"


def test_a_read_that_another_thread_has_overtaken_is_no_replay():
    versions = SeenVersions()
    began, (older, newer) = time.monotonic(), (versions.next(), versions.next())
    versions.check("x", newer, began)
    versions.check("x", older, began)
    with pytest.raises(SealError):
        versions.check("x", older, time.monotonic())
    versions.check("x", newer, time.monotonic())


def test_the_seal_of_another_address_knows_the_key_and_no_version():
    seal = Seal(KEY).below("run-00000000")
    older, newer = (closed(value, "first", seal) for value in (b"1", b"2"))
    assert opened(seal, "first", newer) == b"2"
    assert opened(seal.at_root(), "run-00000000/first", older) == b"1"


def test_a_key_without_the_package_that_seals_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigError, match=r"pip install 'farflung\[key\]'"):
        Seal(KEY)


def test_no_name_that_another_has_invented_or_moved_is_one(tmp_path):
    board = FolderTransport(tmp_path, seal=Seal(KEY)).board
    board.put("log/1", b"1")
    (file,) = (tmp_path / "log").iterdir()
    others = [replace(board, seal=None), replace(board, seal=Seal(OTHER))]
    assert [(list(one.list("")), one.get("log/1")) for one in others] == [([], None)] * 2
    for one in others:
        assert one.put_new("log/2", b"2")
    content = file.read_bytes()
    (tmp_path / "log" / file.name.replace("1.", "3.")).write_bytes(content)
    assert list(board.list("log/")) == ["log/1"]
    assert len(board.seal.versions.notices) == 3
    assert board.put_new("log/2", b"mine")
    assert (board.get("log/1"), board.get("log/2")) == (b"1", b"mine")
    board.delete("log/1")
    file.write_bytes(content)
    assert board.get("log/1") is None


@pytest.mark.parametrize("scope", ["", "run-00c0ffee"])
@pytest.mark.parametrize("key", [None, KEY], ids=["open", "keyed"])
def test_an_object_that_is_called_as_no_record_is_ends_no_log(tmp_path, key, scope):
    board = FolderTransport(tmp_path, seal=key and Seal(key)).board
    stranger = FolderTransport(tmp_path).board
    record = f"{scope}/run".strip("/")
    board.put(record, b"1")
    assert stranger.has([record])  # which launchers without the key find
    log = Log(board.part(scope) if scope else board, "ends")
    assert log.append(0, b"1")
    for name in ("run", "1 (conflicted copy)"):
        stranger.put(f"{scope}/ends/{name}".strip("/"), b" ")
    assert Log(board.part(scope) if scope else board, "ends").last() == (1, b"1")


def test_a_key_is_in_no_text_of_what_has_it(tmp_path):
    board = FolderTransport(tmp_path, seal=Seal(KEY)).board
    board.put("a", b"1")
    texts = f"{board!r}{board.seal!r}{list(tmp_path.rglob('*'))}"
    assert KEY.hex() not in texts
    assert repr(KEY) not in texts
    assert KEY not in b"".join(file.read_bytes() for file in tmp_path.rglob("*.value"))
