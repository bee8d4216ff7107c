# SPDX-License-Identifier: Apache-2.0
"""An event is a value that JSON carries unchanged; `words` alone turns it into English, and telling ends no work."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest
from hypothesis import given, strategies as st

from farflung.base.events import Event, Kind, record, tell, words
from farflung.config import environ
from farflung.config.launch import LaunchSettings
from farflung.launch.events import Screen, pass_on, showing
from farflung.launch.folder import RunFolder
from farflung.testing.patience import patience

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAMES = TEXTS.filter(lambda name: name not in ("event", "v", "time", "replica", "generation"))
FACTS = st.dictionaries(
    NAMES, st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS | st.lists(TEXTS), max_size=4
)
EVERY_EVENT = st.builds(
    Event, st.sampled_from(Kind), st.floats(0, 1e10), TEXTS, st.none() | st.integers(0, 1000), FACTS
)


@given(event=EVERY_EVENT)
def test_json_carries_an_event_unchanged(event):
    assert Event.of_json(event.to_json()) == event


@given(line=TEXTS | st.dictionaries(TEXTS, st.integers() | TEXTS, max_size=4).map(json.dumps))
def test_a_line_of_another_program_is_no_event(line):
    assert Event.of_json(line) is None
    assert Event.of_json('{"event": "lost", "message": "of the script"}') is None


def test_what_a_later_version_writes_is_a_note():
    later = Event.of_json('{"event": "split", "v": 1, "time": 1.5, "generation": 2, "message": "two now"}')
    assert later == Event(Kind.NOTE, 1.5, "", 2, {"message": "two now"})
    assert str(Event.of_json('{"event": "lost", "v": 2, "time": 1.5}')) == "lost"


SINCE = time.mktime((2026, 1, 2, 1, 44, 32, 0, 0, -1))
AT, MACHINE = {"address": "a:2"}, {"machine_rank": 1, "machines": 2}
GONE, GIVES_UP = {"is_gone": True}, {"cut_s": 4, "gives_up_s": 6}


def of(kind, who="", generation=None, **facts):
    return Event(kind, 0, who, generation, facts)


SENTENCES = {
    "started: 1 machine, 2 processes": of(Kind.STARTED, processes=2, machines=1),
    "2 replicas of a run at a:2; more": of(Kind.STARTED, replicas=2, join="more", **AT),
    "machine 1 of 2 waits for the others at a:1, over lo": of(Kind.WAITS, **MACHINE, endpoint="a:1", interface="lo"),
    "member 1 waits: it is late": of(Kind.WAITS, "member 1", why="it is late"),
    "member 1 can't begin: no": of(Kind.WAITS, "member 1", why="no", is_member=True),
    "generation 1: training begins with 2 replicas": of(Kind.BEGAN, "", 1, replicas=2),
    "generation 5: training continues with 2 replicas from the state at step 12, 3 later rounds lost": of(
        Kind.BEGAN, "", 5, replicas=2, step=12, rounds_lost=3
    ),
    "generation 5: training continues with 1 replica from the state at step 12, no round lost": of(
        Kind.BEGAN, "", 5, replicas=1, step=12, rounds_lost=0
    ),
    "generation 3: replica 0 of a:8 joined; 2 replicas train": of(Kind.JOINED, "replica 0 of a:8", 3, replicas=2),
    "replica 0 was let in; 3 replicas train": of(Kind.JOINED, "replica 0", replicas=3),
    "replica 1 differs from the others: torch 2.1": of(Kind.DIFFERS, "replica 1", why="torch 2.1"),
    "replica 4 is not let in: its loop": of(Kind.REFUSED, "replica 4", why="its loop"),
    "generation 2: replica 1 is out: was killed by SIGKILL; training continues with 1 replica": of(
        Kind.LOST, "replica 1", 2, why="was killed by SIGKILL", replicas=1, has_state=True
    ),
    "generation 2: replica 1 is out: it is gone; training begins again with 1 replica": of(
        Kind.LOST, "replica 1", 2, why="it is gone", replicas=1, has_state=False
    ),
    "a was left out: it is late; it asks to be let in again": of(Kind.LOST, "a", why="it is late", asks_again=True),
    "rank 1 is lost: ValueError: x": of(Kind.LOST, "rank 1", why="ValueError: x"),
    "generation 2: 2 replicas connected again (a cut)": of(Kind.RECONNECTED, "", 2, replicas=2, why="a cut"),
    "replica 0 was killed by SIGKILL; it starts again in 1 s (restart 1 of 3 within an hour)": of(
        Kind.RESTARTED, "replica 0", how="was killed by SIGKILL", wait_s=1.0, restart=1, max_restarts=3
    ),
    "the processes start again (restart 1 of 3)": of(Kind.RESTARTED, restart=1, max_restarts=3),
    "replica 0 has ended; it is not started again": of(Kind.FAILED, "replica 0", how="has ended"),
    "replica 0 is not started again": of(Kind.FAILED, "replica 0", how=""),
    "rank 0 failed: ValueError: x": of(Kind.FAILED, "rank 0", why="ValueError: x\ny"),
    "cut off from the run's store at a:2 since 01:44:32; replicas train on": of(Kind.CUT_OFF, **AT, since=SINCE),
    "still cut off from the run's store at a:2, for 4 s; it gives up after 6 s": of(Kind.CUT_OFF, **AT, **GIVES_UP),
    "the run's store at a:2 is gone; replicas train on, but none is started again": of(Kind.CUT_OFF, **AT, **GONE),
    "reaches the run's store at a:2 again, after 3 s": of(Kind.REACHED, **AT, cut_s=3),
    "ended with exit code 3": of(Kind.ENDED, code=3),
    "rank 0 trains 1,000 parameters by FSDP": of(Kind.MODEL, "rank 0", parameters=1000, strategy="FSDP"),
    "rank 0 has trained on after 2 s for a checkpoint": of(Kind.SAVING, "rank 0", seconds=2),
    "checkpoint a": of(Kind.CHECKPOINT, folder="a"),
    "from step 1,280 on a round has 64 steps, applied 3 steps later": of(Kind.CHANGED, step=1280, every=64, delay=3),
    "replica 2 does not count in rounds: NaN": of(Kind.EXCLUDED, "replica 2", why="NaN"),
    "a step was skipped, as its loss or gradients are not finite (2 in a row, 5 so far)": of(
        Kind.SKIPPED, in_a_row=2, total=5
    ),
    "replica 2 counts in rounds again": of(Kind.EXCLUDED, "replica 2", why=""),
    "with 2 replicas at work one of them can spoil the weights: the robust rule outvotes one of 4 or more": of(
        Kind.OUTVOTES, "replica 0", replicas=2, least=4
    ),
    "with 4 replicas at work the robust rule outvotes any one of them again": of(
        Kind.OUTVOTES, "replica 0", replicas=4, least=4
    ),
}
# Those whose message is a fact, and the one that nobody is shown.
OF_A_MESSAGE = {"settings", "submitted", "state", "ending", "left", "note", "warning", "process", "chosen"}


@pytest.mark.parametrize(("sentence", "event"), SENTENCES.items())
def test_each_event_has_its_words(sentence, event):
    assert words(event) == sentence
    assert words(Event.of_json(event.to_json())) == sentence


def test_every_kind_has_words():
    assert {event.kind.value for event in SENTENCES.values()} | OF_A_MESSAGE == {kind.value for kind in Kind}


@given(event=EVERY_EVENT)
def test_words_are_found_for_whatever_facts_another_version_gives(event):
    assert isinstance(words(event), str)


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("is_json", [False, True])
def test_a_screen_that_can_not_be_written_to_ends_no_work_and_the_folder_has_all(
    number, first, is_json, tmp_path, monkeypatch
):
    stream = Mock(spec=["write", "flush", "isatty"], **{"isatty.return_value": False})
    stream.write.side_effect = [None] * first + [OSError(number, "no")] * 100
    monkeypatch.setattr(sys, "stderr", stream)
    with showing(Screen(LaunchSettings(json=is_json)), RunFolder(tmp_path)):
        for k in range(3):
            record(Kind.NOTE, message=f"note {k}")
        record(Kind.FAILED, message="rank 0 failed", report="why")  # in a box
        record(Kind.ENDED, code=0, goes_on=True)
        tell("of a rank")
    assert stream.write.call_count > first
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [row["message"] for row in rows] == ["note 0", "note 1", "note 2"]


def test_reports_that_nobody_reads_any_more_end_no_work_and_the_folder_has_them(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setenv(environ.REPORTS, str(writer))
    with showing(Screen(LaunchSettings(json=True)), RunFolder(tmp_path)):
        assert environ.text(environ.REPORTS) is None, "ranks don't report there"
        record(Kind.NOTE, message="words")
    os.close(writer)
    assert json.loads((tmp_path / "events.jsonl").read_text())["message"] == "words"


def test_a_quiet_launcher_reports_to_the_one_above_it_nevertheless(monkeypatch):
    reader, writer = os.pipe()
    monkeypatch.setenv(environ.REPORTS, str(writer))
    with showing(Screen(LaunchSettings(json=True, quiet=True))):
        record(Kind.ENDED, code=0)
    os.close(writer)
    with os.fdopen(reader) as reports:
        assert json.loads(reports.read())["event"] == "ended"


def test_a_folder_that_is_gone_ends_no_work(tmp_path, capsys):
    with showing(RunFolder(tmp_path / "gone"), Screen(LaunchSettings())):
        record(Kind.NOTE, message="words")
    assert capsys.readouterr().err == "farflung: words\n"


def test_lines_of_other_programs_are_passed_on_to_streams_of_bytes_and_of_text(tmp_path):
    of_text = io.StringIO()  # such as a notebook's
    with open(tmp_path / "printed", "w") as of_bytes:
        of_bytes.write("before ")
        for stream in (of_bytes, of_text):
            pass_on(b"caf\xc3\xa9 \xff\n", stream)
        assert (tmp_path / "printed").read_bytes() == b"before caf\xc3\xa9 \xff\n"
    assert of_text.getvalue() == "caf\xe9 \ufffd\n"


NOTES = """
import sys
from farflung.base.events import Kind, flush_streams, record
from farflung.config.launch import LaunchSettings
from farflung.launch.events import Screen, showing
with showing(Screen(LaunchSettings())):
    for k in range(3):
        record(Kind.NOTE, message="words " * 3000)
print("the work is done")
flush_streams()
"""


def test_what_a_full_disk_did_not_take_does_not_change_the_exit_code():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", NOTES], stdout=subprocess.PIPE, stderr=full, timeout=patience(60))
    assert (done.stdout, done.returncode) == (b"the work is done\n", 0)
