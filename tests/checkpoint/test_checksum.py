# SPDX-License-Identifier: Apache-2.0
"""Checksums are zlib's CRC-32, whoever computes them: a checkpoint written on one machine is verified on any other."""

import importlib
import sys
import zlib

import pytest

from farflung.checkpoint import files
from farflung.comm import checksum


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("length", [0, 1, 1000, 3 * 2**20 + 7])
def test_sums_are_those_of_zlib_with_and_without_isal(length, installed, monkeypatch, tmp_path):
    content = bytes(k * k % 251 for k in range(length))
    (tmp_path / "file").write_bytes(content)
    if installed:
        pytest.importorskip("isal")
    else:
        monkeypatch.setitem(sys.modules, "isal", None)
        monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    try:
        importlib.reload(checksum)
        importlib.reload(files)
        assert (files.crc32 is zlib.crc32) is not installed
        assert files.sums_of(tmp_path / "file") == (length, zlib.crc32(content))
    finally:
        monkeypatch.undo()
        importlib.reload(checksum)
        importlib.reload(files)
