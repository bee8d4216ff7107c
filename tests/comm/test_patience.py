# SPDX-License-Identifier: Apache-2.0
"""A wait ends in time, says now and then that it lasts, and is open to signals."""

import os
import signal
import threading
import time

import pytest

from farflung.base.events import Sink
from farflung.base.signals import handled
from farflung.comm import patience
from farflung.launch.events import showing


class Clock:
    """Time that passes in sleeps alone."""

    def __init__(self):
        self.now, self.slept = 0.0, []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept.append(seconds)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(patience, "time", made)
    return made


def test_a_wait_looks_at_once_and_at_its_end_and_says_so_after_ten_seconds_and_each_thirty(clock):
    sink, said = Sink(), []
    sink.show = lambda event: said.append(str(event))
    with showing(sink):
        waited = list(patience.waiting(3.0, 75.0, patience.aloud("machine 1", "for machine 0")))
    assert (waited[0], waited[-1], len(waited)) == (0.0, 75.0, 26)
    assert said == [f"machine 1 still waits for machine 0, after {s} s" for s in (12, 42, 72)]
    assert list(patience.waiting(3.0, 0.0)) == [0.0]


def test_pauses_grow_up_to_the_longest_and_none_is_longer_than_what_is_left(clock):
    assert len(list(patience.waiting(1.0, 10.0, most_s=4.0))) == 5
    assert clock.slept == [1.0, 2.0, 4.0, 3.0]


def test_a_call_of_foreign_code_is_left_at_a_signal_and_gives_what_it_returns_or_raises():
    def stop(request):
        raise InterruptedError

    assert patience.interruptible(lambda: 7, "seven") == 7
    with pytest.raises(ZeroDivisionError):
        patience.interruptible(lambda: 1 / 0, "no number")
    began, over = time.monotonic(), threading.Event()
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGUSR1]).start()
    with handled(stop, [signal.SIGUSR1]), pytest.raises(InterruptedError):
        patience.interruptible(lambda: over.wait(30), "a long one")
    over.set()
    assert time.monotonic() < began + 20
