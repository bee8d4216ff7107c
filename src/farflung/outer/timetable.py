# SPDX-License-Identifier: Apache-2.0
"""One rank's way along the schedule of a recipe: which actions are due, and their rounds launched and applied."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from farflung.base.errors import ConfigError
from farflung.outer.recipe import Recipe
from farflung.outer.rounds import Rounds
from farflung.outer.schedule import Action, Apply, Clock, Launch, after_warmup


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
            # All ranks of an island take the longest, where the schedule looks at it.
            if getattr(after_warmup(self._recipe.schedule), "reads_clock", False):
                seconds = max(said for (said,) in self._rounds.generation.island.gathered(seconds))
            due += self._due(step, seconds)
        self.synced = position
        return due

    def run(self, due: Sequence[Action], position: int) -> None:
        """Launch and apply the rounds that are due, then admit replicas that wait to join."""
        for action in due:
            if isinstance(action, Launch):
                self._rounds.launch(action, position, finished=False)
            else:
                self._rounds.apply(action.fragment)
            if self._rounds.has_joined:  # the others have completed the round of these actions
                break
        self._rounds.admit()

    def run_next(self, position: int) -> None:
        """Go on along the schedule without training until it launches a round, and run that."""
        for step in itertools.count(self.synced + 1):
            due = self._due(step, math.inf)
            self.synced = step
            self.run(due, position)
            if any(isinstance(action, Launch) for action in due):
                return

    def walk_on(self, position: int) -> tuple[int, int]:
        """Go on along the schedule without training until all ranks do so.

        Ranks vote in the order of the schedule. One that has no more data may not skip what others still come to.

        Returns:
            The fragment then under way, and the furthest position of any rank.
        """
        for step in itertools.count(self.synced + 1):
            for action in self._due(step, math.inf):
                if isinstance(action, Apply):
                    self._rounds.apply(action.fragment)
                    continue
                self._rounds.launch(action, position, finished=True)
                tally = self._rounds.finished_tally(action.fragment)
                if tally is not None:
                    return action.fragment, tally.position
        raise AssertionError("a schedule has no end")

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
