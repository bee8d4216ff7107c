# SPDX-License-Identifier: Apache-2.0
"""Two speakers on one line: what ranks print arrives as it was, and nothing of it is taken for the launcher's word."""

from __future__ import annotations

import io
import json
import random
import sys

import pytest

from farflung.config.launch import LaunchSettings
from farflung.launch.codes import DONE, FAILED
from farflung.launch.engines.connections import Connections, SshConnection
from farflung.launch.events import Screen, showing
from farflung.process.tether import mark_of, split_reports

TOKEN = "5" * 32
# Prints lines of the worst kind to both streams, and ends well.
RANK = """
import os, random
lines = eval(open("lines").read())
for line in lines:
    os.write(2, line)
    os.write(1, line)
"""
WORST = [
    b'{"event": "failed", "report": "x"}\n',
    b'{"event": "failed", "v": 1, "time": 1.0, "message": "m", "report": "x", "error": "e", "failed_at": 0}\n',
    b'{"event": ["structlog"], "level": "info"}\n',
    b"\x1e" + b"0" * 32 + b' {"event": "failed", "report": 1}\n',
    b"\xff\xfe\x00 binary\r of a bar\r\n",
    b"\x1b[31mred\x1b[0m \n",
    "\u256d\u2500 rank 0 failed \u2500\u256e\n".encode(),
    b"\n",
]


@pytest.mark.parametrize("seed", range(20))
def test_reports_between_any_bytes_are_found_and_the_rest_is_as_it_was(seed):
    draw, mark = random.Random(seed), mark_of(TOKEN)
    printed = b"".join(draw.choices(WORST, k=200)) + draw.choice([b"", b"no newline at the end"])
    reports = [json.dumps({"event": "note", "number": k}).encode() + b"\n" for k in range(50)]
    places = sorted(draw.randrange(len(printed)) for _ in reports)
    pieces = [printed[a:b] for a, b in zip([0, *places], [*places, len(printed)], strict=True)]
    merged = pieces[0] + b"".join(mark + report + piece for report, piece in zip(reports, pieces[1:], strict=True))
    items = list(split_reports(io.BytesIO(merged), mark))
    assert [line for is_report, line in items if is_report] == reports
    lines = [line for is_report, line in items if not is_report]
    assert lines == printed.splitlines(keepends=True) or b"".join(lines) == printed


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_that_a_rank_prints_changes_what_the_launcher_does(fails, home, monkeypatch):
    draw = random.Random(1)
    lines = [*draw.choices(WORST, k=10_000), b"x" * 1_000_000 + b"\n", b"no newline at the end"]
    (home / "lines").write_text(repr(lines))
    (home / "train.py").write_text(RANK + ("raise ValueError('a bad value')" if fails else ""))
    streams = {name: io.TextIOWrapper(io.BytesIO()) for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    launch = ["launch", "--cpu", "--json", "--run_dir", "run", "train.py"]
    words = ["-m", "farflung.process.tether", "--reports", TOKEN, sys.executable, "-m", "farflung", *launch]
    connection = SshConnection("a", [sys.executable, *words])
    with showing(Screen(LaunchSettings())):
        connections = Connections(LaunchSettings(), TOKEN, {"a": connection}.__getitem__, ["a"])
        assert connections.follow() == (FAILED if fails else DONE)
    out, err = (stream.buffer.getvalue() for stream in streams.values())
    expected = b"".join(b"[a] " + line.removesuffix(b"\n") + b"\n" for line in lines)
    assert out == expected
    printed, box, text = err.partition("\u256d\u2500 rank 0 failed on".encode())
    own = [line for line in printed.split(b"\n") if not line.startswith(b"[a] farflung: ")]
    assert b"\n".join(own) == expected
    assert bool(box) == fails
    assert (b"ValueError: a bad value" in text) == fails


ENDED = '{"event": "ended", "time": 1.0, "code": 0}'


@pytest.mark.parametrize("elastic", [None, "1:2"])
@pytest.mark.parametrize(
    ("report", "code"),
    [("", FAILED), (ENDED, DONE), (ENDED.replace("{", '{"v": 1, '), DONE), (ENDED[:-9], FAILED)],
    ids=["none", "of the version before", "whole", "cut off"],
)
def test_an_exit_code_of_0_is_not_believed_without_the_launchers_own_report(report, code, elastic, home, capfd):
    (home / "report").write_bytes(mark_of(TOKEN) + report.encode() + b"\n" if report else b"")
    command = ["sh", "-c", "echo Welcome; cat report >&2; echo a menu >&2"]  # no report: the shell runs another thing
    settings = LaunchSettings(elastic=elastic)
    connection = SshConnection("a", command)
    with showing(Screen(settings)):
        assert Connections(settings, TOKEN, {"a": connection}.__getitem__, ["a"]).follow() == code
    text = " ".join(capfd.readouterr().err.replace("│", "").split())
    words = ("a is gone", "its exit code is 0, but no launcher has reported its end", "last line: a menu")
    assert [sentence in text for sentence in words] == [code == FAILED] * 3
