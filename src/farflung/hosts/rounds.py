# SPDX-License-Identifier: Apache-2.0
"""Tells about the rounds of an outer loop: a file in the run's folder, lines on stderr, figures for trackers.

Each is called with every `Round` that has ended.
"""

from __future__ import annotations

import logging
import math
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farflung.base.events import tell
from farflung.base.words import in_bytes
from farflung.config import environ
from farflung.process.failure import OUTER_ATTACHED, OUTER_ROUND, leave_note
from farflung.process.run_files import ROUNDS, Metrics, add_lines, keep_events, note_model, run_folder, who

if TYPE_CHECKING:
    from torch import nn

    from farflung.config.outer import OuterSettings
    from farflung.outer.engine import OuterLoop
    from farflung.outer.stats import Round, Stats


class RoundOutputs:
    """What tells a user about the rounds of the loops that a setting asks for: the lines of its `report`.

    Args:
        rank: of this process.
        member: id of its replica, if it comes and goes.
    """

    def __init__(self, settings: OuterSettings, rank: int, member: int | None = None) -> None:
        self._member = member
        is_quiet = settings.report is None and environ.flag(environ.QUIET)
        self._interval = None if rank or is_quiet else settings.report_seconds(sys.stderr.isatty())

    @property
    def reports(self) -> bool:
        return self._interval is not None

    def listen(self, loop: OuterLoop, number: int, loss: Callable[[], float | None] | None = None) -> None:
        """Report the rounds of a loop, the `number`-th from 0; `loss` returns that of the latest step."""
        loop.listeners.append(lambda _: leave_note(OUTER_ROUND))
        if self._interval is not None:
            loop.listeners.append(RoundReport(loop, number, self._interval, self._member, loss))


def note_attached(model: nn.Module, island: int, ranks: int, is_first: bool) -> None:
    """Note that a loop is over a DDP model; the first rank writes in the run's folder what is trained."""
    leave_note(OUTER_ATTACHED)
    if is_first:
        note_model(model, "ddp", island, ranks)


class _RunRounds(logging.Handler):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._loops: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # numbered in order
        self._numbers = count()

    def emit(self, record: Any) -> None:
        """Write a line of a record that an outer loop has made; see `farflung.outer.stats.ROUNDS`."""
        here = who()
        if here.pop("rank") == 0:
            if record.rounds not in self._loops:
                self._loops[record.rounds] = next(self._numbers)
            number = self._loops[record.rounds]
            add_lines(self._path, [{"model": number, **here, "time": time.time(), **asdict(record.round)}])


def record_rounds() -> None:
    """Write rounds and events of all loops of this process to the run's folder, if any, on rank 0 of each replica."""
    keep_events()
    folder, rounds = run_folder(), logging.getLogger("farflung.rounds")  # which is there before torch is loaded
    if folder is not None and not any(isinstance(handler, _RunRounds) for handler in rounds.handlers):
        rounds.addHandler(_RunRounds(folder / ROUNDS))
        rounds.setLevel(logging.DEBUG)
        rounds.propagate = False  # a handler of the script's would print a line for each round


def stop_recording() -> None:
    """Undo `record_rounds` in a process that outlives its run."""
    rounds = logging.getLogger("farflung.rounds")
    for handler in [one for one in rounds.handlers if isinstance(one, _RunRounds)]:
        rounds.removeHandler(handler)
        rounds.setLevel(logging.NOTSET)
        rounds.propagate = True


class RoundFigures:
    """The figures of a loop's rounds for trackers, by names such as `outer/round`; the second loop's begin `outer1/`.

    `waiting` is the share of the time since the last `take()` that training waited in rounds; norms and the cosine are
    those of the latest round, and the others count since the loop began.
    """

    def __init__(self, loop: OuterLoop, number: int = 0) -> None:
        self._loop = weakref.ref(loop)  # which has this listener
        self._prefix = f"outer{number or ''}/"
        self._latest: tuple[Stats, Round] | None = None
        self._waited, self._since = 0.0, time.perf_counter()
        loop.listeners.append(self)

    def __call__(self, this: Round) -> None:
        loop = self._loop()
        assert loop is not None
        self._latest = loop.stats(), this
        self._waited += this.seconds_exposed

    @property
    def waiting_so_far(self) -> float:
        """The share of the time from the start of the loop to its latest round."""
        return 0.0 if self._latest is None else self._latest[0].waiting

    @property
    def is_open(self) -> bool:
        return self._loop() is not None

    def take(self) -> dict[str, float]:
        """Return the figures; nothing if no round has ended since the last call."""
        if self._latest is None:
            return {}
        (stats, this), self._latest = self._latest, None
        now = time.perf_counter()
        values = {
            "round": stats.rounds,
            "dropped_rounds": stats.dropped_rounds,
            "bytes_sent": stats.bytes_sent,
            "waiting": min(1.0, self._waited / max(now - self._since, 1e-9)),
            "norm": this.norm,
            "drift_norm": stats.drift_norm,
            "cosine": stats.cosine,
        }
        self._waited, self._since = 0.0, now
        return {self._prefix + name: value for name, value in values.items()}


class RoundReport:
    """Prints a line about a round on stderr, unless it printed one less than `interval` seconds ago.

    If replicas come and go, only the first member of a round prints it.
    """

    def __init__(
        self, loop: OuterLoop, number: int, interval: float, member: int | None, loss: Callable[[], float | None] | None
    ) -> None:
        self._figures = RoundFigures(loop)
        self._model = f" of model {number}" if number else ""
        self._interval = interval
        self._printed = -math.inf
        self._loss = loss
        self._member = member
        self._metrics = None if loss is None else Metrics.of_run()  # for scripts that log no loss

    def __call__(self, this: Round) -> None:
        now = time.perf_counter()
        if self._member not in (None, this.members[0]):
            return
        loss = None if self._loss is None else self._loss()
        if loss is not None and self._metrics is not None:
            self._metrics.add({f"loss at rounds{self._model}": loss}, this.step)
        if now - self._printed < self._interval:
            return
        self._printed = now
        waiting, values = self._figures.waiting_so_far, self._figures.take()
        said = [] if loss is None else [f"loss {loss:.4g}"]
        said += [f"{in_bytes(values['outer/bytes_sent'])} sent", f"{waiting:.0%} of the time waiting"]
        head = f"farflung: round {values['outer/round']}{self._model}, step {this.step}"
        tell(f"{head}: {', '.join(said)}")
