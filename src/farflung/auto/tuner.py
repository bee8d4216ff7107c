# SPDX-License-Identifier: Apache-2.0
"""`auto` in a run: chooses the recipe by the cost model, says so, and corrects H by what rounds wait for.

What was measured stays in the run's folder, for its next start.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from farflung.auto.choice import Interval, IntervalController, Link, Measurements, averages, choose, workload
from farflung.base.events import Kind, record
from farflung.base.files import atomic_file
from farflung.config.outer import OuterSettings
from farflung.cost.methods import flags_of
from farflung.methods.schedule import Every, Streaming
from farflung.outer.engine import OuterLoop
from farflung.outer.stats import Round
from farflung.process.run_files import run_folder, who

_FILE = "line.json"  # in the run's folder
_KEYS = ("parameters", "replicas")  # by which a measurement is this run's


class LineTuner:
    """Chooses the recipe of one loop, the same on all ranks from the same measurements, and corrects it.

    Args:
        planned: returns the steps of the whole run, None if unknown.
        pass_steps: returns those of a pass over the data, None if unknown.
        rates: returns the inner learning rates of the latest step.
    """

    def __init__(
        self,
        planned: Callable[[], int | None] = lambda: None,
        pass_steps: Callable[[], int | None] = lambda: None,
        rates: Callable[[], tuple[float, ...]] = lambda: (),
    ) -> None:
        self.planned, self.pass_steps, self.rates = planned, pass_steps, rates
        self._loop: weakref.ref[OuterLoop] | None = None
        self._corrector: IntervalController | None = None  # until something is chosen
        self._landed_at, self._step = time.perf_counter(), -1  # of the latest round
        self._num_before = 0  # rounds that are still to come as before the latest change

    def remembered(self, parameters: int, replicas: int) -> tuple[Link, float, float, bool, int] | None:
        """Return the line, the seconds of the fastest and the slowest replica's step, whether learning rates were
        constant, and the steps of the run or 0, as an earlier start of it measured them; the first member's count."""
        folder = run_folder()
        with suppress(OSError, ValueError, KeyError, TypeError):
            row = json.loads((folder / _FILE).read_text()) if folder is not None else {}
            if [row[key] for key in _KEYS] == [parameters, replicas]:
                link = Link(row["bandwidth_bps"], row["turn_s"])
                return link, row["fastest_s"], row["slowest_s"], row["is_rate_constant"], row["steps"]
        return None

    def averages(self, measured: Measurements) -> bool:
        return averages(measured)

    def choose(self, measured: Measurements) -> OuterSettings:
        return choose(measured).settings

    def alone(self) -> None:
        _note(Kind.NOTE, "this process trains alone, so there is nothing to decide.")

    def chosen(self, settings: OuterSettings, measured: Measurements | None, steps: int | None, is_first: bool) -> None:
        """Report what was chosen: on each rank.

        Args:
            measured: None if another replica has chosen, or an earlier start of the run.
            steps: of the whole run; None: unknown.
            is_first: this rank is of the first member.
        """
        self._corrector = IntervalController(steps, settings)
        if measured is None:
            _note(Kind.CHOSEN, f"continues with {flags_of(settings)}, which the run has chosen.", **_facts(settings))
            return
        if not is_first:
            return
        _note(Kind.CHOSEN, choose(measured).reason, **_facts(settings), **asdict(measured))
        folder = run_folder()
        if folder is None or who()["rank"]:
            return
        scale = workload(measured).step_s / workload(replace(measured, is_averaged=False)).step_s
        row = {key: getattr(measured, key) for key in _KEYS} | asdict(measured.link)
        row |= {"is_rate_constant": measured.is_rate_constant, "steps": steps or 0}
        row |= {"fastest_s": scale * min(measured.step_s), "slowest_s": scale * max(measured.step_s)}
        with suppress(OSError), atomic_file(folder / _FILE) as path:
            path.write_text(json.dumps(row))

    def follow(self, loop: OuterLoop) -> None:
        """Correct the recipe of this loop from now on."""
        self._loop = weakref.ref(loop)
        loop.listeners.append(self._round_ended)

    def _round_ended(self, this: Round) -> None:
        now = time.perf_counter()
        elapsed_s, self._landed_at = now - self._landed_at, now
        is_of_flush, self._step = this.step == self._step, this.step
        loop = None if self._loop is None else self._loop()
        inside = None if loop is None else loop.schedule
        if self._corrector is None or loop is None or not loop.is_first or not isinstance(inside, (Every, Streaming)):
            return
        if is_of_flush or self._num_before:  # without steps between, nothing but waiting is left of the time
            self._num_before -= not is_of_flush
            return
        interval = Interval(inside.every, inside.fragments, inside.delay)
        waiting = min(1.0, this.seconds_exposed / max(elapsed_s, 1e-9))
        hidden = this.seconds_hidden / max(elapsed_s, 1e-9)
        new = self._corrector.note(this.step, interval, waiting, len(this.members), hidden)
        if new is not None:
            changes = [f"H from {interval.every} to {new.every} steps"] * (new.every != interval.every)
            changes += [f"the delay from {interval.delay} to {new.delay}"] * (new.delay != interval.delay)
            said = f"rounds waited {waiting:.0%} of the time, so it changes {' and '.join(changes)}."
            _note(Kind.CHOSEN, said, waiting=waiting, options=asdict(new))
            loop.change_schedule(new.every, new.delay)
            self._num_before = 2 * interval.fragments - 1  # until it is in force for each fragment


def _note(kind: Kind, line: str, **facts: Any) -> None:
    if who()["rank"] == 0:
        record(kind, message=f"auto: {line}", **facts)


def _facts(settings: OuterSettings) -> dict[str, Any]:
    return {"recipe": settings.recipe, "options": settings.given()}
