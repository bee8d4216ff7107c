# SPDX-License-Identifier: Apache-2.0
"""A run that a signal stops is saved at one step of all ranks, and ends as if it had never been stopped."""

from __future__ import annotations

import io
import os
import signal
import time
from contextlib import nullcontext, redirect_stderr
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader

from farflung import Accelerator
from farflung.base.errors import ConfigError, RankFailure
from farflung.checkpoint.checkpoint import Checkpoint
from farflung.launch.codes import REQUEUE
from farflung.outer import diloco
from farflung.testing.patience import patience
from farflung.testing.ranks import run_ranks
from farflung.utils import DataLoaderConfiguration, ProjectConfiguration
from tests.accelerator.conftest import on_ranks
from tests.accelerator.program import Program

EPOCHS = 3
BATCHES = 12  # of each rank, in an epoch


def train(folder, signals=None, each_batch=None, *, pace=(0.0, 0.0), uneven=False, block=None, **settings):
    """Train to the end, or until a signal that this rank gives itself ends it.

    Args:
        signals: at which of this process's batches which rank gets which signals: `{(rank, batch): [numbers]}`.
        each_batch: called with the accelerator, the epoch and the batch.
        pace: how many seconds each rank takes for a batch once there was a signal, on an idle machine.
        block: the recipe of an outer loop in whose block all of it is.
    """
    settings |= {"dataloader_config": DataLoaderConfiguration(even_batches=not uneven)}
    program = Program(save_on_signal=folder, **settings)
    accelerator = program.accelerator
    rank, size = accelerator.process_index, accelerator.num_processes
    data = torch.randn(2 * BATCHES * size + (2 if uneven else 0), 4)
    (loader,) = program.prepare(DataLoader(data, batch_size=2, shuffle=True))
    number, code, has_begun = 0, None, False
    resumed = accelerator.resume()
    try:
        with accelerator.outer(program.model, block) if block else nullcontext():
            for epoch in range(loader.iteration, EPOCHS * (100 if signals else 1)):
                with accelerator.join_uneven_inputs([program.model]) if uneven else nullcontext():
                    for batch in loader:
                        number += 1
                        program.step(batch)
                        if each_batch is not None:
                            each_batch(accelerator, epoch, number)
                        for one in (signals or {}).get((rank, number), ()):
                            os.kill(os.getpid(), one)
                        has_begun |= any(number >= at for _, at in signals or {})
                        time.sleep(patience(pace[rank % 2]) if has_begun else 0.0)
                program.counter.epoch += 1
    except SystemExit as end:
        code = end.code
    steps = None if uneven else program.steps  # of uneven ranks a checkpoint has the first one's
    digest = program.digest(program.counter.epoch, steps)
    return {"code": code, "steps": program.steps, "digest": digest, "resumed": resumed, "epoch": loader.iteration}


def run(folder, *args, num_ranks=2, **settings):
    return run_ranks(train_with, num_ranks, folder, *args, settings, connect=False, timeout_s=90)


def train_with(folder, signals, each_batch, settings):
    return train(folder, signals, each_batch, **settings)


def check_same(folder, signals, each_batch=None, **settings):
    """A run that is stopped and resumed ends as one without signals; return where it stopped."""
    whole = run(folder / "whole", None, None, **settings)
    pace = (0.06, 0.02) if {"outer", "block"} & settings.keys() else (0.03, 0.03)
    stopped = run(folder / "saved", signals, each_batch, pace=pace, **settings)
    assert [one["code"] for one in stopped] == [REQUEUE] * len(stopped), stopped
    assert "uneven" in settings or len({one["steps"] for one in stopped}) == 1
    last = run(folder / "saved", None, None, **settings)
    assert [one["code"] for one in last] == [None] * len(last)
    assert all(one["resumed"] for one in last)
    if stopped[0]["epoch"] < EPOCHS:  # on a slow machine the vote may have come after that
        assert [one["digest"] for one in last] == [one["digest"] for one in whole]
    return stopped


USR1, TERM = signal.SIGUSR1, signal.SIGTERM


@pytest.mark.parametrize(
    ("signals", "settings"),
    [
        ({(1, 5): [USR1]}, {}),
        ({(0, 4): [TERM], (1, 6): [USR1, TERM]}, {}),
        ({(0, 6): [USR1]}, {"accumulate": 4}),
        ({(1, 5): [USR1]}, {"outer": "diloco"}),
        ({(0, 3): [USR1]}, {"block": diloco(every=5)}),
    ],
    ids=["to one", "to all", "in a window that is completed first", "while replicas drift apart", "in a block"],
)
def test_a_signal_to_one_rank_or_all_stops_all_at_one_step_and_the_run_continues_bit_by_bit(
    signals, settings, tmp_path
):
    check_same(tmp_path, signals, **settings)


@pytest.mark.parametrize(
    ("batch", "accumulate", "steps"),
    [(5, 1, 5), (6, 4, 8), (BATCHES, 1, BATCHES)],
    ids=["after the step", "once the window is complete", "after the last batch of an epoch"],
)
def test_one_process_stops_after_the_step_in_which_it_gets_the_signal(batch, accumulate, steps, tmp_path):
    (stopped,) = check_same(tmp_path, {(0, batch): [TERM]}, num_ranks=1, accumulate=accumulate)
    assert (stopped["steps"], stopped["epoch"]) == (steps, 0)


