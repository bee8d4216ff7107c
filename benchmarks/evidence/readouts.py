# SPDX-License-Identifier: Apache-2.0
"""By which weights a run may be judged: those that it trains, those behind its momentum, and means of both."""

from __future__ import annotations

from torch import Tensor

WINDOWS = (5, 10, 20)  # rounds


class Readouts:
    """The weights of the last round, and running means over rounds, as `average=` has them.

    Attributes:
        weights: `[rows, parameters]` by name; a row for each replica, or one for all of them.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self._rounds = 0

    def note(self, **now: Tensor) -> None:
        """Take up the weights after a round."""
        self._rounds += 1
        for name, rows in now.items():
            self.weights[name] = rows.clone()
            for window in WINDOWS:
                mean = self.weights.setdefault(f"{name}, mean of {window}", rows.clone())
                mean.lerp_(rows, 1 / min(window, max(1, self._rounds // 10)))
