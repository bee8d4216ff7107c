# SPDX-License-Identifier: Apache-2.0
"""Loops of many forms that are saved at a random step and continued: they end bit by bit as if nothing had happened.

If a form has to repeat something, which may draw random numbers, the save says so.
"""

from __future__ import annotations

import io
import itertools
import os
import random
import signal
from contextlib import redirect_stderr

import pytest
import torch
from torch.utils.data import DataLoader

from farflung import OuterConfig
from farflung.launch.codes import REQUEUE
from farflung.testing.ranks import run_ranks
from tests.accelerator.program import Program, rows_of
from tests.data.test_position import Noisy, NoisyStream, Stateful

MOMENTS = int(os.environ.get("FARFLUNG_TEST_MOMENTS", "1"))  # in each loop at which it is stopped
EPOCHS, OUTER_ROWS, ROWS = 2, 6, 11


DATA = {"drawn": Noisy, "stream": NoisyStream, "kept": Stateful}
OUTER = {"none": None, "diloco": OuterConfig("diloco", every=5), "streaming": OuterConfig("streaming_diloco", every=6)}
FORMS = {
    "form": ["flat", "nested", "three", "zip", "lazy", "early", "early inside"],
    "data": ["drawn", "stream", "kept"],
    "workers": ["none", "two", "stay"],
    "optimizers": ["one", "turns", "both"],
    "accumulate": [1, 3],
    "schedule": ["none", "steps"],
    "evaluation": ["none", "inside", "after"],
    "outer": ["none", "diloco", "streaming"],
    "before": ["nothing", "draws", "steps"],
}


def pairwise(number=36):
    """Return loops in which each two choices come together."""
    draw, names, found = random.Random(0), list(FORMS), []
    left = {
        frozenset([(one, a), (other, b)])
        for one, other in itertools.combinations(names, 2)
        for a in FORMS[one]
        for b in FORMS[other]
    }
    while left or len(found) < number:
        rows = [{name: draw.choice(choices) for name, choices in FORMS.items()} for _ in range(60)]
        pairs = [{frozenset(pair) for pair in itertools.combinations(row.items(), 2)} for row in rows]
        best = max(range(len(rows)), key=lambda one: len(pairs[one] & left))
        left -= pairs[best]
        found.append(rows[best])
    return found


class Loop(Program):
    """A training program of one form."""

    def __init__(self, folder, form):
        super().__init__(form["accumulate"], save_on_signal=folder, outer=OUTER[form["outer"]])
        self.form, self.stop_at, self.how = form, None, "signal"
        self.own = folder / "own"  # a checkpoint that the script writes by itself
        kind, workers = DATA[form["data"]], 0 if form["workers"] == "none" else 2
        options = {"batch_size": 2, "num_workers": workers, "persistent_workers": form["workers"] == "stay"}
        self.inner, self.outer, self.third, self.held_out = self.prepare(
            DataLoader(kind(ROWS), shuffle=kind is Noisy, **options),
            DataLoader(Noisy(OUTER_ROWS), batch_size=2, shuffle=True),
            DataLoader(Noisy(4), batch_size=2),
            DataLoader(Noisy(4), batch_size=2),
            parts=1 if form["optimizers"] == "one" else 2,
        )
        if form["schedule"] == "none":
            self.schedulers = []

    def train_on(self, *batches):
        x = sum(rows_of(one).float().mean() for one in batches)
        turns = self.form["optimizers"] == "turns"
        self.step(x.expand(1, 4), [self.optimizers[self.steps % 2]] if turns else None)
        if self.form["evaluation"] == "inside" and self.steps % 4 == 0:
            self.evaluate()
        if self.steps == self.stop_at and self.how == "signal":
            os.kill(os.getpid(), signal.SIGUSR1)
        elif self.steps == self.stop_at and self.how == "inner":
            self.save()

    def save(self):
        self.accelerator.save_state(self.own)
        raise SystemExit(REQUEUE)

    def evaluate(self):
        self.model.eval()
        for batch in self.held_out:
            self.model(rows_of(batch).float())
        self.model.train()

    def before(self, batch):
        """What the body of an outer loop does before the inner one."""
        if self.form["before"] == "draws":
            return rows_of(batch) + torch.rand(())
        if self.form["before"] == "steps":
            self.train_on(batch)
        return batch

    def inner_pass(self, *around, is_left):
        """Step on each batch of the inner loader, together with those of the loops around it."""
        for batch in self.inner:
            self.train_on(*around, batch)
            if is_left and self.steps % 5 == 0:
                break

    def train_an_epoch(self):
        form = self.form["form"]
        if form in ("flat", "early"):
            self.inner_pass(is_left=form == "early")
        elif form in ("nested", "early inside"):
            for batch in self.outer:
                self.inner_pass(self.before(batch), is_left=form == "early inside")
                if self.stop_at is not None and self.steps >= self.stop_at and self.how == "outer":
                    self.save()
        elif form == "three":
            for batch in self.outer:
                own = self.before(batch)
                for other in self.third:
                    self.inner_pass(own, self.before(other), is_left=False)
        elif form == "zip":
            for one, other in zip(self.inner, self.outer, strict=False):
                self.train_on(one, other)
        elif form == "lazy":
            again = None
            for batch in self.inner:
                again = iter(self.outer) if again is None else again
                other = next(again, None)
                if other is None:
                    again = iter(self.outer)
                    other = next(again)
                self.train_on(batch, other)

    def train(self):
        """Return the exit code, None at the end, and a digest of all that was trained."""
        code = None
        if self.own.exists():
            self.accelerator.load_state(self.own)
        else:
            self.accelerator.resume()
        leads = self.outer if self.form["form"] in ("nested", "early inside", "three") else self.inner
        try:
            for _ in range(leads.iteration, EPOCHS):
                self.train_an_epoch()
                if self.form["evaluation"] == "after":
                    self.evaluate()
        except SystemExit as end:
            code = end.code
        digest = self.digest()
        self.accelerator.end_training()
        return code, self.steps, digest


