# SPDX-License-Identifier: Apache-2.0
"""The methods of an Accelerator for experiment trackers, under Accelerate's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from farflung.accelerator import lazy
from farflung.base.checks import check_text, check_type
from farflung.base.errors import ConfigError
from farflung.base.forward import Forward
from farflung.trackers.base import GeneralTracker

if TYPE_CHECKING:
    from farflung.accelerator.controller import OuterController
    from farflung.process.run_files import Metrics
    from farflung.process.world import World
    from farflung.trackers.tracking import Arguments, Tracking


class TrackerMethods:
    """Tracker methods under Accelerate's names."""

    _tracking: Tracking | None
    _metrics: Metrics | None
    _controller: OuterController
    logging_dir: Forward[str | None]
    _world: Forward[World]

    @property
    def _added(self) -> Tracking:
        self._tracking = self._tracking or lazy.tracking.Tracking(None, self.logging_dir)
        return self._tracking

    @property
    def log_with(self) -> list[Any]:
        """The trackers that were asked for, by name or as objects."""
        return self._added.asked

    @log_with.setter
    def log_with(self, value: Any) -> None:
        self._added.asked = lazy.tracking.filter_trackers(value, self.logging_dir)

    @property
    def trackers(self) -> list[Any]:
        """The trackers of the run, or of the last one; on the main process alone, unless a script adds its own."""
        return self._added.started

    @trackers.setter
    def trackers(self, value: list[Any]) -> None:
        self._added.started, self._added.is_over = list(value), False

    def init_trackers(
        self, project_name: str | None, config: Mapping[str, Any] | None = None, init_kwargs: Arguments | None = None
    ) -> None:
        """Begin the run of all trackers, on the main process; on the others do nothing.

        A tracker that fails, now or later, does not end training: one warning tells of it, and `end_training` says how
        many events it lost.

        Args:
            project_name: what each tracker calls the project; None if trackers of your own need none.
            config: the settings that the run begins with.
            init_kwargs: arguments by tracker, such as `{"wandb": {"tags": ["a"]}}`.

        Raises:
            ConfigError: an argument of another kind, `init_kwargs` for a tracker that does not exist, or trackers that
                have been started already.
            TypeError: a tracker does not have an argument of `init_kwargs`.
        """
        if self._tracking is None or not self._world.is_main or not (self.log_with or self.trackers):
            return
        if project_name is not None:
            check_text("init_trackers: project_name", project_name)
        if self._tracking.is_running:
            raise ConfigError("init_trackers was called before, and its run has not ended. Call end_training() first.")
        self._tracking.check_names("init_trackers: a name in init_kwargs", init_kwargs or {})
        self._tracking.start(project_name, config, init_kwargs or {})

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Arguments | None = None) -> None:
        """Have all trackers record `values`, on the main process; on the others do nothing.

        In a run of `farflung launch` they go to the run's folder too, whatever tracker there is.
        If rounds of an outer loop have ended since the last call, their figures (`outer/round` ...) are recorded too.

        Args:
            values: numbers, texts and what else a tracker takes, by name.
            step: the step that they belong to.
            log_kwargs: arguments by tracker, such as `{"wandb": {"commit": False}}`.

        Raises:
            ConfigError: `values` is no dictionary, or `log_kwargs` names a tracker that does not exist.
        """
        if not self._world.is_main:
            return
        if self._metrics is not None and isinstance(values, Mapping):
            self._metrics.add(values, step)
        if self._tracking is None:
            return
        check_type("log: values", values, Mapping, "a dictionary, such as {'loss': 0.5}")
        self._tracking.check_names("log: a name in log_kwargs", log_kwargs or {})
        rounds = self._controller.figures() if self._tracking.records else {}
        self._tracking.log({**rounds, **values}, step, log_kwargs or {})

    def _finish_trackers(self) -> None:
        if self._tracking is None or not self._world.is_main:
            return
        rounds = self._controller.figures()
        if self._tracking.records and rounds:
            self._tracking.log(rounds, self._tracking.step, {})
        self._tracking.finish()

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker of this name; on processes without trackers, one that does nothing.

        With `unwrap` return the client's own object. Raises ConfigError if there is none of this name.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if self.trackers:
            known = ", ".join(tracker.name for tracker in self.trackers)
            raise ConfigError(f"get_tracker: there is no tracker {name!r}; there is {known}.")
        return GeneralTracker(_blank=True)
