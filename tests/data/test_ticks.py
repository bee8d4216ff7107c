# SPDX-License-Identifier: Apache-2.0
"""Schedules that scripts make before `prepare` end with the data, however many replicas there are and how fast."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from farflung.data.ticks import epoch_ticks
from farflung.loop.scheduler import AcceleratedScheduler, horizon_of
from tests.data.test_slots import Run

BATCHES, EPOCHS = 48, 3


def cosine(num_training_steps):
    """As transformers' and diffusers' schedules are made."""

    def rate(step):
        return 0.5 * (1 + math.cos(math.pi * min(1.0, step / num_training_steps)))

    return LambdaLR(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0), rate)


class Scheduled:
    """The schedule of a replica, and its updates of so many batches."""

    def __init__(self, one, horizon, accumulate):
        self.one, self.accumulate, self.num_batches = one, accumulate, 0
        self.schedule = cosine(horizon)
        pace = epoch_ticks(self.schedule, horizon_of(self.schedule), one.loaders[0].share, accumulate)
        self.prepared = AcceleratedScheduler(self.schedule, [], ticks=pace)

    def take(self):
        if not self.one.take():
            self.num_batches = 0
            return False
        self.num_batches += 1
        if self.num_batches % self.accumulate == 0:
            self.schedule.optimizer.step()
            self.prepared.step()
        return True


def trained(speeds, horizon, accumulate=1, late=None):
    """The rates of replicas after each epoch; one may come after so many epochs."""
    run = Run(BATCHES, replicas=len(speeds) - (late is not None))
    replicas = [Scheduled(one, horizon, accumulate) for one in run.live]
    for epoch in range(EPOCHS):
        if epoch == late:
            replicas.append(Scheduled(run.join(), horizon, accumulate))
            while run.live[-1].loaders[0].iteration < epoch:
                assert not replicas[-1].take()
        going = dict(zip(replicas, speeds, strict=False))
        while going:
            going = {one: speed for one, speed in going.items() if all(one.take() for _ in range(speed))}
            run.round()
        yield [one.schedule.get_last_lr()[0] for one in replicas]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("speeds", [(1,), (1, 1), (1, 1, 1), (1, 3)])
def test_a_cosine_made_by_the_length_of_an_unprepared_loader_ends_at_nothing(speeds, accumulate):
    *_, ended = trained(speeds, EPOCHS * BATCHES // accumulate, accumulate)
    assert min(ended) < 0.01  # a slow replica makes fewer updates in the last epoch
    assert max(ended) < 0.1


def test_a_replica_that_comes_late_is_where_the_others_are():
    *_, (first, late) = trained((1, 1), EPOCHS * BATCHES, late=2)
    assert abs(first - late) < 0.01


def test_a_number_of_steps_that_are_no_whole_epochs_is_taken_as_it_is():
    share = SimpleNamespace(num_batches=BATCHES, is_shared=True)
    assert epoch_ticks(None, EPOCHS * BATCHES + 1, share, 1) is None
    assert epoch_ticks(None, None, share, 1) is None
    assert epoch_ticks(None, EPOCHS * BATCHES, SimpleNamespace(num_batches=BATCHES, is_shared=False), 1) is None
