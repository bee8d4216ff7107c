# SPDX-License-Identifier: Apache-2.0
"""The trainer's learning rate ends at zero, however many processes and micro-batches there are; its log tells norms."""

import math

import pytest

from farflung import Accelerator, DataLoaderConfiguration
from farflung.testing.ranks import run_ranks
from tests.examples.scripts import load

pytestmark = pytest.mark.package

LEARNING_RATE = 1e-2
NUM_SAMPLES, BATCH = 500, 16


def train_all(plans, split_batches):
    """Train once for each plan; return the logs and the learning rates at the end."""
    example = load("trainer")
    found = []
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=split_batches))
    for plan in plans:
        keep = example.KeepLog()
        trainer = example.make_trainer(accelerator, example.Plan(**plan), batch_size=BATCH, callbacks=[keep])
        trainer.train()
        found.append((keep.history, trainer.learning_rate))
        accelerator.free_memory()
    return found


def expected_steps(plan, size, split_batches):
    if "max_steps" in plan:
        return plan["max_steps"]
    batches = math.ceil(NUM_SAMPLES / (BATCH if split_batches else BATCH * size))
    return plan["epochs"] * math.ceil(batches / plan["gradient_accumulation_steps"])


@pytest.mark.parametrize(("size", "split_batches"), [(1, False), (2, True), (4, False)])
def test_the_learning_rate_ends_at_zero(size, split_batches):
    counts = [1, 3, 5]
    plans = [{"epochs": 2, "gradient_accumulation_steps": count} for count in counts]
    plans += [{"max_steps": 7, "gradient_accumulation_steps": count} for count in counts]
    for found in run_ranks(train_all, size, plans, split_batches, timeout_s=90, connect=False):
        for plan, (history, last) in zip(plans, found, strict=True):
            steps = expected_steps(plan, size, split_batches)
            rates = [log["learning_rate"] for log in history]
            assert rates == pytest.approx([LEARNING_RATE * (1 - step / steps) for step in range(steps)])
            assert last == pytest.approx(0, abs=1e-12)


@pytest.mark.long
def test_the_log_tells_norms_and_the_same_loss_on_each_rank():
    plans = [{"epochs": 2, "gradient_accumulation_steps": 2, "max_norm": 0.5}]
    first, second = (found[0][0] for found in run_ranks(train_all, 2, plans, False, connect=False))
    assert [log["loss"] for log in first] == [log["loss"] for log in second]
    assert sum(log["loss"] for log in first[-4:]) < sum(log["loss"] for log in first[:4])
    for log in first:
        assert log["clipped_grad_norm"] == pytest.approx(min(log["grad_norm"], 0.5), rel=1e-4)
        assert log["weight_norm"] > 0


def parameters_after_each(ways):
    example = load("trainer")
    found = []
    for window, batch_size in ways:
        accelerator = Accelerator(cpu=True)
        plan = example.Plan(epochs=1, gradient_accumulation_steps=window)
        trainer = example.make_trainer(accelerator, plan, batch_size=batch_size)
        trainer.train()
        found.append([parameter.detach() for parameter in trainer.model.parameters()])
        accelerator.free_memory()
    return found


@pytest.mark.long
def test_windows_by_hand_equal_larger_batches():
    # 500 samples: 5 windows of 2 batches of 50, or 5 batches of 100.
    small, large = run_ranks(parameters_after_each, 1, [(2, 50), (1, 100)], connect=False)[0]
    for one, other in zip(small, large, strict=True):
        assert one.allclose(other, rtol=0, atol=1e-5)
