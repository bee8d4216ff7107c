# SPDX-License-Identifier: Apache-2.0
"""One rank's position in the schedule of a recipe, and the actions that are due there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from farflung.base.checks import check_whole
from farflung.base.errors import ConfigError, StateError
from farflung.methods.recipe import Recipe
from farflung.methods.schedule import Action, Change, ChangingSchedule, Clock, Launch, Schedule, after_warmup
from farflung.votes.ballot import Island


class Timetable:
    """Asks the schedule once for each step, with what it may look at.

    Args:
        clock: seconds.

    Attributes:
        position: attempted steps since the loop began.
        synced: the step up to which all that was due has been handed out.
        began: the step at which the latest round was launched.
        inner: the inner optimizer, whose learning rate it reads.
        changes: the steps from which on H is another one, as given or as agreed on so far.
        last: the latest of them that was carried out.
        flushes: how many have ended.
        agreed: H and delay that come at the end of the current round, as a round has brought them to all ranks.
        recipe: whose schedule it is.
    """

    def __init__(self, recipe: Recipe, clock: Callable[[], float], inner: Optimizer | None) -> None:
        self._clock = clock
        self.follow(recipe)
        self.position = self.synced = self.began = self.flushes = 0
        self._began_at = clock()
        self.know(inner)

    def follow(self, recipe: Recipe) -> None:
        """Ask the schedule of another recipe from now on."""
        self.recipe = recipe
        # All ranks of an island take the longest, if the schedule looks at it.
        self._reads_clock = getattr(after_warmup(recipe.schedule), "reads_clock", False)
        self.last: Change | None = None
        self.agreed: tuple[int, int] | None = None
        self._proposed: tuple[int, int, int] | None = None  # the same as this rank wants them, from a vote on
        self._set_changes(recipe.changes)

    def _set_changes(self, changes: Iterable[Change]) -> None:
        self.changes = tuple(changes)
        self._schedule = self.recipe.scheduled(self.changes)

    @property
    def schedule(self) -> Schedule:
        """The one of the next step, after a warm-up."""
        if isinstance(self._schedule, ChangingSchedule):
            return self._schedule.part(self.synced + 1)[1]
        return after_warmup(self._schedule)

    @property
    def is_warming(self) -> bool:
        """Whether the next step belongs to the warm-up."""
        return self.position < self.recipe.warmup

    # ---- H as ranks agree on it

    def propose(self, every: int, delay: int | None, vote: int) -> None:
        """Propose another H, and perhaps delay, to all ranks, in a round of this number or a later one."""
        planned = self.recipe.changes[-1:]
        if planned and planned[0].step > self.synced:
            raise StateError(f"The recipe plans {planned[0]}. Leave out its changes, or propose none before that step.")
        check_whole("every", every, least=1)
        if delay is None:
            delay = every if self.recipe.eager else min(self.schedule.delay, every)
        self.recipe.check_interval(every, delay)
        self._proposed = every, delay, vote

    @property
    def proposal(self) -> tuple[int, int]:
        """What this rank proposes: H and delay, or zeros."""
        return (0, 0) if self._proposed is None else self._proposed[:2]

    def agree(self, proposal: tuple[int, int], vote: int) -> None:
        """Called after a round of all ranks was applied, with what the votes have brought; zeros are nothing."""
        if proposal != (0, 0):
            self.agreed = proposal
            if self._proposed is not None and self._proposed[2] <= vote:  # what came later is for the next round
                self._proposed = None

    def _change_after(self, step: int) -> None:
        """Begin what was agreed on, if a round ends at this step."""
        assert self.agreed is not None
        planned = ChangingSchedule(self.recipe.schedule, self.changes)
        if planned.ends_round(step):
            now, change, self.agreed = planned.part(step)[1], Change(step, *self.agreed), None
            is_new = (change.every, change.delay) != (now.every, now.delay)
            self._set_changes([one for one in self.changes if one.step < step] + [change] * is_new)

    # ---- steps
    def know(self, inner: Optimizer | None) -> None:
        """Read the learning rate of the inner optimizer from now on."""
        self.inner = inner
        self._lr = None if inner is None else float(inner.param_groups[0]["lr"])

    def until_now(self, island: Island) -> Iterator[list[Action]]:
        """Yield the actions that have become due since the last call, step by step: those of one may change H."""
        while self.synced < self.position:  # both are others for one that comes back as a newcomer
            step, seconds = self.synced + 1, self._clock() - self._began_at
            if self._reads_clock:
                seconds = max(second for (second,) in island.gathered(seconds))
            due = self.due(step, seconds)
            self.synced = step
            yield due

    def due(self, step: int, seconds: float) -> list[Action]:
        """Ask the schedule; a round that is launched begins at this step."""
        inner = self.inner
        if self._lr is not None and inner is not None:
            self._lr = max(self._lr, float(inner.param_groups[0]["lr"]))
        if self.agreed is not None:
            self._change_after(step)
        due = list(self._schedule(Clock(step, self.began, seconds, self._lr)))
        if self.recipe.inner.needs_optimizer and due and inner is None:
            raise ConfigError(f"{self.recipe.inner} needs the inner optimizer: OuterLoop(..., inner=optimizer).")
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

    def end_flush(self, position: int) -> None:
        """Continue from the furthest step of any rank."""
        self.take(position, position)
        self.flushes += 1

    def state_dict(self) -> dict[str, Any]:
        seconds = self._clock() - self._began_at
        steps = {"position": self.position, "synced": self.synced, "began": self.began}
        return {**steps, "seconds": seconds, "lr": self._lr, **self.changes_dict(), "proposed": self._proposed}

    def changes_dict(self) -> dict[str, Any]:
        """Return the changes of H, which all ranks share, as plain values."""
        return {"changes": [[one.step, one.every, one.delay] for one in self.changes], "agreed": self.agreed}

    def load_changes(self, state: Mapping[str, Any], due: Sequence[Action] = ()) -> None:
        """Take over what `changes_dict` has returned; what is `due` is not carried out yet."""
        saved, agreed = state.get("changes"), state.get("agreed")  # older states have none
        self._set_changes(self.recipe.changes if saved is None else (Change(*numbers) for numbers in saved))
        self.agreed = None if agreed is None else (agreed[0], agreed[1])
        done = [one for one in self.changes if one.step <= self.synced and one not in due]
        self.last = done[-1] if done else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.synced, self.began = state["position"], state["synced"], state["began"]
        self._lr = state["lr"]
        self._began_at = self._clock() - state["seconds"]
        self.load_changes(state)
        self._proposed = state.get("proposed")
