# SPDX-License-Identifier: Apache-2.0
"""One rank's position in the schedule of a recipe, and the actions that are due there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from farflung.base.errors import ConfigError
from farflung.outer.ballot import Island
from farflung.outer.recipe import Recipe
from farflung.outer.schedule import Action, Clock, Launch, after_warmup


class Timetable:
    """Asks the schedule once for each step, with what it may look at.

    Args:
        clock: seconds.

    Attributes:
        position: attempted steps since the loop began.
        synced: the step up to which all that was due has been handed out.
        began: the step at which the latest round was launched.
        inner: the inner optimizer, whose learning rate it reads.
    """

    def __init__(self, recipe: Recipe, clock: Callable[[], float], inner: Optimizer | None) -> None:
        self._recipe, self._clock = recipe, clock
        self.position = self.synced = self.began = 0
        self._began_at = clock()
        self.know(inner)
        # All ranks of an island take the longest, if the schedule looks at it.
        self._reads_clock = getattr(after_warmup(recipe.schedule), "reads_clock", False)

    def know(self, inner: Optimizer | None) -> None:
        """Read the learning rate of the inner optimizer from now on."""
        self.inner = inner
        self._lr = None if inner is None else float(inner.param_groups[0]["lr"])

    def until_now(self, island: Island) -> list[Action]:
        """Return the actions that have become due since the last call."""
        due: list[Action] = []
        for step in range(self.synced + 1, self.position + 1):
            seconds = self._clock() - self._began_at
            if self._reads_clock:
                seconds = max(said for (said,) in island.gathered(seconds))
            due += self.due(step, seconds)
        self.synced = self.position
        return due

    def due(self, step: int, seconds: float) -> list[Action]:
        """Ask the schedule; a round that is launched begins at this step."""
        inner = self.inner
        if self._lr is not None and inner is not None:
            self._lr = max(self._lr, float(inner.param_groups[0]["lr"]))
        due = list(self._recipe.schedule(Clock(step, self.began, seconds, self._lr)))
        if self._recipe.inner.needs_optimizer and due and inner is None:
            raise ConfigError(f"{self._recipe.inner} needs the inner optimizer: OuterLoop(..., inner=optimizer).")
        if any(isinstance(action, Launch) for action in due):
            self.began = step
            self.know(inner)
        return due

    def begin_round(self) -> None:
        """Count the seconds of the current round from now on."""
        self._began_at = self._clock()

    def take(self, position: int, began: int) -> None:
        """Continue from a step up to which everything is done."""
        self.position = self.synced = position
        self.began = began
        self.begin_round()

    def state_dict(self) -> dict[str, Any]:
        seconds = self._clock() - self._began_at
        steps = {"position": self.position, "synced": self.synced, "began": self.began}
        return {**steps, "seconds": seconds, "lr": self._lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.synced, self.began = state["position"], state["synced"], state["began"]
        self._lr = state["lr"]
        self._began_at = self._clock() - state["seconds"]
