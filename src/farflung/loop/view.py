# SPDX-License-Identifier: Apache-2.0
"""Where a training loop stands, as a view that owns nothing: the names under which scripts and trainers read it."""

from __future__ import annotations

from typing import Any

from farflung.loop.state import LoopState


def forwarded(holder: str, name: str) -> Any:
    """Return a property that is read from, and set on, the attribute `name` of the object that `holder` names."""
    return property(
        lambda view: getattr(getattr(view, holder), name),
        lambda view, value: setattr(getattr(view, holder), name, value),
    )


class LoopView:
    """A view of one loop."""

    def __init__(self, loop: LoopState) -> None:
        self._given = loop

    @property
    def _loop(self) -> LoopState:
        return self._given

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch completes its accumulation window."""
        return self._loop.sync_gradients

    @property
    def num_steps(self) -> int:
        """Micro-batches in one accumulation window."""
        return self._loop.num_steps

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader completes its window."""
        return self._loop.sync_with_dataloader

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the latest batch was the last one of its loader."""
        return self._loop.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples of the final global batch that are no padding; 0: all of them, -1: not known or no loader."""
        return self._loop.remainder

    @property
    def active_dataloader(self) -> Any:
        """The loader that handed out the latest batch, None outside of all loops over loaders."""
        current = self._loop.current
        return None if current is None else current.loader

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders that are being iterated, the current one last."""
        return [under_way.loader for under_way in self._loop.loaders]

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def is_xla_gradients_synced(self) -> bool:
        """False: XLA is not supported."""
        return False

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Say whether the micro-batch in hand completes its window, for loops that count on their own."""
        self._loop.sync_gradients = sync_gradients
