# SPDX-License-Identifier: Apache-2.0
"""When something is exchanged: from a step to the words `Launch` and `Apply`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from laconic.base.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """Send off a fragment as it is after this step."""

    fragment: int


@dataclass(frozen=True)
class Apply:
    """Bring what came back of a fragment into the model."""

    fragment: int


class Schedule(Protocol):
    """Pure: the same answer for the same step on every rank."""

    def __call__(self, step: int) -> Sequence[Launch | Apply]:
        """Say what is due after the optimizer's step number `step`, which counts from 1."""


@dataclass(frozen=True)
class Every:
    """Exchange the whole model after each `every` steps.

    Raises:
        ConfigError: `every` is no whole number above zero.
    """

    every: int

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ConfigError(
                f"every={self.every!r}: the number of optimizer steps between two rounds must be an int of 1 or more."
            )

    def __call__(self, step: int) -> Sequence[Launch | Apply]:
        """Launch and apply at once when `step` is a multiple of `every`."""
        return (Launch(0), Apply(0)) if step % self.every == 0 else ()
