# SPDX-License-Identifier: Apache-2.0
"""The three ways see the same data from the same weights, and are judged when their processes agree."""

import os
import stat
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers
from safetensors import safe_open

from farflung import Accelerator
from farflung.demo.settings import MODEL_FILE, DemoSettings
from farflung.demo.train import Sequences, Spread, Trial, checkpoints, save_model
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
    starts = [int(piece[0]) for piece in items_of(Spread(Sequences(bytes(range(101)), 10), 5))]
    assert starts == [0, 20, 40, 60, 80]


def batches_and_weights_of_two_trials():
    accelerator = Accelerator(cpu=True)
    settings = DemoSettings(steps=4, processes=2, size="tiny", data=None, output="unused", every=2, batch=3, seed=7)
    train, held_out = Sequences(TEXT, 64), Spread(Sequences(TEXT, 64), 8)
    trials = []
    for _ in range(2):
        trial = Trial(accelerator, settings, train, held_out)
        weights = torch.cat([parameter.detach().flatten() for parameter in trial.model.parameters()])
        batches = torch.stack(list(trial.batches))
        trial.learn(batches[0])  # must leave no trace in the next trial
        trials.append((weights, batches))
        accelerator.free_memory()
    return trials


def test_each_trial_starts_from_the_same_weights_and_sees_the_same_batches():
    ranks = run_ranks(batches_and_weights_of_two_trials, 2, connect=False)
    for (weights, batches), (weights_again, batches_again) in ranks:
        assert torch.equal(weights, weights_again)
        assert torch.equal(batches, batches_again)
    assert torch.equal(ranks[0][0][0], ranks[1][0][0])  # all ranks start alike
    seen = torch.cat([batches.flatten(0, 1) for (_, batches), _ in ranks])
    starts = {tuple(sequence.tolist()) for sequence in seen}
    assert len(seen) == len(Sequences(TEXT, 64)) // 6 * 6
    assert len(starts) <= 4  # the text repeats every four sequences


def schedule_at_the_end():
    accelerator = Accelerator(cpu=True)
    settings = DemoSettings(steps=20, processes=2, size="tiny", data=None, output="unused", every=2, batch=3, seed=7)
    trial = Trial(accelerator, settings, Sequences(TEXT, 64), Spread(Sequences(TEXT, 64), 8))
    rates = []
    for _ in range(20):
        rates.append(trial.optimizer.param_groups[0]["lr"])
        trial.learn(next(iter(trial.batches)))
    return rates, trial.optimizer.param_groups[0]["lr"]


def test_the_learning_rate_rises_shortly_and_ends_at_zero():
    rates, last = run_ranks(schedule_at_the_end, 2, connect=False)[0]
    assert 0 < rates[0] < max(rates[:4])
    assert last == pytest.approx(0)


def test_its_weights_have_the_mode_of_any_other_file_and_can_be_loaded(tmp_path):
    settings = DemoSettings(
        steps=1, processes=1, size="tiny", data=None, output=str(tmp_path), every=1, batch=1, seed=0
    )
    before = os.umask(0o027)
    try:
        save_model(torch.nn.Linear(2, 1), settings, "DDP")
    finally:
        os.umask(before)
    assert stat.S_IMODE(settings.path(MODEL_FILE).stat().st_mode) == 0o640
    with safe_open(settings.path(MODEL_FILE), framework="pt") as content:
        assert content.metadata() == {"size": "tiny", "way": "DDP"}
        assert set(content.keys()) == {"weight", "bias"}
