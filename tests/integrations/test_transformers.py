# SPDX-License-Identifier: Apache-2.0
"""A Trainer with an outer loop: replicas train alone, meet in rounds, and a resumed training is the training."""

from __future__ import annotations

import json
import logging
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from farflung.base.errors import ConfigError
from farflung.comm.group import SoloGroup
from farflung.outer import OuterLoop
from farflung.testing.patience import patience
from farflung.testing.sim import run_replicas

OuterCallback = pytest.importorskip("farflung.integrations.transformers", exc_type=ModuleNotFoundError).OuterCallback
pytestmark = pytest.mark.package
PROGRAM = Path(__file__).with_name("outer_training.py")
ROUNDS = [3, 6, 7, 9, 12, 14]  # each third step, and the last one of each epoch of seven


@pytest.fixture(scope="module")
def seen(tmp_path_factory, warm_python):
    """What the program saw with the callback, and with the launcher's flags; both run at once."""
    ways = {"callback": ((), ()), "launched": (("--outer", "diloco", "--outer_every", "3"), ("--launched",))}
    start = [warm_python, "-m", "farflung", "launch", "--as-accelerate", "--cpu", "--num_processes", "2"]
    started, found = {}, {}
    for way, (flags, words) in ways.items():
        folder = tmp_path_factory.mktemp(way)
        command = [*start, *flags, str(PROGRAM), str(folder), *words]
        started[folder] = way, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for folder, (way, process) in started.items():
            said, _ = process.communicate(timeout=patience(100))
            assert process.returncode == 0, said[-5000:]
            found[way] = json.loads((folder / "seen.json").read_text())
    finally:
        for _, process in started.values():
            process.kill()
    return found


def apart(seen):
    return [step for step, difference in enumerate(seen["after_steps"], 1) if difference > 0]


def test_replicas_train_alone_and_are_equal_after_each_round_and_in_evaluations(seen):
    seen = seen["callback"]
    # The round of an epoch's end comes after its last step.
    assert apart(seen) == [step for step in range(1, 15) if step % 3]
    assert (seen["rounds"], seen["end"]) == (len(ROUNDS), 0)
    assert seen["evaluated"] == [0.0] * 4


def test_a_training_resumed_in_mid_round_is_the_training(seen):
    assert seen["callback"]["resumed"][:-1] == seen["callback"]["logged"][:-1]
    assert seen["callback"]["resumed_alike"]


def test_what_a_later_callback_asks_to_save_are_agreed_weights(seen):
    assert seen["callback"]["late_alike"]


def test_the_best_weights_are_left_as_they_were_saved(seen):
    assert (seen["callback"]["best_alike"], seen["callback"]["best_apart"]) == (True, 0)


def test_wrong_uses_are_refused(seen):
    not_ours, with_options, no_recipe, elsewhere = seen["callback"]["refusals"]
    assert "this Trainer's Accelerator is not Farflung's" in not_ours
    assert "the options ['every'] only go with a recipe's name" in with_options
    assert "Did you mean `diloco`?" in no_recipe
    assert "Say where the checkpoint is: TrainingArguments(resume_from_checkpoint=...)" in elsewhere


def test_the_launchers_flags_do_it_without_a_line(seen):
    launched = seen["launched"]
    assert apart(launched) == [step for step in range(1, 15) if step not in ROUNDS]
    assert (launched["evaluated"], launched["end"]) == ([0.0] * 4, 0)
    losses = [[entry for entry in seen[way]["logged"] if "loss" in entry] for way in ("callback", "launched")]
    assert losses[0] == losses[1]


def test_the_trainers_log_has_the_rounds(seen):
    rounds = [(entry["step"], entry["outer/round"]) for entry in seen["callback"]["logged"] if "outer/round" in entry]
    # The round at the end of an epoch comes after the log of its last step, except in the last epoch.
    assert rounds == [(8 if step == 7 else step, number) for number, step in enumerate(ROUNDS, 1)]


class Stub:
    """What the callback asks of a Trainer and of its Accelerator, for one replica."""

    def __init__(self, group):
        torch.manual_seed(0)
        self.accelerator, self.group = self, group
        self.model = self.model_wrapped = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.num_processes, self.process_index = group.size, group.rank
        self.folder = Path()
        self.args = SimpleNamespace(save_only_model=False, resume_from_checkpoint=None, load_best_model_at_end=False)
        self.state = SimpleNamespace(global_step=0, max_steps=60, best_model_checkpoint=None)
        self.control = SimpleNamespace(should_training_stop=False, should_save=False)

    def _get_output_dir(self, trial):
        assert trial is None
        return str(self.folder)

    def evaluate(self):
        return self.weights()

    def _save_checkpoint(self, model, trial):
        self.saved = self.weights()
        if self.group.rank == 0:
            (self.folder / f"checkpoint-{self.state.global_step}").mkdir()
            torch.save(model.state_dict(), self.folder / "model.pt")
        self.group.barrier()

    def outer(self, model, recipe):
        return OuterLoop(model, recipe, self.group, inner=self.optimizer).attach(self.optimizer)

    def train(self, steps):
        for step in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.full((2, 3), float(step + self.group.rank))).square().mean().backward()
            self.optimizer.step()

    def weights(self):
        return self.model.weight.flatten().tolist()


