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


def _seen(name: str, doc: str) -> Any:
    """Return a property that is read from the attribute `name` of the loop."""
    return property(lambda view: getattr(view._loop, name), doc=doc)


class LoopView:
    """A view of one loop."""

    sync_gradients = _seen("sync_gradients", "Whether the current micro-batch completes its accumulation window.")
    num_steps = _seen("num_steps", "Micro-batches in one accumulation window.")
    sync_with_dataloader = _seen("sync_with_dataloader", "Whether the last batch of a loader completes its window.")
    end_of_dataloader = _seen("end_of_dataloader", "Whether the latest batch was the last one of its loader.")
    remainder = _seen(
        "remainder",
        "Samples of the final global batch that are no padding; 0: all of them, -1: not known or no loader.",
    )
    is_xla_gradients_synced = False  # XLA is not supported

    def __init__(self, loop: LoopState) -> None:
        self._given = loop

    @property
    def _loop(self) -> LoopState:
        return self._given

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

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Say whether the micro-batch in hand completes its window, for loops that count on their own."""
        self._loop.sync_gradients = sync_gradients
