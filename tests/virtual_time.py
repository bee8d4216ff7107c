# SPDX-License-Identifier: Apache-2.0
"""A clock that moves only while all threads wait, so what a test measures is the protocol and not this machine.

Threads compute in no time at all. They wait by `time.sleep`, for futures, for other threads, and for events with a time
limit; a lock must not be held meanwhile. Each thread belongs to the owner of the one that started it, which can be
killed or stopped with all its threads: they notice when they wait, as each request of a `memory_bucket` does.
"""

import heapq
import itertools
import threading
import time
from concurrent.futures import Future, TimeoutError as FutureTimeout
from contextlib import contextmanager
from unittest import mock

_LOOK_S = 0.02  # between two looks at an event or a condition


class Killed(BaseException):
    """The owner of this thread is dead."""


class Owner:
    """Threads that live, stop and die together.

    Attributes:
        stopped_until: the time before which none of them continues.
    """

    def __init__(self):
        self.is_dead, self.stopped_until = False, 0.0


class VirtualTime:
    """The clock, in seconds since it was made."""

    def __init__(self):
        self.now, self._num_running, self._lock = 0.0, 1, threading.Lock()
        self._sleepers, self._count, self._is_over = [], itertools.count(), False

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self._wait_until(self.now + max(0.0, seconds), None)
        owner = owner_here()
        while owner.stopped_until > self.now and not owner.is_dead:
            self._wait_until(owner.stopped_until, None)
        if owner.is_dead or self._is_over:
            raise Killed

    def until_done(self, future, seconds=None):
        """Wait for a future; return whether it is done."""
        if not future.done():
            self._wait_until(None if seconds is None else self.now + seconds, future)
        if owner_here().is_dead or (self._is_over and not future.done()):
            raise Killed
        return future.done()

    def begun(self):
        with self._lock:
            self._num_running += 1

    def ended(self):
        with self._lock:
            self._num_running -= 1
            self._advance()

    def stop(self):
        """End all threads that wait."""
        with self._lock:
            self._is_over = True
            for *_, wakes in self._sleepers:
                wakes()
            self._sleepers.clear()

    def _wait_until(self, at, future):
        gate, is_awake = threading.Lock(), []
        gate.acquire()

        def wakes():  # with the lock
            if not is_awake:
                is_awake.append(True)
                self._num_running += 1
                gate.release()

        def done(_):
            with self._lock:
                wakes()

        with self._lock:
            if self._is_over:
                return
            self._num_running -= 1
            if at is not None or future is None:
                heapq.heappush(self._sleepers, (at, next(self._count), wakes))
        if future is not None:
            future.add_done_callback(done)
        with self._lock:
            self._advance()
        gate.acquire()

    def _advance(self):
        """Wake those that sleep until the earliest time, if nobody runs."""
        while self._num_running == 0 and self._sleepers:
            self.now = max(self.now, self._sleepers[0][0])
            while self._sleepers and self._sleepers[0][0] <= self.now:
                heapq.heappop(self._sleepers)[2]()


def owner_here():
    """Return the owner of this thread."""
    thread = threading.current_thread()
    if not hasattr(thread, "owner"):
        thread.owner = Owner()
    return thread.owner


@contextmanager
def virtual_time():
    """Give this process a clock of its own for the length of a block."""
    clock, start = VirtualTime(), threading.Thread.start

    def started(thread):
        act, thread.ended = thread.run, Future()
        if not hasattr(thread, "owner"):
            thread.owner = owner_here()

        def run():
            try:
                act()
            except Killed:
                pass
            finally:
                thread.ended.set_result(None)
                clock.ended()

        thread.run = run
        clock.begun()
        start(thread)

    def joined(thread, timeout=None):
        clock.until_done(thread.ended, timeout)

    def result(future, timeout=None):
        if not clock.until_done(future, timeout):
            raise FutureTimeout
        return Future._Future__get_result(future)

    wait = threading.Event.wait

    def waited(event, timeout=None):
        if timeout is None:
            return wait(event)
        until = clock.now + timeout
        while not event.is_set() and clock.now < until:
            clock.sleep(min(_LOOK_S, until - clock.now))
        return event.is_set()

    def waited_for(condition, predicate, timeout=None):
        assert timeout is None
        while not (found := predicate()):
            condition.release()
            try:
                clock.sleep(_LOOK_S)
            finally:
                condition.acquire()
        return found

    patches = [
        (time, "sleep", clock.sleep),
        (time, "monotonic", clock.monotonic),
        (time, "perf_counter", clock.monotonic),
        (threading.Thread, "start", started),
        (threading.Thread, "join", joined),
        (threading.Event, "wait", waited),
        (threading.Condition, "wait_for", waited_for),
        (Future, "result", result),
    ]
    try:
        for place, name, value in patches:
            patch = mock.patch.object(place, name, value)
            patch.start()
            patches[patches.index((place, name, value))] = patch
        yield clock
    finally:
        clock.stop()
        for patch in reversed(patches):
            patch.stop()
