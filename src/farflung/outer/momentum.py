# SPDX-License-Identifier: Apache-2.0
"""The outer optimizer of recipes whose momentum nobody has chosen: SGD with a momentum that grows with the rounds."""

from __future__ import annotations

from typing import Any

import torch

# The momentum of round t is t / (t + DELAY), but at most LARGEST: see benchmarks/bench_outer_momentum.py.
DELAY, LARGEST = 10, 0.9


def momentum_of(round_number: int) -> float:
    """Return the momentum of a round, counted from 1."""
    return min(LARGEST, round_number / (round_number + DELAY))


class GrowingMomentumSGD(torch.optim.SGD):
    """SGD whose momentum grows with the number of steps, to 0.9.

    A momentum mu adds up about 1 / (1 - mu) rounds, and in its first rounds there are not as many.

    Args:
        settings: those of `torch.optim.SGD` but the momentum.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, momentum=momentum_of(1), **settings)

    def step(self, closure: Any = None) -> Any:
        """Take a step with the momentum of this round; each parameter counts its own."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                group["momentum"] = momentum_of(state["step"])
        return super().step(closure)
