# SPDX-License-Identifier: Apache-2.0
"""Outer loops that a setting asks for: attached by `prepare`, driven by the optimizer, brought together after the data.

The replicas come together (a flush) once for each pass over the training data, where every rank arrives: in the
optimizer's step on the last batch, or where the pass ends if there was none. After a pass that was broken off they come
together at the next place to which all ranks must come: a collective of the Accelerator's, the next pass, the end.
"""

from __future__ import annotations

import atexit
import json
import math
import sys
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

from farflung.accelerator.outer import OpenLoops, Tie
from farflung.accelerator.prepare import Registry
from farflung.base.errors import ConfigError
from farflung.config.outer import OuterConfig
from farflung.loop.state import ActiveLoader, LoopState
from farflung.outer.named import recipe_of
from farflung.outer.stats import Round
from farflung.process import world as slot
from farflung.process.failure import OUTER_ASKED, OUTER_ATTACHED, OUTER_ROUND, leave_note
from farflung.process.log import get_logger
from farflung.process.world import World
from farflung.strategy.base import Strategy

RANK = "{rank}"


class Course:
    """Follows one attached loop through the training data.

    The training data are those of the loop around the optimizer's steps; other loaders, such as those of an evaluation,
    come and go without any exchange. A rank that gets no batch of a pass takes it for training when an earlier pass
    over that loader was, or when it has not trained at all yet.

    Attributes:
        tie: the loop and what it is tied to.
        is_owed: a pass was broken off, and the replicas have not come together since.
        is_behind: there have been steps since they came together.
    """

    def __init__(self, tie: Tie) -> None:
        self.tie = tie
        self.is_owed = self.is_behind = False
        self._pass: ActiveLoader | None = None
        self._is_flushed = False  # in this pass
        self._batch = self._steps = 0  # of this pass; attempts on it
        self._usual = 0  # attempts on the batch before
        self._data: list[Any] = []  # the loaders that were trained from
        tie.optimizer.listeners.append(self._attempted)

    def begins(self, loader: Any) -> None:
        """Hear that an iteration begins."""
        if self.is_owed and self._knows(loader):
            self.settle()

    def left(self, iteration: ActiveLoader, at_end: bool) -> None:
        """Hear that an iteration is over."""
        if iteration is self._pass:
            self._pass = None
            if not self._is_flushed and at_end:
                self._flush()
            self.is_owed = not self._is_flushed
        elif at_end and iteration.num_batches == 0 and (not self._data or self._knows(iteration.loader)):
            self._flush()

    def settle(self) -> None:
        """Bring the replicas together if that is owed."""
        if self.is_owed:
            self._flush()

    def end(self) -> None:
        """Stop following."""
        if self._attempted in self.tie.optimizer.listeners:
            self.tie.optimizer.listeners.remove(self._attempted)

    def _attempted(self, done: bool) -> None:
        self.is_behind = True
        iteration = self.tie.around()
        if iteration is not self._pass:
            self._pass, self._is_flushed, self._batch, self._steps = iteration, False, 0, 0
        if iteration is None:
            return
        if not self._knows(iteration.loader):
            self._data.append(iteration.loader.base_dataloader)
        if iteration.num_batches != self._batch:
            self._usual = self._steps or self._usual
            self._batch, self._steps = iteration.num_batches, 0
        self._steps += 1
        # Not later, as many loops are left by `break` on their last batch.
        if iteration.end_of_dataloader and self._steps == self._usual and not self._is_flushed:
            self._flush()

    def _knows(self, loader: Any) -> bool:
        return any(loader.base_dataloader is other for other in self._data)

    def _flush(self) -> None:
        self.is_owed = self.is_behind = False
        self._is_flushed = True
        if not self.tie.loop.is_warming:  # while gradients are averaged the replicas are alike
            self.tie.loop.flush()


