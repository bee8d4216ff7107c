# SPDX-License-Identifier: Apache-2.0
"""The ranks that train a model together under DDP while some of them may have run out of data."""

from __future__ import annotations

from threading import Thread

import torch

from farflung.base.errors import RankFailure
from farflung.comm.torch_group import TorchGroup


class JoinedRanks:
    """Ranks that sum two numbers each: a value, and whether they have data.

    `group` is used for nothing else. `everyone` are the same ranks as they train; where a rank fails, it is aborted,
    which ends their waits.
    """

    def __init__(self, group: TorchGroup, everyone: TorchGroup) -> None:
        self.group = group
        self._everyone = everyone
        self._responder = Thread(target=self._respond, name="farflung join responder", daemon=True)

    def any(self, mine: bool) -> bool:
        return self._sums(float(mine), 1.0)[0] > 0

    def sum(self, mine: float) -> float:
        return self._sums(mine, 1.0)[0]

    def respond(self) -> None:
        """Answer the others with zeros from now on, in a thread, until none of them has data."""
        self._responder.start()

    def wait(self) -> None:
        """Return when there is nothing more to answer."""
        if self._responder.ident is not None:
            self._responder.join()

    def _respond(self) -> None:
        try:
            while self._sums(0.0, 0.0)[1]:
                pass
        except RankFailure:
            self._everyone.abort()  # or this rank would wait in torch's `Join` for ranks that will not come

    def _sums(self, value: float, has_data: float) -> list[float]:
        both = torch.tensor([value, has_data], dtype=torch.float64)
        self.group.all_reduce(both).wait()
        return both.tolist()
