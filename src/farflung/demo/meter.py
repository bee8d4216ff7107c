# SPDX-License-Identifier: Apache-2.0
"""What DDP's gradients cost on the wire, measured where they pass: in a communication hook."""

import time

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel


class GradientMeter:
    """Averages the gradients of a DDP model as DDP does by itself, and keeps count of bytes and of seconds waited.

    A rank waits from the moment when its last bucket has been launched, for then its backward pass has nothing left to
    compute, to the moment when the last of the buckets has arrived. What travels before that is hidden.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.bytes_sent = 0
        self._size = dist.get_world_size(model.process_group)
        self._group = model.process_group
        self._waited_s = 0.0
        self._launched = self._arrived = 0.0
        model.register_comm_hook(None, self._average)

    @property
    def waited_s(self) -> float:
        """Seconds waited so far; to be read between two backward passes."""
        self._add_wait()
        return self._waited_s

    # torch wants these two types, and not as text: no `from __future__ import annotations` in this file.
    def _average(self, _: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        if bucket.index() == 0:
            self._add_wait()
        gradients = bucket.buffer().div_(self._size)
        # A ring sends and receives this much on each rank: (M-1)/M to reduce, and again to spread the sums.
        self.bytes_sent += 2 * (self._size - 1) * gradients.nbytes // self._size
        work = dist.all_reduce(gradients, group=self._group, async_op=True)
        assert work is not None
        future: Future[list[Tensor]] = work.get_future()
        if bucket.is_last():
            self._launched = time.perf_counter()
        return future.then(self._note_arrival)

    def _note_arrival(self, future: Future[list[Tensor]]) -> Tensor:
        self._arrived = time.perf_counter()
        return future.value()[0]

    def _add_wait(self) -> None:
        """Add the wait of the latest backward pass; the backward pass itself returned after the last arrival."""
        self._waited_s += max(0.0, self._arrived - self._launched)
        self._launched = self._arrived
