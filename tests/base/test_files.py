# SPDX-License-Identifier: Apache-2.0
"""Files are replaced by one rename, also for readers and memory maps of the old one; or a torn line stays alone."""

import mmap
import os
import stat
import threading

import pytest

from farflung.base.files import atomic_file, open_lines


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("old")
    path.chmod(0o600)
    return path


def test_a_map_of_the_old_file_stays_and_the_new_one_has_its_permissions(old):
    with open(old, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        with atomic_file(old) as path:
            path.write_text("n")
            assert old.read_text() == "old"
        assert mapped[:] == b"old"
    assert (old.read_text(), stat.S_IMODE(old.stat().st_mode)) == ("n", 0o600)


def test_an_error_leaves_the_old_file_and_nothing_else(old):
    def written(path):
        path.write_text("n")
        raise KeyError

    with pytest.raises(KeyError), atomic_file(old) as path:
        written(path)
    assert [path.read_text() for path in old.parent.iterdir()] == ["old"]


def test_of_a_link_the_file_is_replaced_and_a_device_or_a_folder_never(old, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(old)
    with atomic_file(link) as path:
        path.write_text("new")
    assert (link.is_symlink(), old.read_text()) == (True, "new")
    with atomic_file(os.devnull) as path:
        path.write_text("nothing")
    assert not os.path.isfile(os.devnull)
    with pytest.raises(IsADirectoryError), atomic_file(tmp_path) as path:
        path.write_text("n")


def test_a_name_as_long_as_a_name_may_be_can_be_written(tmp_path):
    with atomic_file(tmp_path / ("ü" * 127)) as path:
        path.write_text("n")
    assert [path.name for path in tmp_path.iterdir()] == ["ü" * 127]


@pytest.mark.parametrize("torn", ["", "whole\n", 'whole\n{"event": "lo'])
def test_lines_are_added_after_a_torn_one(torn, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(torn)
    for line in ("start", "finish"):
        with open_lines(path) as file:
            file.write(f"{line}\n")
    assert path.read_text().splitlines() == [*torn.splitlines(), "start", "finish"]


def test_a_line_that_another_process_is_writing_is_not_taken_for_a_torn_one(tmp_path):
    path = tmp_path / "lines"

    def add():
        with open_lines(path, is_shared=True) as file:
            file.write("second\n")

    with open_lines(path, is_shared=True) as file:
        file.write("fi")
        file.flush()
        other = threading.Thread(target=add)
        other.start()
        other.join(0.2)
        file.write("rst\n")
    other.join()
    assert path.read_text() == "first\nsecond\n"
