# SPDX-License-Identifier: Apache-2.0
"""One rank's place in the schedule of a recipe: the actions that are due now, and those of further steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer

from farflung.base.errors import ConfigError
from farflung.outer.recipe import Recipe
from farflung.outer.rounds import Rounds
from farflung.outer.schedule import Action, Clock, Launch


class Timetable:
    """Asks the schedule once for each step, with what it may look at.

    Args:
        clock: seconds.

    Attributes:
        synced: the step up to which all that was due has been handed out.
        began: the step at which the latest round was launched.
    """

    def __init__(self, recipe: Recipe, rounds: Rounds, clock: Callable[[], float], inner: Optimizer | None) -> None:
        self._recipe, self._rounds, self._clock = recipe, rounds, clock
        self.synced = self.began = 0
        self._began_at = clock()
        self.know(inner)

    def know(self, inner: Optimizer | None) -> None:
        """Read the learning rate of the inner optimizer from now on."""
        self._rounds.inner = inner
        self._lr = None if inner is None else float(inner.param_groups[0]["lr"])

    def until(self, position: int) -> list[Action]:
        """Return what has become due in the steps up to `position`."""
        due: list[Action] = []
        for step in range(self.synced + 1, position + 1):
            seconds = self._clock() - self._began_at
            if self._recipe.reads_clock:  # all ranks of an island take the longest
                seconds = self._rounds.epoch.island.longest(seconds)
            due += self._due(step, seconds)
        self.synced = position
        return due

    def onwards(self) -> Iterator[Action]:
        """Go through what would become due in further steps, without end."""
        step = self.synced
        while True:
            step += 1
            yield from self._due(step, math.inf)

    def _due(self, step: int, seconds: float) -> list[Action]:
        """Ask the schedule; a round that is launched begins at this step."""
        inner = self._rounds.inner
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

    def begin_anew(self, position: int) -> None:
        """Go on from a step up to which all is done."""
        self.synced = self.began = position
        self.begin_round()

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank is."""
        seconds = self._clock() - self._began_at
        return {"synced": self.synced, "began": self.began, "seconds": seconds, "lr": self._lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was."""
        self.synced, self.began, self._lr = state["synced"], state["began"], state["lr"]
        self._began_at = self._clock() - state["seconds"]
