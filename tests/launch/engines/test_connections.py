# SPDX-License-Identifier: Apache-2.0
"""Two speakers on one line: what ranks print arrives as it was, and nothing of it is taken for the launcher's word."""

from __future__ import annotations

import io
import json
import random
import signal
import sys

import pytest

from farflung.config.launch import LaunchSettings
from farflung.launch.codes import DONE, FAILED
from farflung.launch.engines.connections import GONE, Connections, SshConnection
from farflung.launch.events import Screen, showing
from farflung.launch.shell import start_of
from farflung.process.tether import mark_of, split_reports
from tests.waits import until

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
    words = [*start_of("farflung.process.tether")[1:], "--reports", TOKEN, sys.executable, "-m", "farflung", *launch]
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


def test_a_connection_hands_on_the_key_and_signals_and_a_second_sigkill_closes_it(capfdbinary):
    connection = SshConnection("a", ["sh", "-c", "read key; echo $key; head -c 2 | od -An -tu1"], key=b"\x01\xfe")
    for number in (0, signal.SIGTERM):
        connection.send(number)
    assert b"".join(connection.streams[0]).split() == [b"01fe", b"0", b"15"]
    assert list(connection.streams[1]) == []
    until(lambda: connection.poll() is not None)
    assert (connection.code, connection.is_gone) == (GONE, True)  # as no launcher has reported its end
    connection = SshConnection("a", ["sleep", "60"])
    connection.send(signal.SIGKILL)
    assert connection.poll() is None
    connection.send(signal.SIGKILL)
    until(lambda: connection.poll() is not None)
    assert (connection.code, connection.is_gone) == (-signal.SIGKILL, True)
    for stream in connection.streams:
        assert list(stream) == []


def line_of(**facts) -> str:
    return mark_of(TOKEN).decode() + json.dumps({"v": 1, "time": 1.0, **facts})


def failed(error: str, cause: str, at: float) -> str:
    facts = {"message": f"{error} failed", "error": error, "cause": cause, "failed_at": at, "report": f"box of {error}"}
    return line_of(event="failed", **facts)


def follow(home, capfd, lines: dict[str, list[str]], codes: dict[str, int], **settings) -> tuple[int, str]:
    """Follow launchers that report these lines and end with these codes; return the run's code and what is shown."""
    for host, reports in lines.items():
        (home / host).write_text("".join(f"{line}\n" for line in reports))
    connect = {host: SshConnection(host, ["sh", "-c", f"cat {host} >&2; exit {codes[host]}"]) for host in lines}
    given = LaunchSettings(**settings)
    with showing(Screen(given)):
        code = Connections(given, TOKEN, connect.__getitem__, lines).follow()
    shown = capfd.readouterr()
    return code, shown.out + shown.err


NOTE, END = line_of(event="note", message="a note"), line_of(event="ended", code=0)


def test_a_failure_of_ones_own_is_the_box_and_those_it_has_caused_are_lines(home, capfd):
    own, theirs, late = failed("mine", "own", 9.0), failed("theirs", "peer", 1.0), failed("late", "own", 10.0)
    code, text = follow(home, capfd, {"a": [theirs, NOTE], "b": [late, own]}, {"a": 3, "b": 4})
    assert code == 4
    assert text.count("box of") == 1
    assert text.index("mine failed") < text.index("box of mine") < text.index("then:") < text.index("late failed: late")
    assert text.index("late failed: late") < text.index("theirs failed: theirs")
    assert "[a] farflung: a note\n" in text
    assert "a note" not in follow(home, capfd, {"a": [NOTE, END]}, {"a": 0}, quiet=True)[1]
    code, text = follow(home, capfd, {"a": [own]}, {"a": 3}, json=True)
    rows = [json.loads(line) for line in text.splitlines()]
    assert [(row["event"], row["host"], row["error"]) for row in rows] == [("failed", "a", "mine")]


def test_replicas_fail_each_in_a_box_and_the_others_go_on(home, capfd):
    ends = {"a": [END], "b": [failed("mine", "own", 9.0)], "c": ["Timeout"], "d": [END]}
    code, text = follow(home, capfd, ends, {"a": 0, "b": 3, "c": GONE, "d": 4}, elastic="1:4")
    assert code == 3
    assert "box of mine" in text
    assert "c is gone: Timeout; the others continue" in text
    assert follow(home, capfd, {"a": [END], "c": ["Timeout"]}, {"a": 0, "c": GONE}, elastic="1:4")[0] == DONE
    assert follow(home, capfd, {"c": ["Timeout"]}, {"c": GONE}, elastic="1:4")[0] == FAILED


@pytest.mark.parametrize(("code", "how"), [(GONE, "b is gone: Timeout"), (137, "b ended with exit code 137")])
def test_a_replica_that_is_lost_once_the_work_is_done_is_not_started_again(code, how, home, capfd):
    ends = {"a": f"echo '{END}' >&2", "b": f"until [ -e done ]; do sleep 0.1; done; echo Timeout >&2; exit {code}"}
    given, started = LaunchSettings(elastic="1:2"), []

    def connect(name):
        started.append(name)
        return SshConnection(name, ["sh", "-c", ends[name]])

    run = Connections(given, TOKEN, connect, ends, max_restarts=1)
    with showing(Screen(given)):
        assert run.follow(lambda: run.is_done and (home / "done").touch()) == DONE
    assert f"{how}; the others continue" in capfd.readouterr().err
    assert started == ["a", "b"]
