# SPDX-License-Identifier: Apache-2.0
"""What goes into a file is in it, summed and on the disk when its block is left; what the disk refuses is heard."""

import errno
import os
import random
import threading
import zlib
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from farflung.checkpoint import writer
from farflung.checkpoint.files import sums_of
from farflung.checkpoint.writer import FileWriter, save_object
from tests.python import run_farflung, run_python

_BLOCK = 4096


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(writer, "BLOCK", _BLOCK)


def ways(monkeypatch, way):
    """Let the file system know no way past its cache: the word is unknown, or refused at open, or at each write."""
    real_open, real_write = os.open, os.pwrite
    descriptors = set()

    def refuse(*args):
        raise OSError(errno.EINVAL, "invalid argument")

    def open_direct(path, flags, mode=0o777):
        if flags & os.O_DIRECT and way == "refused at open":
            refuse()
        descriptor = real_open(path, flags & ~os.O_DIRECT, mode)
        if flags & os.O_DIRECT:
            descriptors.add(descriptor)
        return descriptor

    def write(descriptor, view, place):
        if descriptor in descriptors and way == "refused at write":
            refuse()
        return real_write(descriptor, view[:512] if way == "short writes" and len(view) > 1000 else view, place)

    if way == "unknown":
        monkeypatch.delattr(writer.os, "O_DIRECT", raising=False)
    elif way != "as it is" and hasattr(os, "O_DIRECT"):
        monkeypatch.setattr(writer.os, "open", open_direct)
        monkeypatch.setattr(writer.os, "pwrite", write)


def write_blocks(file, count, error=None):
    for _ in range(count):
        file.write(bytes(_BLOCK))
    if error is not None:
        raise error


@pytest.mark.parametrize("way", ["as it is", "unknown", "refused at open", "refused at write", "short writes"])
@pytest.mark.parametrize("threaded", [True, False])
def test_a_file_holds_what_was_written_and_its_sums_are_those_of_the_disk(tmp_path, monkeypatch, way, threaded):
    ways(monkeypatch, way)

    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(st.integers(0, 3 * _BLOCK), max_size=8), st.integers(0, 2**32))
    def check(sizes, seed):
        source = random.Random(seed)
        written = [source.randbytes(size) for size in [*sizes, 2 * _BLOCK]]
        with FileWriter(tmp_path / "file", threaded) as file:
            assert [file.write(memoryview(data).cast("b")) for data in written] == [len(data) for data in written]
            assert any(one.name == "farflung writer" for one in threading.enumerate()) is threaded
        content = b"".join(written)
        assert (tmp_path / "file").read_bytes() == content
        assert (file.num_bytes, file.crc32) == (len(content), zlib.crc32(content)) == sums_of(tmp_path / "file")

    check()


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no way past its cache")
def test_whole_blocks_go_past_the_cache_and_the_rest_through_it(tmp_path, monkeypatch):
    ways(monkeypatch, "seen")
    calls = []
    real = os.pwrite
    monkeypatch.setattr(
        writer.os, "pwrite", lambda to, view, place: (calls.append((to, len(view))), real(to, view, place))[1]
    )
    with mock.patch.object(os, "close", wraps=os.close) as close, FileWriter(tmp_path / "file") as file:
        for _ in range(3):
            file.write(bytes(_BLOCK + 1))
    direct, plain = calls[0][0], calls[-1][0]
    assert mock.call(direct) in close.mock_calls
    assert calls == [(direct, _BLOCK)] * 3 + [(plain, 3)]
    assert direct != plain


@pytest.mark.parametrize("threaded", [True, False])
def test_a_full_disk_is_heard_while_more_is_written_and_the_rest_is_not_tried(tmp_path, monkeypatch, threaded):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "no space left"))
    monkeypatch.setattr(writer.os, "pwrite", full)
    with pytest.raises(OSError, match="no space left"), FileWriter(tmp_path / "file", threaded) as file:
        write_blocks(file, 100)
    assert file.num_bytes < 10 * _BLOCK
    assert [place for _, _, place in (call.args for call in full.call_args_list)] == [0]
    assert file.failure is not None
    with pytest.raises(OSError, match="no space left"):
        save_object(torch.zeros(10 * _BLOCK), tmp_path / "tensor")  # of which torch says that its file is too short


@pytest.mark.parametrize("size", [100, 2 * _BLOCK, 2 * _BLOCK + 100])
@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_what_the_disk_refuses_at_the_end_is_heard_too(tmp_path, monkeypatch, size, call):
    monkeypatch.setattr(writer.os, call, mock.Mock(side_effect=OSError(errno.EIO, "no disk")))
    with pytest.raises(OSError, match="no disk"), FileWriter(tmp_path / "file") as file:
        file.write(bytes(size))


@pytest.mark.parametrize("threaded", [True, False])
def test_an_error_in_the_block_is_the_one_that_is_raised_and_no_thread_stays(tmp_path, threaded):
    before = threading.active_count()
    with pytest.raises(ValueError, match="mine"), FileWriter(tmp_path / "file", threaded) as file:
        write_blocks(file, 5, error=ValueError("mine"))
    assert threading.active_count() == before


_LEAVES_EARLY = """
import sys
import torch
import farflung

accelerator = farflung.Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(1000, 10000))
accelerator.save_state(sys.argv[1], block=False)
"""


@pytest.mark.long
def test_a_save_in_the_background_of_many_blocks_is_complete_when_the_script_ends_at_once(tmp_path):
    run_python("-c", _LEAVES_EARLY, tmp_path / "last", timeout_s=120)
    run_farflung("checkpoint", "verify", tmp_path / "last")
    assert (tmp_path / "last" / "model.safetensors").stat().st_size > 40_000_000
