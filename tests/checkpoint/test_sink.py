# SPDX-License-Identifier: Apache-2.0
"""A file is on the disk when its block is left, and the disk has been busy with it before."""

import errno
import os

import pytest

from laconic.checkpoint import sink
from laconic.checkpoint.sink import Sink


def test_the_disk_is_given_work_while_more_is_written_and_its_refusal_is_heard(tmp_path, monkeypatch):
    monkeypatch.setattr(sink, "_AHEAD", 10)
    asked = []
    real = os.fsync
    monkeypatch.setattr(sink.os, "fsync", lambda descriptor: (asked.append(1), real(descriptor)))
    with Sink(tmp_path / "file") as file:
        for _ in range(50):
            file.write(bytes(10))
            if file._flushed is not None:
                file._flushed.result()
    assert len(asked) == 51
    assert sink.sums_of(tmp_path / "file") == (file.num_bytes, file.crc32)

    def refuse(descriptor):
        raise OSError(errno.EIO, "no disk")

    monkeypatch.setattr(sink.os, "fsync", refuse)
    with pytest.raises(OSError, match="no disk"), Sink(tmp_path / "file") as file:
        file.write(bytes(20))
