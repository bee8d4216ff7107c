# SPDX-License-Identifier: Apache-2.0
"""Where a training loop stands: the accumulation window it is in and the loaders that are being iterated."""

from __future__ import annotations

from typing import Protocol


class ActiveLoader(Protocol):
    """What the loop needs to know of a loader that is being iterated."""

    end_of_dataloader: bool  # the batch handed out last was the final one
    remainder: int  # samples of the final global batch that are no padding; 0: all of them, -1: not known


class LoopState:
    """The accumulation window and the loaders under way. Loaders report to it; optimizers and schedulers read it.

    Args:
        num_steps: micro-batches in one accumulation window.
        sync_with_dataloader: the last batch of a loader completes its window.
        sync_each_batch: gradients are synchronized on each micro-batch, though the optimizer waits for the window.
    """

    def __init__(
        self,
        num_steps: int = 1,
        *,
        sync_with_dataloader: bool = True,
        sync_each_batch: bool = False,
    ) -> None:
        self.num_steps = num_steps
        self.sync_with_dataloader = sync_with_dataloader
        self.sync_each_batch = sync_each_batch
        self.step = 0
        self.sync_gradients = True
        self.loaders: list[ActiveLoader] = []

    @property
    def current(self) -> ActiveLoader | None:
        """The loader that handed out the latest batch, among those that are still being iterated."""
        return self.loaders[-1] if self.loaders else None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the latest batch was the last one of its loader."""
        return bool(self.loaders) and self.loaders[-1].end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples of the final global batch that are no padding; 0: all of them, -1: not known or no loader."""
        return self.loaders[-1].remainder if self.loaders else -1

    def enter(self, loader: ActiveLoader) -> None:
        """Take `loader` as the current one: it starts, or it hands out a batch after another loader did."""
        if self.loaders and self.loaders[-1] is loader:
            return
        self.leave(loader)
        self.loaders.append(loader)

    def leave(self, loader: ActiveLoader) -> None:
        """Forget `loader`: its iteration ended, was broken off, or was thrown away."""
        self.loaders = [other for other in self.loaders if other is not loader]

    def advance(self) -> bool:
        """Count one micro-batch and say whether it completes its accumulation window."""
        if self.sync_with_dataloader and self.end_of_dataloader:
            self.step = 0
            self.sync_gradients = True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.num_steps == 0
        return self.sync_gradients
