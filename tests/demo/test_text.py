# SPDX-License-Identifier: Apache-2.0
"""The demo's text is found on this machine, its two parts share nothing, and what is missing is named."""

import sysconfig
from pathlib import Path

import pytest

from farflung.base.errors import ConfigError
from farflung.demo import text
from farflung.demo.text import TRAIN_MODULES, VALIDATION_MODULES, check_length, folder_text, load_text, stdlib_text

LISTED = TRAIN_MODULES.split() + VALIDATION_MODULES.split()


def test_the_listed_sources_are_all_here_and_each_is_listed_once():
    found = load_text(None)
    assert len(found.train) > 3_000_000
    assert len(found.validation) > 100_000
    assert len(LISTED) == len(set(LISTED))


def test_a_missing_source_is_named(tmp_path):
    root = Path(sysconfig.get_paths()["stdlib"])
    for name in LISTED:
        if name not in ("http/server", "csv"):
            file = tmp_path / f"{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.symlink_to(root / f"{name}.py")
    with pytest.raises(ConfigError, match=r"2 of \d+ sources .*csv\.py, http/server\.py.*--data FOLDER"):
        stdlib_text(tmp_path)


def test_of_each_file_of_a_folder_the_last_tenth_is_for_validation(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_text("abcdefghij" * 2)
    (tmp_path / "b" / "c.md").write_text("0123456789")
    (tmp_path / ".hidden").write_text("nobody looks here")
    (tmp_path / "picture.bin").write_bytes(b"\xff\xfe\x00")
    found = folder_text(tmp_path)
    assert found.train == b"abcdefghijabcdefgh" + b"012345678"
    assert found.validation == b"ij" + b"9"
    assert found.left_out == ("picture.bin",)


def test_a_folder_without_text_or_with_too_little_is_refused(tmp_path):
    (tmp_path / "zeros").write_bytes(bytes(10))
    with pytest.raises(ConfigError, match="none of its 1 visible files is UTF-8 text"):
        folder_text(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        load_text(str(tmp_path / "elsewhere"))
    check_length(text.Text(b"x" * 129, b"x" * 65), context=64, sequences=2)
    with pytest.raises(ConfigError, match="to train on has 128 bytes, and 129 are the least"):
        check_length(text.Text(b"x" * 128, b"x" * 65), context=64, sequences=2)
    with pytest.raises(ConfigError, match="to validate on has 64 bytes, and 65"):
        check_length(text.Text(b"x" * 129, b"x" * 64), context=64, sequences=2)
