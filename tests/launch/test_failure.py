# SPDX-License-Identifier: Apache-2.0
"""A rank that fails leaves its launcher a report in torch's form, and still prints its traceback."""

from __future__ import annotations

import json
import sys
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from farflung.config import environ
from farflung.process.failure import install_failure_report, record_failure
from tests.python import run_python

SCRIPT = """
import sys
from farflung.process.failure import install_failure_report
sys.excepthook = lambda *said: print("hook before:", said[1], file=sys.stderr)
install_failure_report(3)
raise {error}
"""


def run_with(report, error):
    with environ.patched({"TORCHELASTIC_ERROR_FILE": str(report)}):
        return run_python("-c", SCRIPT.format(error=error), code=None)


def test_torch_reads_what_a_rank_left(tmp_path):
    file = tmp_path / "error.json"
    done = run_with(file, "ValueError('bad value')")
    assert (done.returncode, done.stderr) == (1, "[rank3]: hook before: bad value\n")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    assert failure.message["message"] == "ValueError: bad value"
    assert failure.message["extraInfo"]["py_callstack"].startswith("Traceback (most recent call last)")
    assert abs(failure.timestamp - time.time()) < 60
    assert failure.message["extraInfo"]["cause"] == "own"
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


def test_an_interrupt_is_not_reported(tmp_path):
    assert run_with(tmp_path / "error.json", "KeyboardInterrupt").stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_without_a_launcher_nothing_is_changed():
    environ.remove("TORCHELASTIC_ERROR_FILE")
    before = sys.excepthook
    install_failure_report(0)
    assert sys.excepthook is before
    record_failure(ValueError("nobody reads this"))


def test_torchs_own_prefix_is_not_doubled(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", lambda *said: sys.stderr.write("[rank1]: from torch\n"))
    environ.export({"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")})
    install_failure_report(1)
    sys.excepthook(ValueError, ValueError("x"), None)
    assert capsys.readouterr().err == "[rank1]: from torch\n"


def test_a_report_that_can_not_be_written_does_not_hide_the_error(tmp_path, capsys):
    environ.export({"TORCHELASTIC_ERROR_FILE": str(tmp_path / "no" / "such" / "folder")})
    record_failure(ValueError("x"))
    assert "could not be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [ValueError("one\ntwo"), KeyError("k"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "r")]
)
def test_any_error_fits_into_the_report(error, tmp_path):
    file = tmp_path / "error.json"
    environ.export({"TORCHELASTIC_ERROR_FILE": str(file)})
    record_failure(error)
    assert json.loads(file.read_text())["message"]["message"] == f"{type(error).__name__}: {error}"
