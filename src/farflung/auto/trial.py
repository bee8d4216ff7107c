# SPDX-License-Identifier: Apache-2.0
"""The first steps of a loop whose recipe is chosen from what they measure: the line, and the time of a step.

    open     all members send a few MB at once; a fixed group whose gradients take little time averages them
    4 steps  each show whether averaging takes too long for a step; then each replica continues alone
    20 steps timed, without what they waited; an early flush ends the trial as well
    then     the members gather the times, choose the recipe that follows from them, and start it where they stand

Everyone derives the same recipe from the same gathered numbers. Replicas that come and go train in rounds meanwhile,
and gather all of that after one of them, as they come to nothing else together. Of them the first decision counts,
which is kept with the run's records for newcomers.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from farflung.auto.choice import Link, Measurements
from farflung.auto.tuner import LineTuner
from farflung.base.errors import Unreachable
from farflung.config.outer import OuterSettings
from farflung.methods.arguments import recipe_of
from farflung.methods.fragments import num_blocks
from farflung.methods.recipe import Recipe
from farflung.methods.schedule import TrialSchedule, Warmup, after_warmup
from farflung.outer.chooser import Chooser
from farflung.outer.membership import Membership
from farflung.outer.quorum import Quorum

_TIMES = 3  # that a collective of each size is timed
_FIRST_BYTES, _MOST_BYTES, _GROWTH = 1 << 16, 1 << 23, 4
_FILL_S = 0.05  # and two turns: buffers on the way are full by then, and TCP knows how much the line takes
_AVERAGED_STEPS = 4  # after each of which is asked whether averaging could be worth it
_LEAST_STEPS = 4  # that are timed
_ALONE, _AVERAGED = "", "averaged"  # gradients in the steps of the trial
_FIRST_STEPS = 2  # which compile, allocate and warm up caches


class RecipeTrial(Chooser):
    """A loop's trial: what it has measured so far."""

    sets_options = True
    _quorum: Quorum
    _membership: Membership
    _model: nn.Module
    _recipe: Recipe  # of the trial, which has an anchor

    def __init__(self, tuner: LineTuner) -> None:
        self._tuner = tuner
        # Of the latest steps, without waits: a replica that comes and goes may be on trial alone for days.
        self._times: deque[float] = deque(maxlen=2 * TrialSchedule.every)
        self._until = TrialSchedule.every
        self._waits_in_steps, self._are_alike = False, True
        self._rates: set[tuple[float, ...]] = set()  # two of them are as good as more
        self._is_kept = False  # for newcomers, with the run's records
        self._link: Link | None = None
        self._spec = _ALONE  # the recipe that was chosen, as a text, or one of the two kinds of trial
        self._steps = 0  # of the run, as a schedule tells once its first update is done; 0: unknown

    @property
    def is_measuring(self) -> bool:  # type: ignore[override]
        return self._spec in (_ALONE, _AVERAGED)

    @property
    def _is_looking(self) -> bool:
        return self._until <= _AVERAGED_STEPS

    def first(self, recipe: Recipe, membership: Membership) -> Recipe:
        self._recipe, self._membership = recipe, membership
        return self.known() or recipe

    def bind(self, model: nn.Module, quorum: Quorum) -> None:
        self._model, self._quorum = model, quorum

    def refused(self) -> Recipe | None:
        """Return what members have chosen meanwhile; or the trial, as all may have ended after the choice, and before
        a state was written under it."""
        if self.is_measuring:
            return self.known()
        self._spec = _ALONE
        return self._recipe

    def known(self, waits: bool = True) -> Recipe | None:
        text = self._membership.agreed("", waits)
        return self._take(text, None) if text and self.is_measuring else None

    def met(self) -> Recipe | None:
        """Measure the line, unless this process is alone; or return what was chosen since a state that is continued."""
        quorum = self._quorum
        if self.is_measuring and not quorum.membership.is_fixed:
            return self.known()
        if quorum.group.size == 1 and quorum.membership.is_fixed:
            self._tuner.alone()
        if not self.is_measuring or quorum.group.size == 1:
            return None
        if known := self._quorum.together(self._measure_line):
            *step_s, is_constant, steps = known
            self._steps = int(steps)
            measured = self._measured(step_s, self._gathered(*self._planned())[0], bool(is_constant))
            return self._decide(replace(measured, may_average=quorum.group.is_direct))
        if quorum.group.is_direct and self._tuner.averages(self._measured((), (0, 0))):
            self._until = 1
            return self._on_trial(_AVERAGED)
        return None

    def _on_trial(self, spec: str) -> Recipe:
        self._spec, inside = spec, after_warmup(self._recipe.schedule)
        self._recipe = replace(self._recipe, schedule=Warmup(TrialSchedule.every, inside) if spec else inside)
        return self._recipe

    def state_dict(self) -> dict[str, Any]:
        return {"auto": self._spec, "auto_steps": self._steps}

    def resumed(self, state: Mapping[str, Any]) -> Recipe | None:
        if (spec := state.get("auto")) is None:
            return None
        self._steps = state.get("auto_steps", 0)
        return self._on_trial(spec) if spec in (_ALONE, _AVERAGED) else self._take(spec, None)

    def note_step(self, waited_s: float, waits_in_steps: bool) -> None:
        self._waits_in_steps = waits_in_steps
        self._steps = self._steps or self._tuner.planned() or 0
        if self._quorum.group.size > 1 and any(parameter.is_cuda for parameter in self._model.parameters()):
            torch.cuda.synchronize()
        self._times.append(time.perf_counter() - waited_s)
        if len(self._rates) < 2:
            self._rates.add(self._tuner.rates())

    def is_due(self, step: int, is_early: bool = False) -> bool:
        return self.is_measuring and self._membership.is_fixed and (is_early or step >= self._until)

    def choose(self, is_early: bool, are_alike: bool) -> Recipe | None:
        """Choose, unless this process is alone; None also if nothing can be known yet."""
        self._are_alike = are_alike
        is_look = self._is_looking and are_alike and not is_early
        measured = self._quorum.together(partial(self._measure, is_early)) if self._quorum.group.size > 1 else None
        if is_look:
            self._until = self._until + 1 if self._until < _AVERAGED_STEPS else TrialSchedule.every
        elif not is_early:
            self._until += TrialSchedule.every
        if measured is None:
            return None
        if not is_look:
            return self._decide(measured)
        if self._tuner.averages(measured):
            return None
        self._times.clear()
        self._until = TrialSchedule.every
        return self._on_trial(_ALONE)

    def landed(self) -> Recipe | None:
        """If a member is lost meanwhile, the others find the recipe that any of them has chosen already."""
        if self._membership.is_fixed:
            return None
        if not self.is_measuring:
            with suppress(Unreachable):
                if not self._is_kept:  # nor is it, where a checkpoint continues at another address
                    self._is_kept = bool(self._membership.agreed(self._spec, waits=False))
            return None
        found: list[Recipe] = []

        def choose() -> None:
            self._link = None  # newcomers have not measured it
            if measured := self._measure():
                found.append(self._decide(measured))

        if self._quorum.group.size > 1:
            self._quorum.together(choose)
        with suppress(Unreachable):  # training continues, and asks again after the next round
            return found[0] if found else self.known(waits=False)
        return None

    def _measure(self, is_early: bool = False) -> Measurements | None:
        """Return what all members have measured, None if some have trained too few steps: a collective.

        A member that flushes before the others end the trial stays in their rounds from then on, so that they decide,
        without its time if it has none.
        """
        step_s, is_enough = self._step_s()
        waits = self._waits_in_steps and math.isfinite(step_s)
        rows = self._gathered(step_s, is_enough, is_early, waits, len(self._rates) > 1, *self._planned())
        times, are_enough, are_early, waiting, changing, *planned = zip(*rows, strict=True)
        self._waits_in_steps = any(waiting)
        if not all(are_enough) and all(are_early) == any(are_early):
            return None
        if self._link is None:
            self._measure_line()
        return self._measured([*filter(math.isfinite, times)], [steps[0] for steps in planned], not any(changing))

    def _step_s(self) -> tuple[float, bool]:
        """Return how long a step takes here, infinite if there was none, and whether enough were timed.

        Three quarters of them take longer: a process that others keep busy for a while is not a slow one.
        """
        each = [after - before for before, after in pairwise(self._times)]
        least = 1 if self._is_looking else _LEAST_STEPS
        timed = sorted(each[_FIRST_STEPS:] or each)
        return timed[len(timed) // 4] if each else math.inf, len(each) >= least

    def _gathered(self, *mine: float) -> list[list[float]]:
        """Return numbers of each replica, the largest of its ranks, by rank: a collective."""
        largest = [max(column) for column in zip(*self._quorum.generation.island.gathered(*mine), strict=True)]
        rows: list[list[float]] = self._quorum.group.all_gather_small(
            torch.tensor(largest, dtype=torch.float64)
        ).tolist()
        return rows

    def _measure_line(self) -> tuple[float, ...]:
        """Measure the line, all members at once, unless the first one remembers it from an earlier start.

        Returns:
            The seconds of the fastest and the slowest replica's step then, whether learning rates were constant, and
            the steps of the run; nothing if the line was measured now.
        """
        known = self._tuner.remembered(self._count()[0], self._quorum.group.size)
        numbers = (0.0,) * 6 if known is None else (known[0].bandwidth_bps, known[0].turn_s, *known[1:])
        remembered = self._gathered(*numbers)[0]
        if remembered[0] > 0:
            self._link = Link(*remembered[:2])
            return tuple(remembered[2:])
        group = self._quorum.group
        turn_s, size = self._timed(partial(self._gathered, 0.0)), _FIRST_BYTES
        while (took_s := self._timed(partial(self._gather_bytes, size))) <= _FILL_S + 2 * turn_s and size < _MOST_BYTES:
            size *= _GROWTH
        passes = group.size - group.is_direct
        self._link = Link(8 * size * passes / max(took_s - turn_s, 1e-9), turn_s)
        return ()

    def _gather_bytes(self, size: int) -> None:
        group = self._quorum.group
        block = torch.zeros(size, dtype=torch.uint8, device=group.wire_device)
        everyone = block.new_empty(size * group.size)
        group.all_gather(everyone, block).wait()
        everyone[-1:].cpu()

    def _timed(self, collective: Callable[[], Any]) -> float:
        """Return the median of the seconds on the slowest rank: one may lose a packet, one find an empty buffer."""
        took_s = []
        for _ in range(_TIMES):
            began = time.perf_counter()
            collective()
            took_s.append(time.perf_counter() - began)
        return max(seconds for (seconds,) in self._gathered(statistics.median(took_s)))

    def _count(self) -> tuple[int, int]:
        """Return how many values the model trains, and how many bytes its buffers have."""
        with self._quorum.replica.trained.as_exchanged(self._model):
            trained = sum(parameter.numel() for parameter in self._model.parameters() if parameter.requires_grad)
        return trained, sum(buffer.numel() * buffer.element_size() for buffer in self._model.buffers())

    def _planned(self) -> tuple[float, float]:
        """Return the steps of the run and those of a pass over the data; 0: unknown."""
        inside = after_warmup(self._recipe.schedule)
        assert isinstance(inside, TrialSchedule)
        return inside.steps or self._steps or self._tuner.planned() or 0, self._tuner.pass_steps() or 0

    def _measured(self, step_s: Sequence[float], planned: Sequence[float], is_constant: bool = False) -> Measurements:
        quorum, (parameters, buffer_bytes) = self._quorum, self._count()
        assert self._link is not None
        with quorum.replica.trained.as_exchanged(self._model):
            blocks = num_blocks(self._model)
        return Measurements(
            self._link,
            tuple(step_s),
            quorum.group.size,
            parameters,
            blocks,
            buffer_bytes,
            quorum.generation.island.size,
            int(planned[0]) or None,
            int(planned[1]) or None,
            is_direct=quorum.group.is_direct,
            is_averaged=self._recipe.warmup > 0 and self._waits_in_steps,
            may_average=self._recipe.warmup > 0 and self._are_alike,
            is_fixed=quorum.membership.is_fixed,
            is_rate_constant=is_constant,
            lists_at_once=quorum.group.lists_at_once,
            is_adapter=2 * parameters < sum(parameter.numel() for parameter in self._model.parameters()),
        )

    def _decide(self, measured: Measurements) -> Recipe:
        settings = self._tuner.choose(measured)
        text = json.dumps({"recipe": settings.recipe, **settings.given()})
        agreed = self._quorum.membership.agreed(text)
        return self._take(agreed, measured if agreed == text else None)

    def _take(self, text: str, measured: Measurements | None) -> Recipe:
        settings = OuterSettings(**json.loads(text))
        is_first = measured is not None and self._quorum.group.rank == 0
        self._tuner.chosen(settings, measured, int(self._planned()[0]) or None, is_first)
        self._spec = text
        if measured is not None and settings.every:
            self._membership.expect_round(settings.every * max(measured.step_s))
        return _like(self._recipe, settings)


def _like(trial: Recipe, settings: OuterSettings) -> Recipe:
    """Return the recipe of `settings`, with the options that the user has given for all recipes."""
    recipe = recipe_of(settings, local_size=1)
    return replace(
        recipe,
        weigh_by=trial.weigh_by,
        same_data=trial.same_data,
        anchor_on_cpu=trial.anchor_on_cpu and recipe.optimizer is not None,
    )