def test_ranks_with_different_numbers_of_batches_stop_between_two_epochs(tmp_path):
    (first, second) = check_same(tmp_path, {(1, 5): [USR1]}, uneven=True)
    assert first["epoch"] == second["epoch"] > 0


def save_aside(accelerator, epoch, number):
    """Write a checkpoint in the background at the batch of the signal, which takes long."""
    if number == 5:
        accelerator.save_state("aside", block=False)


def wait(accelerator, epoch, number):
    """Let rank 1 wait for rank 0 in a barrier when the signal comes."""
    if number == 5 and accelerator.process_index == 0:
        time.sleep(1.0)
    if number == 5:
        accelerator.wait_for_everyone()


def test_a_checkpoint_that_is_being_written_is_completed_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_same(tmp_path, {(0, 5): [TERM]}, save_aside)
    Checkpoint.open(tmp_path / "aside").verify()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_while_a_rank_waits_in_a_barrier_stops_all_after_it(rank, tmp_path):
    check_same(tmp_path, {(rank, 4): [USR1]}, wait)


def three_times(folder):
    """Be stopped three times, with checkpoints of the script's own in between."""
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
    found = []

    def save(accelerator, epoch, number):
        if number == 2:
            accelerator.save_state()

    for batch in (3, 4, 5):
        found.append(train(folder / "saved", {(0, batch): [USR1]}, save, project_config=project))
        Accelerator().end_training()
    return found, sorted(path.name for path in (folder / "saved").iterdir())


def test_each_stop_adds_a_checkpoint_and_total_limit_holds(tmp_path):
    ((found, names),) = run_ranks(three_times, 1, tmp_path, connect=False)
    assert [one["steps"] for one in found] == [3, 7, 12]
    assert names == ["checkpoint_1", "checkpoint_2"]


def by_itself(folder):
    program = Program(save_on_signal=folder)
    program.prepare()
    program.accelerator.resume()
    start = program.steps
    for step in range(start, start + 4):
        program.step(torch.full((1, 4), float(step)))
        if step == start + 1:
            os.kill(os.getpid(), USR1)
        if "calls" in str(folder):
            program.accelerator.stop_if_signalled()
    return program.steps


def said_by_itself(folder):
    with redirect_stderr(io.StringIO()) as said:
        return by_itself(folder), said.getvalue()


def test_a_loop_over_its_own_data_stops_where_it_asks_and_is_told_if_it_never_does(tmp_path):
    for steps in (2, 4):
        with pytest.raises(RankFailure, match=f"SystemExit: {REQUEUE}"):
            run_ranks(by_itself, 1, tmp_path / "calls", connect=False)
        assert Checkpoint.open(max((tmp_path / "calls").iterdir())).manifest.optimizer_steps == [steps]
    ((steps, said),) = run_ranks(said_by_itself, 1, tmp_path / "silent", connect=False)
    assert steps == 4
    assert "stop_if_signalled() at the end of each step" in said


def outside_of_the_loop(folder):
    program = Program(save_on_signal=folder)
    loader, held_out = program.prepare(*(DataLoader(torch.randn(8, 4), batch_size=1) for _ in range(2)))
    program.accelerator.resume()
    passes, code = "", None
    try:
        for epoch in range(loader.iteration, 3):
            passes += str(epoch)
            for batch in islice(loader, 3):  # a pass that is left early
                program.step(batch)
                if program.steps == 3 and passes == "0":
                    os.kill(os.getpid(), USR1)
            for _ in held_out:  # no stop in an evaluation
                passes += "e"
    except SystemExit as end:
        code = end.code
    return code, passes, program.optimizers[0].completed_steps


def test_after_a_pass_that_was_left_early_the_evaluation_is_done_and_the_next_epoch_comes_then(tmp_path):
    assert run_ranks(outside_of_the_loop, 1, tmp_path, connect=False) == [(REQUEUE, "0eeeeeeee1", 3)]
    assert run_ranks(outside_of_the_loop, 1, tmp_path, connect=False) == [(None, "1eeeeeeee2eeeeeeee", 9)]


def forgets(folder):
    for _ in range(2):
        program = Program(save_on_signal=folder)
        (loader,) = program.prepare(DataLoader(torch.randn(8, 4)))
        try:
            for batch in loader:
                program.step(batch)
                os.kill(os.getpid(), USR1)
        except SystemExit:
            program.accelerator.end_training()


def test_a_script_that_would_begin_again_over_a_saved_run_is_refused(tmp_path):
    with pytest.raises(RankFailure, match=r"has checkpoints of an earlier start .* Call accelerator.resume\(\) after"):
        run_ranks(forgets, 1, tmp_path, connect=False)


@on_ranks(2, connect=False)
def test_a_folder_that_can_not_be_written_is_refused_on_all_ranks(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"(?s)in which nothing can be written.*Name another folder"):
        Accelerator(cpu=True, save_on_signal=file)


@on_ranks(2, connect=False)
def test_a_folder_that_ranks_do_not_share_is_refused_on_all_ranks(tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)rank 1.*Name one that all machines share"):
        Accelerator(cpu=True, save_on_signal=tmp_path / os.environ["RANK"])  # as on two machines that share no disk


@on_ranks(1, each=(False, True), connect=False)
def test_without_the_setting_nothing_is_loaded_and_signals_are_the_script_s():
    accelerator = Accelerator(cpu=True)
    accelerator.stop_if_signalled()
    return accelerator.resume(), signal.getsignal(USR1) is signal.SIG_DFL
