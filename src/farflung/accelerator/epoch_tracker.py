# SPDX-License-Identifier: Apache-2.0
"""When an attached outer loop is flushed: once for each pass over the training data, where every rank arrives.

That is in the optimizer's step on the last batch, or where the pass ends if there was none. After a pass that was left
early the flush is owed, and comes at the next place that all ranks must come to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farflung.loop.state import ActiveLoader

if TYPE_CHECKING:
    from farflung.outer.engine import OuterLoop


class EpochTracker:
    """Flushes one outer loop after each pass over the training data.

    The training data are those of the loop around the optimizer's steps; other loaders, such as those of an evaluation,
    come and go without any exchange. A rank that gets no batch of a pass takes it for training when an earlier pass
    over that loader was, or when it has not trained at all yet.

    Attributes:
        is_owed: a pass was left early, and the replicas have not been synchronized since.
        is_behind: there have been steps since they were synchronized.
    """

    def __init__(self, loop: OuterLoop) -> None:
        self._loop = loop
        self.is_owed = self.is_behind = False
        self._iteration: ActiveLoader | None = None  # the pass under way
        self._is_flushed = False  # in this pass
        self._batch = self._steps = 0  # of this pass; attempts on it
        self._usual = 0  # attempts on the batch before
        self._data: list[Any] = []  # the loaders that were trained from

    def iteration_starts(self, loader: Any) -> None:
        """Called when an iteration of `loader` starts."""
        if self._knows(loader):
            self.flush_owed()

    def iteration_ended(self, iteration: ActiveLoader, at_end: bool) -> None:
        """Called when an iteration is over."""
        if iteration is self._iteration:
            self._iteration = None
            if not self._is_flushed and at_end:
                self._flush(iteration)
            self.is_owed = not self._is_flushed
        elif at_end and iteration.num_batches == 0 and (not self._data or self._knows(iteration.loader)):
            self._flush(iteration)

    def step_attempted(self, iteration: ActiveLoader | None) -> None:
        """Called after an attempted step, with the iteration whose loop stands around it."""
        self.is_behind = True
        if iteration is not self._iteration:
            self._iteration, self._is_flushed, self._batch, self._steps = iteration, False, 0, 0
        if iteration is None:
            return
        if not self._knows(iteration.loader):
            self._data.append(iteration.loader.base_dataloader)
        if iteration.num_batches != self._batch:
            self._usual = self._steps or self._usual
            self._batch, self._steps = iteration.num_batches, 0
        self._steps += 1
        # Not later, as many loops are left by `break` on their last batch.
        if iteration.end_of_dataloader and self._steps == self._usual and not self._is_flushed:
            self._flush(iteration)

    def flush_owed(self) -> None:
        """Flush the loop if that is owed: a collective of all ranks."""
        if self.is_owed:
            self._flush()

    def _knows(self, loader: Any) -> bool:
        return any(loader.base_dataloader is other for other in self._data)

    def _flush(self, after: ActiveLoader | None = None) -> None:
        self.is_owed = self.is_behind = False
        self._is_flushed = True
        if after is not None and after.loader.is_past:  # the others are in the middle of a later epoch
            return
        if not self._loop.is_warming:  # while gradients are averaged the replicas are alike
            self._loop.flush()
        if after is not None:
            after.loader.synchronized()
