# SPDX-License-Identifier: Apache-2.0
"""The table of what a run keeps: one more part is one more line in it, and parts keep to their own objects."""

import pytest
import torch
from torch import nn

from farflung import Accelerator
from farflung.base.errors import CheckpointError
from farflung.checkpoint import paths
from farflung.outer import local_sgd
from farflung.resume import table
from farflung.resume.part import Part
from farflung.resume.table import PARTS
from farflung.testing.ranks import run_ranks


class Marks(Part):
    """One number of each rank's own; other ranks take the sum. An impossible one is refused."""

    here = 0

    def per_rank(self, saving):
        return {paths.loop_state(self.run.world.rank): {"mark": Marks.here}}

    def read(self, source):
        self.mark = sum(own["mark"] for own in source.owns) if source.is_other else source.own["mark"]
        if self.mark < 0:
            raise CheckpointError(f"{self.mark} is no mark.")

    def load(self, undo):
        before = Marks.here
        undo.callback(setattr, Marks, "here", before)
        Marks.here = self.mark


class Failing(Part):
    """Can't be loaded."""

    def load(self, undo):
        raise ValueError("after the marks were loaded")


def mark(folder, value):
    """Save with a mark of this rank's own, and load again with another one."""
    table.PARTS = (*PARTS, Marks)
    accelerator = Accelerator(cpu=True)
    Marks.here = value + accelerator.process_index
    accelerator.save_state(folder)
    return marks(folder)


def marks(folder):
    """Load into a run without a mark; return the mark, or the error and the mark that stayed."""
    table.PARTS = (*PARTS, Marks)
    Marks.here = 0
    try:
        Accelerator(cpu=True).load_state(folder)
    except CheckpointError as error:
        return str(error), Marks.here
    return Marks.here


def test_another_part_is_a_class_and_its_line_in_the_table(tmp_path):
    assert run_ranks(mark, 2, tmp_path / "a", 5) == [5, 6]
    assert run_ranks(marks, 1, tmp_path / "a") == run_ranks(marks, 3, tmp_path / "a")[:1] == [11]


def test_what_a_part_refuses_changes_nothing_on_any_rank(tmp_path):
    for error, left in run_ranks(mark, 2, tmp_path / "a", -1):  # rank 1's mark is 0
        assert "-1 is no mark" in error
        assert left == 0


def test_what_was_loaded_is_undone_where_a_later_part_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "PARTS", (*PARTS, Marks))
    accelerator = Accelerator(cpu=True)
    Marks.here = 7
    accelerator.save_state(tmp_path / "a")
    Marks.here = 1
    monkeypatch.setattr(table, "PARTS", (*PARTS, Marks, Failing))
    with pytest.raises(ValueError, match="after the marks were loaded"):
        accelerator.load_state(tmp_path / "a")
    assert Marks.here == 1


def twins():
    """Two models with the same names of weights, and their optimizers."""
    accelerator, models, optimizers = Accelerator(cpu=True), [], []
    for value in (8.0, 16.0):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, value)
        models.append(accelerator.prepare(model))
        optimizers.append(accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0)))
    return accelerator, models, optimizers


def twins_saved(folder):
    """Train replicas of both apart, and save before they meet."""
    accelerator, models, optimizers = twins()
    with accelerator.outer(models[0], local_sgd(4)), accelerator.outer(models[1], local_sgd(4)):
        for model, optimizer in zip(models, optimizers, strict=True):
            accelerator.backward(model(torch.full((1, 1), 1.0 + accelerator.process_index)).sum())
            optimizer.step()
        accelerator.save_state(folder)


def twins_loaded(folder):
    accelerator, models, _ = twins()
    accelerator.load_state(folder)
    return [accelerator.unwrap_model(model).weight.item() for model in models]


def test_two_models_with_the_same_names_keep_apart_on_another_number_of_ranks(tmp_path):
    run_ranks(twins_saved, 2, tmp_path / "a")
    assert run_ranks(twins_loaded, 1, tmp_path / "a") == [[6.5, 14.5]]
