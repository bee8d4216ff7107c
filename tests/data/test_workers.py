# SPDX-License-Identifier: Apache-2.0
"""Whenever workers note their random states, others go on with the numbers that they would have drawn."""

import multiprocessing
import pickle
import random
import signal
from itertools import islice
from multiprocessing import resource_tracker
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader

from farflung.base.signals import PREEMPTION, handled
from farflung.checkpoint import rng
from farflung.data import worker_signals
from farflung.data.resume import workers
from farflung.data.resume.workers import RecordingCollate, WorkerHistory, WorkerPlan, can_record
from farflung.data.torch_loaders import Source
from tests.data.support import Stream, prepared


def draw(samples):
    return samples, random.random(), np.random.rand(), torch.rand(()).item(), np.random.randn()


class Worker:
    """A worker process, as far as its random numbers go. It reads its clock once for each batch."""

    def __init__(self, number, seed, recording, clock):
        self.number, self.recording, self.clock = number, pickle.loads(pickle.dumps(recording)), clock
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        self.recording.start(number)
        self.states = rng.read_host()

    def make(self, batch):
        info = SimpleNamespace(id=self.number)
        with (
            mock.patch.object(workers, "get_worker_info", return_value=info),
            mock.patch.object(workers.time, "perf_counter", side_effect=self.clock),
        ):
            rng.write_host(self.states)
            made = self.recording(batch)
            self.states = rng.read_host()
        return made


def crew(worker_plan, number, gaps, chance, seed=7):
    """Workers that note something when their clocks, which tick in steps of `gaps` by chance, say so."""
    recording = RecordingCollate(draw, None, worker_plan.workers)
    clocks = [iter(np.cumsum([0.0, *chance.choices(gaps, k=60)]).tolist()) for _ in range(number)]
    return [Worker(k, seed + k, recording, clock) for k, clock in enumerate(clocks)]


def arriving(crew, first):
    batch = first
    while True:
        yield crew[(batch - first) % len(crew)].make(batch)
        batch += 1


@pytest.mark.long
@settings(max_examples=20)
@given(
    number=st.integers(1, 4),
    skip=st.integers(0, 3),
    stops=st.lists(st.integers(1, 15), min_size=2, max_size=4),
    gaps=st.sampled_from([(1.0,), (0.0,), (0.0, 1.0), (0.0, 0.0, 1.0)]),
    seed=st.integers(0, 2**32),
)
def test_a_run_that_goes_on_any_number_of_times_draws_what_the_whole_run_draws(number, skip, stops, gaps, seed):
    before, chance = rng.read_host(), random.Random(seed)
    try:
        begun = WorkerPlan.begun(number, skip)
        whole = WorkerHistory(begun).hand_out(arriving(crew(begun, number, (1.0,), chance), skip), skip)
        worker_plan, wanted = begun, skip
        for stop in stops:
            worker_plan = WorkerPlan.from_dict(worker_plan.to_dict())
            history = WorkerHistory(worker_plan)
            source = history.hand_out(arriving(crew(worker_plan, number, gaps, chance), worker_plan.start), wanted)
            prefetched = next(source)
            for _ in range(stop):  # one is read ahead, and made once more by those who go on
                assert prefetched == next(whole)
                prefetched = next(source)
            wanted += stop
            worker_plan = history.worker_plan(wanted)
            assert worker_plan.start <= wanted
    finally:
        rng.write_host(before)


@pytest.mark.parametrize("batch_s", [1e-3, 6e-3, 1.0])
def test_those_who_go_on_make_no_more_again_than_took_five_milliseconds(batch_s):
    before, begun = rng.read_host(), WorkerPlan.begun(1, 0)
    history = WorkerHistory(begun)
    try:
        made = history.hand_out(arriving(crew(begun, 1, (batch_s,), random.Random(0)), 0), 0)
        assert len(list(islice(made, 40))) == 40
    finally:
        rng.write_host(before)
    assert 40 - history.worker_plan(40).start <= 1 + 5e-3 / batch_s


def test_what_is_not_known_is_not_made_up():
    history = WorkerHistory(WorkerPlan.begun(2, 0, [None, None]))
    source = history.hand_out(iter(["not noted", workers.RecordedBatch("noted", None), "not noted", "not noted"]), 0)
    assert next(source) == "not noted"
    assert history.worker_plan(0).to_dict() is None
    assert list(source) == ["noted", "not noted", "not noted"]
    assert history.worker_plan(4).to_dict() is None


@pytest.mark.parametrize("damage", [{}, {"start": 0, "workers": [(0, "other")]}, {"start": 0, "workers": [(0, {})]}])
def test_a_damaged_word_about_workers_is_an_error(damage):
    with pytest.raises((KeyError, TypeError, ValueError)):
        WorkerPlan.from_dict(damage)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_signals_for_the_rank_are_blocked_while_workers_start_if_it_handles_them(method):
    assert not worker_signals.is_needed()
    with (
        handled(print, PREEMPTION),
        mock.patch.object(resource_tracker, "ensure_running") as tracker,
        worker_signals.blocked(multiprocessing.get_context(method)),
    ):
        assert worker_signals.is_needed()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == {*PREEMPTION}
        assert tracker.called is (method == "spawn"), "else the process that starts it unblocks them"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


class Relaying(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


def blocked_signals(_):
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("kind", [DataLoader, Relaying])
def test_workers_outlive_signals_for_the_rank_whatever_iterates_them(kind):
    loader = prepared(kind([0], num_workers=1, collate_fn=blocked_signals, multiprocessing_context="fork"))
    with handled(print, PREEMPTION):
        assert list(loader) == [{*PREEMPTION}]
    assert loader.worker_init_fn is None


def test_only_workers_that_take_turns_over_indices_are_noted():
    class Mine(DataLoader):
        def __iter__(self):
            return super().__iter__()

    class Other(DataLoader):
        def _get_iterator(self):
            return super()._get_iterator()

    assert can_record(Source(DataLoader(range(4), num_workers=2)))
    assert not can_record(Source(DataLoader(range(4))))
    assert not can_record(Source(DataLoader(range(4), num_workers=2, in_order=False)))
    assert not can_record(Source(Mine(range(4), num_workers=2)))
    assert not can_record(Source(Other(range(4), num_workers=2)))
    assert not can_record(Source(DataLoader(Stream(4), num_workers=2)))
