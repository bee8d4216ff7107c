# SPDX-License-Identifier: Apache-2.0
"""Signals are requests: those that come together are one, a fork's are not ours, and handlers are given back."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from farflung.base import signals
from farflung.base.signals import END, WARNINGS, handled, preemption

OTHERS = [number for number in (*END, *WARNINGS) if number != signal.SIGINT]


@pytest.fixture(autouse=True)
def started_without_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [*OTHERS[:6], OTHERS[-1]])
def test_signals_that_come_together_are_one_request_and_later_ones_another(number, monkeypatch):
    heard, now = [], [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    before = signal.getsignal(number)
    with handled(heard.append, OTHERS):
        for at in (100.0, 100.1, 102.9, 103.1, 104.0, 107.0):
            now[0] = at
            os.kill(os.getpid(), number)
    assert [(one.number, one.count) for one in heard] == [(number, 1), (number, 2), (number, 3)]
    assert signal.getsignal(number) == before


def test_each_ctrl_c_counts_as_a_person_presses_it():
    heard = []
    with handled(heard.append):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
    assert [one.count for one in heard] == [1, 2, 3]


def test_what_nohup_ignores_stays_ignored_and_a_handler_of_the_script_stays_in_place():
    heard = []
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with handled(heard.append, (signal.SIGHUP, signal.SIGUSR2)):
        os.kill(os.getpid(), signal.SIGHUP)
        assert not heard
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # as a script may do
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGUSR1, False), (signal.SIGTERM, True), (signal.SIGHUP, True)])
def test_a_forked_process_is_ended_by_its_own_signals_but_not_by_a_warning(number, ends):
    heard = []
    with handled(heard.append, (number,)):
        child = os.fork()
        if not child:
            os.kill(os.getpid(), number)
            os._exit(7)
        status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == (-number if ends else 7)
    assert not heard


def test_a_second_sigterm_ends_a_process_that_is_preempted_and_a_warning_never_does(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    child = os.fork()
    if not child:
        with preemption(lambda request: None, replaces=True):
            for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
                os.kill(os.getpid(), number)
            for _ in range(3):
                now[0] += 10
                os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_other_threads_and_scripts_with_handlers_of_their_own_are_left_alone():
    heard = []

    def in_thread():
        with handled(heard.append, (signal.SIGUSR1,)):
            heard.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert heard == [signal.SIG_DFL]
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with preemption(heard.append, replaces=False):
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        assert callable(signal.getsignal(signal.SIGTERM))