def begun(group, folder, global_step=0):
    """A Trainer and its callback, once training has begun at a step; and what calls an event of the callback."""
    trainer = Stub(group)
    trainer.folder, trainer.state.global_step = folder, global_step
    callback = OuterCallback(trainer, "diloco", every=3)
    if global_step:  # as the Trainer does before
        trainer.model.load_state_dict(torch.load(folder / "model.pt"))

    def call(event):
        getattr(callback, event)(trainer.args, trainer.state, trainer.control)

    call("on_train_begin")
    return trainer, callback, call


def saved(group, folder):
    trainer, _, call = begun(group, folder)
    trainer.train(4)
    trainer.state.global_step, own = 4, trainer.weights()
    trainer._save_checkpoint(trainer.model, None)
    assert trainer.weights() == own
    call("on_train_end")
    return own


def resumed(group, folder):
    trainer, _, call = begun(group, folder, 4)
    own = trainer.weights()
    trainer.train(3)
    call("on_train_end")
    return own, trainer.weights()


def asked(group, folder):
    """Evaluate and save in the middle of a round, as any callback may; return the agreed weights and this rank's."""
    trainer, callback, call = begun(group, folder)
    trainer.train(4)
    own = trainer.weights()
    with callback.loop.synced():
        agreed = trainer.weights()
    assert (trainer.evaluate(), trainer.weights()) == (agreed, own)
    trainer.control.should_save = True
    assert trainer.evaluate() == agreed
    trainer._save_checkpoint(trainer.model, None)
    assert (trainer.saved, trainer.weights()) == (agreed, agreed)  # in callbacks' `on_save` too
    call("on_step_begin")
    assert trainer.weights() == own
    call("on_train_end")
    assert trainer.evaluate() == trainer.weights()
    return agreed, own


def ended(group, folder, best):
    """Train until the Trainer stops, evaluates and saves; return the weights that it evaluates and those at the end."""
    trainer, callback, call = begun(group, folder)
    trainer.args.load_best_model_at_end, trainer.state.best_model_checkpoint = best, "checkpoint-2"
    trainer.train(6)
    trainer.control.should_training_stop = trainer.control.should_save = True
    call("on_step_end")
    evaluated = trainer.evaluate()
    with callback.loop.synced():
        assert trainer.weights() == evaluated
    call("on_epoch_end")
    assert trainer.evaluate() == evaluated
    trainer._save_checkpoint(trainer.model, None)
    assert trainer.saved == evaluated
    if best:
        trainer.model.load_state_dict({name: torch.ones_like(x) for name, x in trainer.model.state_dict().items()})
    call("on_train_end")
    return evaluated, trainer.weights()


def test_an_evaluation_or_a_checkpoint_that_any_callback_asks_for_has_agreed_weights(tmp_path):
    (agreed, own), (agreed_there, own_there) = run_replicas(asked, 2, tmp_path)
    assert agreed == agreed_there
    assert len({*map(tuple, (agreed, own, own_there))}) == 3


def test_a_trainer_that_saves_at_sigterm_is_refused():
    trainer = Stub(SoloGroup())
    trainer.args.enable_jit_checkpoint = True
    with pytest.raises(ConfigError, match=r"enable_jit_checkpoint .* TrainingArguments\(save_steps="):
        OuterCallback(trainer, "diloco")


@pytest.mark.law("readout-is-slow-weights")
@pytest.mark.parametrize("best", [False, True])
def test_a_trainer_evaluates_in_the_end_what_it_leaves_unless_it_loads_the_best(tmp_path, best):
    (evaluated, left), other = run_replicas(ended, 2, tmp_path, best)
    assert (evaluated, left) == other
    assert left == ([1.0] * 3 if best else evaluated)


def test_a_checkpoint_of_two_replicas_goes_on_with_three(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("farflung.integrations.transformers.get_logger", logging.getLogger)  # for replicas of no world
    before = torch.tensor(run_replicas(saved, 2, tmp_path))
    owns, ends = zip(*run_replicas(resumed, 3, tmp_path), strict=True)
    assert torch.allclose(torch.tensor(owns), before.mean(0).expand(3, 3))
    assert ends == (ends[0],) * 3
    assert "was written by 2 processes, and here are 3: all continue from the mean" in caplog.text
    same_again = [own for own, _ in run_replicas(resumed, 2, tmp_path)]
    assert torch.equal(torch.tensor(same_again), before)
