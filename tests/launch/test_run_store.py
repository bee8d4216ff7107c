# SPDX-License-Identifier: Apache-2.0
"""A launcher that is cut off from its run's store says so once, and again when it is back or gone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from unittest.mock import Mock

import pytest

from farflung.address import schemes as address
from farflung.address.c10d_transport import C10dTransport
from farflung.address.member_store import LauncherNotes
from farflung.base.errors import Unreachable
from farflung.base.events import Sink
from farflung.config.launch import LaunchSettings
from farflung.launch import elastic, replicas, run_store
from farflung.launch.codes import BY_SIGNAL, ENGINE, FAILED, REQUEUE
from farflung.launch.events import showing
from farflung.launch.run_store import RunStore
from farflung.process.identity import address_of
from farflung.testing.patience import patience
from tests.outer.elastic_run import served

fails = Mock(side_effect=Unreachable("no answer"))


def is_reached(notes):
    return notes.num_launchers() == 0


@pytest.fixture
def said():
    """The words of the events that are recorded."""
    sink, sentences = Sink(), []
    sink.show = lambda event: sentences.append(str(event))
    with showing(sink):
        yield sentences


@pytest.fixture
def cut(monkeypatch, said):
    """A store that a launcher is cut off from, and what the launcher said."""
    monkeypatch.setattr(run_store, "_ASK_AGAIN_S", 0.0)
    server = served()
    where = f"127.0.0.1:{server.port}"
    store = RunStore(C10dTransport(("127.0.0.1", server.port)))
    assert store.ask(is_reached, False)
    for _ in range(2):
        assert store.ask(fails, "nothing") == "nothing"
    assert re.fullmatch(rf"cut off from the run's store at {where} since [\d:]{{8}}; replicas train on", said[0])
    return server, store, said


def test_it_is_found_again_when_the_line_is_back(cut):
    server, store, said = cut
    for _ in range(2):
        assert store.ask(is_reached, False)
    assert re.fullmatch(rf"reaches the run's store at 127.0.0.1:{server.port} again, after .*", said[1])
    assert (len(said), store.is_gone) == (2, False)


def test_it_counts_as_gone_after_a_while_and_is_there_again_once_it_answers(cut, monkeypatch):
    server, store, said = cut
    now = time.monotonic()
    for later_s, num_said, is_gone in (29, 1, False), (31, 2, False), (60, 2, False), (602, 3, True), (650, 3, True):
        monkeypatch.setattr(time, "monotonic", partial(float, now + later_s))
        store.ask(fails, 0)
        assert (len(said), store.is_gone) == (num_said, is_gone)
    where = f"127.0.0.1:{server.port}"
    assert re.fullmatch(rf"still cut off from the run's store at {where}, for 31.* s; it gives up after 600 s", said[1])
    assert said[2].startswith(f"the run's store at {where} is gone; ")
    assert store.ask(is_reached, False)
    assert (len(said), store.is_gone) == (4, False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_launcher_that_waits_for_its_address_still_ends_when_it_is_asked_to(number, said, tmp_path, monkeypatch):
    transport = address.transport_at(tmp_path.as_uri())
    launcher = replicas.Launcher(LaunchSettings(use_cpu=True), lambda own: None, transport, tmp_path, "mine")
    monkeypatch.setattr(launcher._store, "ask", lambda act, otherwise: otherwise)  # no answer comes
    threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
    assert launcher.run([{}]) == (REQUEUE if number == signal.SIGUSR1 else BY_SIGNAL + number)


def launched(tmp_path, start, **settings):
    """Supervise one replica that `start` starts, with an address in a folder; return the exit code."""
    transport = address.transport_at(tmp_path.as_uri())
    return replicas.Launcher(LaunchSettings(use_cpu=True, **settings), start, transport, tmp_path, "mine").run([{}])


def test_a_replica_may_end_by_a_signal_without_a_name(said, tmp_path):
    number = signal.SIGRTMIN + 3
    deed = f"import os; os.kill(os.getpid(), {number})"
    start = Mock(return_value=subprocess.Popen([sys.executable, "-c", deed]))
    assert launched(tmp_path, start, max_restarts=0) == FAILED
    assert f"signal {number}" in said[-1]


@pytest.mark.parametrize(("max_restarts", "code"), [(0, ENGINE), (1, 0)])
def test_a_start_that_the_system_refuses_is_tried_again_like_one_that_failed(max_restarts, code, said, tmp_path):
    refusals = [BlockingIOError(11, "Resource temporarily unavailable")]

    def start(own):
        if refusals:
            raise refusals.pop()
        return subprocess.Popen([sys.executable, "-c", ""])

    assert launched(tmp_path, start, max_restarts=max_restarts) == code
    assert "replica 0 of mine could not be started ([Errno 11] Resource temporarily unavailable)" in said[0]


def test_a_launcher_that_is_to_end_leaves_a_request_that_gets_no_answer(said):
    is_ending, over = threading.Event(), threading.Event()
    store = RunStore(C10dTransport(served()), is_ending.is_set)
    threading.Timer(1.2, is_ending.set).start()
    began = time.monotonic()
    for _ in range(3):
        assert store.ask(lambda notes: over.wait(60), "nothing") == "nothing"
    over.set()
    assert 1.2 <= time.monotonic() - began < patience(5)
    assert len(said) == 1


def test_launchers_of_containers_with_one_host_name_and_one_process_id_have_names_of_their_own():
    assert len({replicas.new_machine_name() for _ in range(10)}) == 10


def test_a_run_begins_where_a_launcher_died_as_it_began_one(tmp_path):
    address.transport_at(tmp_path.as_uri()).board.put("first", b"another")
    settings = LaunchSettings(meet=tmp_path.as_uri(), elastic="1:2")
    board = elastic._met(settings, 1, "mine", None).board
    assert (json.loads(board.get("run"))["most"], board.get("first")) == (2, b"mine")
    with subprocess.Popen(["sleep", "60"]) as process:
        LauncherNotes(board).note_launcher("mine", address_of(process.pid))
        process.kill()
    assert elastic._met(settings, 1, "next", None).board.get("first") == b"next"


def test_a_clock_that_is_set_changes_nothing(cut, monkeypatch):
    _, store, _ = cut
    monkeypatch.setattr(time, "time", lambda: 1e12)
    store.ask(fails, 0)
    assert not store.is_gone
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert store.ask(is_reached, False)


def test_where_nobody_listens_any_more_it_is_gone_and_nothing_else_is_printed(capfd, said):
    server = served()
    store = RunStore(C10dTransport(("127.0.0.1", server.port)))
    assert store.ask(is_reached, False)
    server.close()
    for _ in range(3):
        assert not store.ask(is_reached, False)
    where = store._address
    why = f"The store of this run at {where} is gone: the launcher that serves it has probably ended."
    assert said == [f"the run's store at {where} is gone; replicas train on, but none is started again: {why}"]
    assert "Exception raised from" not in capfd.readouterr().err