class Conductor:
    """Attaches an outer loop to each model that is trained, as one setting says, and follows them to their end.

    Args:
        config: the setting; None: there is nothing to do.
    """

    def __init__(
        self,
        config: OuterConfig | None,
        world: World,
        strategy: Strategy,
        loop: LoopState,
        registry: Registry,
        open_loops: OpenLoops,
    ) -> None:
        self._config = config
        self._world = world
        self._strategy = strategy
        self._registry = registry
        self._open_loops = open_loops
        self._courses: list[Course] = []
        if config is None:
            return
        self._recipe = recipe_of(config, world.local_size)
        leave_note(OUTER_ASKED)
        self._log = self._opened_log(config.log)
        ear = _Ear(self)
        loop.observers.append(ear)
        world.exchange.before.append(ear.settle)
        weakref.finalize(self, loop.observers.remove, ear)
        weakref.finalize(self, world.exchange.before.remove, ear.settle)
        atexit.register(_at_exit, weakref.ref(self))

    def attach(self) -> None:
        """Open a loop over each prepared model that a prepared optimizer trains and that has none yet: a collective."""
        if self._config is None:
            return
        for model in self._registry.models:
            owners = [one for one in self._registry.optimizers if one.owns(model.parameters())]
            trains = any(parameter.requires_grad for parameter in model.parameters())
            if not owners or not trains or self._open_loops.tied(model):
                continue
            tie = Tie(model, self._recipe, self._strategy, self._registry.optimizers, each_step=True)
            self._open_loops.opened(tie)
            leave_note(OUTER_ATTACHED)
            tie.loop.listeners.append(lambda _: leave_note(OUTER_ROUND))
            if self._log is not None:
                tie.loop.listeners.append(_Journal(self._log, len(self._courses)))
            self._courses.append(Course(tie))

    def begins(self, loader: Any) -> None:
        """Hear that an iteration begins."""
        for course in self._courses:
            course.begins(loader)

    def left(self, iteration: ActiveLoader, at_end: bool) -> None:
        """Hear that an iteration is over."""
        for course in self._courses:
            course.left(iteration, at_end)

    def settle(self) -> None:
        """Do what is owed, where all ranks are."""
        for course in self._courses:
            course.settle()

    def end(self) -> None:
        """End all loops: a collective, unless an error is on its way through the caller."""
        error = sys.exc_info()
        for course in self._let_go():
            course.tie.end(*error)
            self._advise(course)

    def drop(self) -> None:
        """End all loops where they stand. Nothing is exchanged."""
        for course in self._let_go():
            course.tie.drop()
            self._advise(course)

    def farewell(self) -> None:
        """Say at the end of the process what is left to say."""
        if slot.current() is None or getattr(sys, "last_value", None) is not None:
            return
        for course in self._courses:
            self._advise(course)
            unsent = course.tie.loop.unsent
            steps = "step was" if unsent == 1 else f"{unsent} steps were"
            if course.is_behind and unsent and self._world.size > 1:
                get_logger(__name__).warning(
                    f"The last {steps} averaged with nobody, as the loop over the data was left early. "
                    "Call accelerator.wait_for_everyone() or accelerator.end_training() after it."
                )

    def _let_go(self) -> list[Course]:
        courses, self._courses = self._courses, []
        for course in courses:
            course.end()
            self._open_loops.closed(course.tie)
        return courses

    def _advise(self, course: Course) -> None:
        advice = course.tie.loop.advice()
        if advice:
            get_logger(__name__).warning(advice)

    def _opened_log(self, name: str | None) -> Path | None:
        """Return the file for this rank's rounds, made sure that it can be written; None where it writes none."""
        if name is None or (RANK not in name and not self._world.is_main):
            return None
        path = Path(name.replace(RANK, str(self._world.rank)))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise ConfigError(f"The log of the outer loop, {path}, can't be written: {error.strerror}.") from error
        return path


class _Ear:
    """Hears for a conductor without keeping it alive: what listens outlives an Accelerator that is thrown away."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = weakref.ref(conductor)

    def begins(self, loader: Any) -> None:
        conductor = self._conductor()
        if conductor is not None:
            conductor.begins(loader)

    def left(self, iteration: ActiveLoader, at_end: bool) -> None:
        conductor = self._conductor()
        if conductor is not None:
            conductor.left(iteration, at_end)

    def settle(self) -> None:
        conductor = self._conductor()
        if conductor is not None:
            conductor.settle()


class _Journal:
    """Adds a line of JSON to a file for each round."""

    def __init__(self, path: Path, model: int) -> None:
        self._path = path
        self._model = model

    def __call__(self, this: Round) -> None:
        line = json.dumps({"model": self._model, **_finite(asdict(this))}, allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _finite(value: Any) -> Any:
    """Put None where a number is none, or infinite: JSON has no word for it."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _at_exit(reference: weakref.ref[Conductor]) -> None:
    conductor = reference()
    if conductor is not None:
        conductor.farewell()
