# SPDX-License-Identifier: Apache-2.0
"""What a round does with the inner optimizer's state, such as Adam's moments."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from farflung.base.checks import check_type, check_whole
from farflung.base.errors import ConfigError
from farflung.comm.group import Group
from farflung.outer.agreement import average
from farflung.outer.weighting import Decision, in_proportion

_COUNTER = "step"  # torch.optim keeps it as a float tensor, which has the shape of a parameter that is a scalar


class Inner(Protocol):
    """What is done with the state of the inner optimizer after a round."""

    @property
    def needs_optimizer(self) -> bool:
        """Whether the loop must know the inner optimizer."""

    def __call__(
        self, optimizer: Optimizer | None, parameters: Sequence[Tensor], rounds: int, group: Group, decision: Decision
    ) -> int:
        """Update the state of `parameters` after round number `rounds`; return the bytes that this rank sent."""


@dataclass(frozen=True)
class KeepState:
    """Each replica keeps its own optimizer state, as in most methods."""

    needs_optimizer = False

    def __call__(
        self, optimizer: Optimizer | None, parameters: Sequence[Tensor], rounds: int, group: Group, decision: Decision
    ) -> int:
        return 0


@dataclass(frozen=True)
class ResetState:
    """Reset the optimizer state, so that the optimizer starts afresh from the agreed weights."""

    needs_optimizer = True

    def __call__(
        self, optimizer: Optimizer | None, parameters: Sequence[Tensor], rounds: int, group: Group, decision: Decision
    ) -> int:
        assert optimizer is not None
        for parameter in parameters:
            optimizer.state.pop(parameter, None)
        return 0


@dataclass(frozen=True)
class AverageState:
    """Average the tensors of the optimizer state, each name at a period of its own.

    Args:
        every: rounds between two averagings, by the name in the optimizer state; empty averages all of them in every
            round. `{"exp_avg": 3, "exp_avg_sq": 6}` is DES-LOC's choice for Adam.

    Raises:
        ConfigError: a period is not a positive integer.

    Source: DES-LOC (arXiv:2505.22549).
    """

    every: Mapping[str, int] = field(default_factory=dict)
    needs_optimizer = True

    def __post_init__(self) -> None:
        check_type("every", self.every, Mapping, "a dictionary of names and rounds, such as {'exp_avg': 3}")
        for name, period in self.every.items():
            check_whole(name, period, least=1)

    def __call__(
        self, optimizer: Optimizer | None, parameters: Sequence[Tensor], rounds: int, group: Group, decision: Decision
    ) -> int:
        """Average what is due, unless ranks have different tensors: an optimizer that never stepped has none.

        Ranks with values that are not finite get the mean of the others.

        Raises:
            ConfigError: the optimizer state has no tensor of a name in `every`.
        """
        assert optimizer is not None
        due = self._due(optimizer, parameters, rounds)
        layout = " ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in due)
        mark = int.from_bytes(hashlib.blake2b(layout.encode(), digest_size=6).digest(), "big")
        sound = float(all(bool(torch.isfinite(tensor).all()) for tensor in due))
        marks, sounds = group.all_gather_small(torch.tensor([float(mark), sound], dtype=torch.float64)).T.tolist()
        shares = in_proportion([factor * one for factor, one in zip(decision.factors, sounds, strict=True)])
        if not due or len(set(marks)) != 1 or not shares.total:
            return 0
        return average(due, group, shares)

    def _due(self, optimizer: Optimizer, parameters: Sequence[Tensor], rounds: int) -> list[Tensor]:
        states = [(parameter, optimizer.state[parameter]) for parameter in parameters if parameter in optimizer.state]
        kept = {name for _, state in states for name in state}
        if states and not kept >= set(self.every):
            raise ConfigError(
                f"The optimizer's state has {sorted(kept)}, but none of {sorted(set(self.every) - kept)}."
            )
        return [
            value
            for parameter, state in states
            for name, value in sorted(state.items())
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point()
            if name != _COUNTER and self._is_due(name, rounds)
        ]

    def _is_due(self, name: str, rounds: int) -> bool:
        if not self.every:
            return True
        return name in self.every and rounds % self.every[name] == 0
