# SPDX-License-Identifier: Apache-2.0
"""The vote on where a run stops: one boundary for all ranks, however far apart they are, and no wait for a step."""

from __future__ import annotations

import os
import random
import secrets
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

from farflung.base.errors import ConfigError
from farflung.comm import presence
from farflung.comm.preemption import PreemptionVote
from farflung.comm.presence import PresenceStore
from farflung.testing.patience import patience

LAST = 2000  # boundaries that a rank comes to at most


@pytest.fixture(autouse=True, scope="module")
def store():
    """The store of all runs, whose keys begin with a name of each."""
    with pytest.MonkeyPatch.context() as patch:
        hash_store = dist.HashStore()
        patch.setattr(presence, "default_store", lambda: hash_store)
        yield


def ranks_of(size):
    """What the ranks of a run, which are threads, know of each other."""
    name = secrets.token_hex(8)
    return [PresenceStore(name, rank, size) for rank in range(size)]


@contextmanager
def voters(size):
    made = [PreemptionVote(rank, size) for rank in range(size)]
    try:
        yield made
    finally:
        for one in reversed(made):
            one.release()


@pytest.mark.parametrize("number", range(1, 4))
def test_a_signal_that_comes_while_the_watchdog_looks_is_not_forgotten(number):
    class Interrupted(PreemptionVote):
        """Gets a signal right after `why` is read for the `number`-th time."""

        _why, _num_reads = "", -1  # one read is before the look

        @property
        def why(self):
            before, self._num_reads = self._why, self._num_reads + 1
            self._why = before or ("SIGUSR1 at rank 0" if self._num_reads == number else "")
            return before

        @why.setter
        def why(self, text):
            self._why = text

    vote = Interrupted(0, 2)
    try:
        assert not vote.passes()
        for _ in range(4):
            vote.look(ranks_of(2)[0])
        assert vote.why
    finally:
        vote.release()


def stops(size, seed, in_lockstep, signalled):
    """Where each rank stops, None where it comes to its end, if ranks and watchdogs are delayed at random."""
    ranks, stopped, over = ranks_of(size), {}, threading.Event()
    step = threading.Barrier(size, timeout=patience(30))
    first = random.Random(seed).randrange(1, 20)
    drift = [0.0005 + random.Random(seed + 7 + rank).random() * 0.002 for rank in range(size)]

    def train(rank, vote):
        pace = random.Random(f"{seed} {rank}")
        stopped[rank] = None
        for number in range(1, LAST):
            time.sleep(pace.random() * drift[rank])
            if number == first and rank in signalled:
                vote.why = f"SIGUSR1 at rank {rank}"
            if in_lockstep:
                step.wait()  # an all-reduce, which a rank that has stopped would not come to
            if vote.passes():
                stopped[rank] = number
                return

    def watch(rank, vote):
        pace = random.Random(f"{rank} {seed}")
        while not over.is_set():
            time.sleep(pace.random() * 0.03)
            vote.look(ranks[rank])

    with voters(size) as votes:
        trainers = [threading.Thread(target=train, args=one, daemon=True) for one in enumerate(votes)]
        watchdogs = [threading.Thread(target=watch, args=one, daemon=True) for one in enumerate(votes)]
        for thread in trainers + watchdogs:
            thread.start()
        for thread in trainers:
            thread.join(patience(30))
            assert not thread.is_alive(), "a rank waits for ever"
        over.set()
        for thread in watchdogs:
            thread.join()
    return stopped, ranks[0], first


@settings(max_examples=25)
@given(st.integers(1, 6), st.integers(0, 10**6), st.booleans(), st.data())
def test_all_ranks_stop_at_one_boundary_whoever_was_signalled_and_however_far_apart_they_are(
    size, seed, lockstep, data
):
    signalled = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    stopped, rank, first = stops(size, seed, lockstep, signalled)
    assert len(set(stopped.values())) == 1
    assert stopped[0] is not None
    if size > 1:  # not earlier than any rank has said, and nobody has to go beyond the furthest
        assert stopped[0] == max(map(int, rank.posts("stop").values()))
    assert stopped[0] >= first or not lockstep


def test_without_a_signal_no_rank_stops_or_talks():
    stopped, rank, _ = stops(3, 1, True, set())
    assert (set(stopped.values()), rank.published("signal"), rank.posts("stop")) == ({None}, "", {})


def test_ranks_train_on_to_their_end_where_one_has_ended_or_the_store_is_gone():
    with voters(2) as (vote, _):
        vote.why = "SIGTERM at rank 0"
        first, second = ranks_of(2)
        second.mark_ended()
        vote.look(first)
        assert not any(vote.passes() for _ in range(5))
    with voters(2) as (vote, _):
        vote.why = "SIGTERM at rank 0"
        vote.look(ranks_of(2)[0])
        threading.Timer(0.1, vote.end).start()  # what the watchdog calls at its end
        assert not any(vote.passes() for _ in range(5))


def test_a_warning_never_ends_a_process_and_handlers_are_given_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    with voters(1) as (vote,):
        for _ in range(3):
            assert not vote.passes()
            assert not vote.why
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):  # two at once are one
            os.kill(os.getpid(), number)
        assert vote.passes()
        assert vote.why == "SIGUSR1 at rank 0"
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before


def test_only_the_main_thread_can_hear_signals():
    with ThreadPoolExecutor(1) as threads, pytest.raises(ConfigError, match="only the main thread hears signals"):
        threads.submit(PreemptionVote, 0, 1).result()