def resumed(folder, form, seed, moments, how="signal"):
    """Train whole, and stopped at some moments; return for each what is wrong, and what the save has said.

    Args:
        moments: so many, drawn at random, or the steps themselves.
    """
    (code, steps, whole), found = Loop(folder / "whole", form).train(), []
    assert code is None
    if isinstance(moments, int):
        moments = [random.Random(f"{seed} {moment}").randint(2, steps - 3) for moment in range(moments)]
    for number, moment in enumerate(moments):
        stopped = Loop(folder / str(number), form)
        stopped.how, stopped.stop_at = how, moment
        with redirect_stderr(io.StringIO()) as said:
            code, _, digest = stopped.train()
            if code == REQUEUE:
                _, _, digest = Loop(folder / str(number), form).train()
        sentences = [words in said.getvalue() for words in ("inside of nested loops", "persistent workers again")]
        found.append((moment, stopped.steps, "same" if digest == whole else "other", *sentences))
    return found


def repeats(form):
    """Whether the body of an outer loop does something before the inner one that is not the same a second time."""
    return form["form"] in ("nested", "three", "early inside") and form["before"] != "nothing"


def renews(form):
    """Whether persistent workers may draw other random numbers after a resume."""
    is_left_early = form["form"] in ("early", "early inside", "zip")
    return form["workers"] == "stay" and (form["data"] != "drawn" or is_left_early)


NESTED = {name: choices[0] for name, choices in FORMS.items()} | {"form": "nested", "schedule": "steps"}


@pytest.mark.parametrize(
    ("change", "how"),
    [
        ({}, "signal"),
        ({}, "inner"),
        ({}, "outer"),
        ({"form": "three"}, "signal"),
        ({"form": "three"}, "inner"),
        ({"form": "early inside"}, "signal"),
        ({"data": "kept"}, "signal"),
        ({"form": "zip"}, "signal"),
        ({"form": "lazy"}, "inner"),
        ({"form": "lazy", "outer": "diloco"}, "signal"),
        ({"form": "zip", "outer": "diloco", "optimizers": "turns", "accumulate": 3}, "signal"),
    ],
)
def test_the_loops_around_that_of_the_steps_continue_with_the_batch_in_hand(tmp_path, change, how):
    form = NESTED | change
    (found,) = run_ranks(resumed, 1, tmp_path, form, str(form), 4, how, connect=False)
    assert [what for _, _, what, *_ in found] == ["same"] * 4
    assert any(is_nested for *_, is_nested, _ in found) == (form["form"] not in ("zip", "lazy") and how != "outer")


@pytest.mark.parametrize("change", [{"outer": "diloco"}, {"accumulate": 4}, {"form": "three", "outer": "streaming"}])
def test_a_loop_that_had_ended_leaves_the_steps_to_the_next_pass_of_its_loader(tmp_path, change):
    """The pass around it, on its last batch, is not the one that ends with them."""
    (found,) = run_ranks(resumed, 1, tmp_path, NESTED | change, "", [12, 30], connect=False)
    assert [what for _, _, what, *_ in found] == ["same"] * 2


@pytest.mark.long
@pytest.mark.timeout(120 * MOMENTS)
def test_loops_of_all_forms_continue_bit_by_bit_or_say_what_they_repeat(tmp_path):
    forms = pairwise()
    wrong, same, told = [], 0, 0
    for number, form in enumerate(forms):
        (found,) = run_ranks(
            resumed, 1, tmp_path / str(number), form, number, MOMENTS, connect=False, timeout_s=60 * MOMENTS
        )
        for at, stopped, what, is_nested, is_renewed in found:
            same, told = same + (what == "same"), told + (is_nested or is_renewed)
            if what != "same" and not (is_nested and repeats(form)) and not (is_renewed and renews(form)):
                wrong.append((form, at, stopped, is_nested, is_renewed))
    stops = f"{len(forms)} loops, {MOMENTS * len(forms)} stops"
    print(f"{stops}: {same} bit by bit, {told} with a sentence, {wrong} wrong")
    assert not wrong
