# SPDX-License-Identifier: Apache-2.0
"""The ways see the same data from the same weights, and are judged when their processes agree."""

import dataclasses
import os
import stat
from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers
from safetensors import safe_open
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.config.outer import AUTO, OuterSettings
from farflung.cost.auto import FOREVER, Choice
from farflung.demo.settings import ALONE, MODEL_FILE, DemoSettings
from farflung.demo.train import (
    Sequences,
    Trial,
    Way,
    checkpoints,
    choice_for_line,
    compete,
    endless,
    evenly,
    save_model,
    ways,
)
from farflung.testing.ranks import run_ranks

TEXT = bytes(range(256)) * 40


def items_of(dataset):
    return [dataset[index] for index in range(len(dataset))]


@given(steps=integers(1, 3000), every=integers(1, 100))
def test_the_loss_is_taken_at_ends_of_rounds_before_the_last_step(steps, every):
    found = checkpoints(steps, every)
    assert all(step % every == 0 and 0 < step < steps for step in found)
    assert len(found) <= 12
    assert not found or every in found


@given(length=integers(9, 200), context=integers(1, 8))
def test_sequences_overlap_by_the_byte_that_is_foretold_only(length, context):
    text = bytes(range(length))
    pieces = [bytes(piece.tolist()) for piece in items_of(Sequences(text, context))]
    assert all(len(piece) == context + 1 for piece in pieces)
    assert b"".join(piece[:-1] for piece in pieces) == text[: len(pieces) * context]
    assert all(before[-1] == after[0] for before, after in pairwise(pieces))


def test_what_is_held_out_is_spread_over_the_whole_text():
    starts = [int(piece[0]) for piece in items_of(evenly(Sequences(bytes(range(101)), 10), 5))]
    assert starts == [0, 20, 40, 60, 80]


def settings_for(**changes):
    numbers = {"steps": 4, "processes": 2, "every": 2, "batch": 3, "seed": 7, "bandwidth_bps": 20e6}
    known = DemoSettings(size="tiny", data=None, output="unused", **numbers)
    return dataclasses.replace(known, **changes)


def weights(trial):
    return torch.cat([parameter.detach().flatten() for parameter in trial.model.parameters()])


class Noting(Trial):
    """A trial that keeps what it learned from."""

    seen = ()

    def learn(self, batch):
        super().learn(batch)
        self.seen = (*self.seen, batch)


ROUNDS = Choice(OuterSettings("diloco", every=3, codec="e3m0"), "", "three steps")
DATA_PARALLEL = Choice(OuterSettings("post_local_sgd", warmup=FOREVER), "", "plain")


def one_contest(choice):
    accelerator = Accelerator(cpu=True)
    settings = settings_for(steps=7)
    loader, judges = accelerator.prepare(
        DataLoader(Sequences(TEXT, 64), batch_size=3, shuffle=True, drop_last=True),
        DataLoader(evenly(Sequences(TEXT, 64), 8), batch_size=2),
    )
    with ExitStack() as stack:
        trials = [stack.enter_context(Noting(way, accelerator, settings)) for way in ways(settings, choice)]
        before = [weights(trial) for trial in trials]
        compete(trials, endless(loader), judges, lambda trial: None)
    return [
        (start, weights(trial), torch.stack(trial.seen), trial.result())
        for start, trial in zip(before, trials, strict=True)
    ]


def test_all_ways_start_alike_see_the_same_batches_and_end_in_agreement_but_for_the_one_that_trains_alone():
    first, second = run_ranks(one_contest, 2, ROUNDS, connect=False)
    start, _, batches, _ = first[0]
    for here, there in zip(first, second, strict=True):
        assert torch.equal(start, here[0])
        assert torch.equal(start, there[0])  # all ranks start alike
        assert torch.equal(here[1], there[1]) == (here[3].way != ALONE)
        assert not torch.equal(start, here[1])
        assert torch.equal(batches, here[2])
        assert torch.equal(second[0][2], there[2])
        ends = [3, 6, 7] if here[3].way == AUTO else [2, 4, 6, 7]  # of its own rounds
        assert [point.step for point in here[3].curve] == ends
        assert here[3].note == (ROUNDS.why if here[3].way == AUTO else "")
        assert [point.loss for point in here[3].curve] == [point.loss for point in there[3].curve]
        assert (here[3].bytes_sent == 0) == (here[3].way == ALONE)
    assert not torch.equal(batches, second[0][2])  # each process has a share of its own


def test_data_parallel_training_that_auto_chose_has_the_losses_bytes_and_time_of_ddp():
    by_way = {result.way: result for *_, result in run_ranks(one_contest, 2, DATA_PARALLEL, connect=False)[0]}
    ddp, auto = by_way["DDP"], by_way[AUTO]
    assert auto.curve == ddp.curve
    assert auto.bytes_sent == ddp.bytes_sent > 0
    line_s = 8 * ddp.bytes_sent / settings_for().bandwidth_bps
    assert min(auto.line_seconds, ddp.line_seconds) > line_s / 2  # whatever the processor
    assert auto.note == "plain"


LINES = [(1e5, 480, 24), (1e5, 5, 1), (1e15, 480, None), (1e15, 5, None)]


def choose_for_lines(processes):
    settings, accelerator = settings_for(every=16, processes=processes), Accelerator(cpu=True)
    lines = [dataclasses.replace(settings, bandwidth_bps=rate, steps=steps) for rate, steps, _ in LINES]
    return [choice_for_line(accelerator, line) for line in lines]


@pytest.mark.parametrize("processes", [2, 4])
def test_all_ranks_choose_the_same_for_the_line_of_the_demo(processes):
    first, *others = run_ranks(choose_for_lines, processes, processes, connect=False)
    assert others == [first] * (processes - 1)
    for (bandwidth_bps, steps, longest), choice in zip(LINES, first, strict=True):
        assert choice.is_data_parallel == (longest is None), (bandwidth_bps, steps, choice.reason)
        assert longest is None or choice.settings.every <= longest
        assert f"{processes} replicas" in choice.facts
        assert f"{steps} steps" in choice.facts


def schedule_at_the_end():
    trial = Trial(Way("DDP"), Accelerator(cpu=True), settings_for(steps=20))
    rates = []
    for _ in range(20):
        rates.append(trial.optimizer.param_groups[0]["lr"])
        trial.learn(torch.zeros(3, 65, dtype=torch.uint8))
    return rates, trial.optimizer.param_groups[0]["lr"]


def test_the_learning_rate_rises_shortly_and_ends_at_zero():
    rates, last = run_ranks(schedule_at_the_end, 2, connect=False)[0]
    assert 0 < rates[0] < max(rates[:4])
    assert last == pytest.approx(0)


def test_its_weights_have_the_mode_of_any_other_file_and_can_be_loaded(tmp_path):
    settings = settings_for(output=str(tmp_path))
    before = os.umask(0o027)
    try:
        save_model(torch.nn.Linear(2, 1), settings, "DDP")
    finally:
        os.umask(before)
    assert stat.S_IMODE(settings.path(MODEL_FILE).stat().st_mode) == 0o640
    with safe_open(settings.path(MODEL_FILE), framework="pt") as content:
        assert content.metadata() == {"size": "tiny", "way": "DDP"}
        assert set(content.keys()) == {"weight", "bias"}
