# SPDX-License-Identifier: Apache-2.0
"""The outer optimizer of recipes whose momentum nobody has chosen: SGD with a momentum that grows with the rounds.

And the weights that Nesterov momentum looks ahead from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farflung.base.checks import check_flag, check_number, check_whole
from farflung.base.errors import ConfigError

LARGEST = 0.9
PUBLISHED_LR = 0.7  # DiLoCo's (arXiv:2311.08105)


def momentum_of(round_number: int, delay: float, largest: float = LARGEST) -> float:
    """Return the momentum of a round, counted from 1: t / (t + delay), but at most `largest`."""
    return min(largest, round_number / (round_number + delay))


def delay_of(every: int) -> float:
    """Return the round in which the momentum is one half: 10 with rounds of up to 32 steps, sooner with longer ones.

    Long rounds are few, and carry less noise each. With it `diloco(128)` ends within 1 % of its tuned constant momentum
    (docs/evidence.md).
    """
    return max(3.0, min(10.0, 320 / every))


def rate_of(every: int, momentum: float | None = None) -> float:
    """Return the outer learning rate for rounds of `every` steps; with a constant momentum it is 0.7, as published.

    With the momentum that grows it is 0.7 for 8 to 16 steps, 0.85 from 32 on, and in proportion below 8. The best rate
    grows with H, and is higher if the inner learning rate falls than if it stays: 1.0 and 0.7 with H=32
    (docs/evidence.md).
    """
    if momentum is not None:
        return PUBLISHED_LR
    return PUBLISHED_LR * every / 8 if every < 8 else PUBLISHED_LR + 0.15 * min(1.0, max(0.0, math.log2(every / 16)))


class GrowingMomentumSGD(torch.optim.SGD):
    """SGD whose momentum grows with the number of steps.

    A momentum mu adds up about 1 / (1 - mu) rounds, and in its first rounds there are not as many.

    Args:
        delay: the round in which the momentum is one half.
        largest: what the momentum grows to.
        settings: those of `torch.optim.SGD` but the momentum.
    """

    def __init__(self, params: Any, delay: float, largest: float = LARGEST, **settings: Any) -> None:
        super().__init__(params, momentum=momentum_of(1, delay, largest), **settings)
        self.delay, self.largest = delay, largest
        if largest != LARGEST:  # states of before there was a choice say nothing of it
            self.defaults["max_momentum"] = largest

    def step(self, closure: Any = None) -> Any:
        """Take a step with the momentum of this round; each parameter counts its own."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                group["momentum"] = momentum_of(state["step"], self.delay, self.largest)
        return super().step(closure)


@dataclass(frozen=True)
class OuterSGD:
    """Makes the outer optimizer for rounds of `every` steps: SGD that goes over memory once and copies no gradient.

    Args:
        lr: None: it follows from `every`.
        momentum: None: it grows with the rounds, sooner with longer ones.
        sooner: how many times faster than usual it grows.
        largest: what it grows to; None: 0.9.

    Raises:
        ConfigError: a number is out of its range, or both `momentum` and `largest` are given.
    """

    every: int
    lr: float | None
    momentum: float | None
    nesterov: bool
    sooner: float = 1.0
    largest: float | None = None

    def __post_init__(self) -> None:
        check_whole("every", self.every, least=1)
        if self.lr is not None:
            check_number("lr", self.lr, above=0)
        if self.momentum is not None:
            check_number("momentum", self.momentum, least=0, below=1)
        if self.largest is not None:
            check_number("max_momentum", self.largest, least=0, below=1)
            if self.momentum is not None:
                raise ConfigError(
                    f"is {self.largest}, and momentum is {self.momentum} in all rounds. Give one of them.",
                    "max_momentum",
                )
        check_flag("nesterov", self.nesterov)

    @property
    def keywords(self) -> dict[str, Any]:
        """The optimizer's settings."""
        lr = rate_of(self.every, self.momentum) if self.lr is None else self.lr
        if self.momentum is None:
            largest = LARGEST if self.largest is None else self.largest
            return {
                "delay": delay_of(self.every) / self.sooner,
                "largest": largest,
                "lr": lr,
                "nesterov": self.nesterov and largest > 0,
            }
        return {"lr": lr, "momentum": self.momentum, "nesterov": self.nesterov and self.momentum > 0}

    def give(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer that another one of these has made the settings of this one."""
        optimizer.param_groups[0]["lr"] = self.keywords["lr"]
        if isinstance(optimizer, GrowingMomentumSGD):
            optimizer.delay, optimizer.largest = self.keywords["delay"], self.keywords["largest"]

    def __call__(self, parameters: Sequence[Tensor]) -> torch.optim.SGD:
        fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
        kind = GrowingMomentumSGD if self.momentum is None else torch.optim.SGD
        return kind(parameters, fused=fused, **self.keywords)


# ---- torch's Nesterov: m <- mu m + g; x <- x - lr (g + mu m) keeps weights that are lr mu m ahead of the slow ones,
# which are the x before the step, minus lr g, and the point to evaluate


def look_ahead(group: Mapping[str, Any]) -> float:
    """Return how many momentum buffers a parameter group of torch's SGD is ahead; 0 for any other optimizer's."""
    is_nesterov = group.get("nesterov", False) and "dampening" in group  # only SGD has both
    return float(group["lr"] * group["momentum"]) if is_nesterov else 0.0


def lead_of(state: Mapping[str, Any], group: Mapping[str, Any]) -> tuple[Tensor | None, float]:
    """Return a parameter's momentum buffer, and how many of it the parameter is ahead; None and 0 if it isn't.

    Args:
        state: the optimizer's for the parameter.
        group: the optimizer's settings; "look_ahead" among them is that of the last step, if they have changed since.
    """
    ahead, momentum = group.get("look_ahead", look_ahead(group)), state.get("momentum_buffer")
    return (momentum, ahead) if ahead and momentum is not None else (None, 0.0)
