# SPDX-License-Identifier: Apache-2.0
"""Steps learning rate schedules that are made for all batches of a run, where replicas come and go.

Scripts plan a schedule by the length of a loader that is not prepared yet, and a fixed number of processes steps it as
often in each update. Members come and go, and a fast one makes more updates than a slow one. So each epoch has its part
of the schedule, in which an update counts once for each member.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from farflung.data.slots import SlotSampler


@dataclass(frozen=True)
class EpochTicks:
    """How often an update of this replica steps a schedule; see `epoch_ticks`."""

    schedule: Any
    share: SlotSampler
    per_epoch: float  # steps of the schedule

    def __call__(self) -> int:
        begun, done = self.share.epoch * self.per_epoch, int(self.schedule.last_epoch)
        return max(0, round(min(max(done, begun) + self.share.num_members, begun + self.per_epoch)) - done)


def epoch_ticks(schedule: Any, horizon: int | None, share: SlotSampler, num_steps: int) -> EpochTicks | None:
    """Return the ticks of a schedule that ends with an epoch of all replicas together; None: it does not.

    Args:
        horizon: after how many steps it ends.
        num_steps: batches in one update.
    """
    batches = share.num_batches
    if horizon is None or not batches or not share.is_shared:
        return None
    updates, epochs = -(-batches // num_steps), -(-horizon * num_steps // batches)  # scripts round either
    if horizon % updates == 0:
        return EpochTicks(schedule, share, updates)
    return EpochTicks(schedule, share, horizon / epochs) if batches * epochs // num_steps == horizon else None
