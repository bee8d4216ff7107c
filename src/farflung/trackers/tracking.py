# SPDX-License-Identifier: Apache-2.0
"""From what `log_with` says to the trackers of one Accelerator, which are never called so that training ends."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from farflung.base.checks import check_word, shown, wrong_type
from farflung.base.enums import LoggerType
from farflung.base.errors import ConfigError, did_you_mean
from farflung.base.optional import is_installed
from farflung.base.words import counted
from farflung.trackers.base import GeneralTracker
from farflung.trackers.clients import (
    MLflowTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
)
from farflung.trackers.jsonl import JSONLTracker

_BUILT_IN = {
    kind.name: kind for kind in (JSONLTracker, MLflowTracker, TensorBoardTracker, TrackioTracker, WandBTracker)
}
# By name; `register_tracker_class` adds to it, and so do plugins and scripts.
LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {**_BUILT_IN}
PLUGINS = "farflung.trackers"  # the group of entry points that bring trackers
Arguments = Mapping[str, Mapping[str, Any]]
Tracker = str | LoggerType | GeneralTracker


def get_available_trackers() -> list[str]:
    """Return the names of the trackers whose client is installed, `jsonl`, which needs none, and those of plugins."""
    built_in = [kind for kind in LoggerType if str(kind) in _BUILT_IN and has_client(str(kind))]
    return [*built_in, "jsonl", *_plugins()]


def has_client(name: str) -> bool:
    """Return whether the library of the built-in tracker `name` is installed."""
    if name == "tensorboard":
        return is_installed("tensorboard") or is_installed("tensorboardX")
    return name == "jsonl" or is_installed(name, *(["mlflow", "mlflow-skinny"] if name == "mlflow" else []))


def _plugins() -> dict[str, EntryPoint]:
    return {plugin.name: plugin for plugin in entry_points(group=PLUGINS)}


def _class_of(name: Any) -> type[GeneralTracker]:
    """Return the class of the tracker `name`, built in, registered or from a plugin, which is then registered."""
    if name not in LOGGER_TYPE_TO_CLASS:
        plugins = _plugins()
        if name not in plugins:
            near = did_you_mean(name, ["all", *LOGGER_TYPE_TO_CLASS, *plugins]) if isinstance(name, str) else ""
            raise ConfigError(
                f"log_with is {shown(name)}. Built in or registered are {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}; "
                f"plugins bring {', '.join(sorted(plugins)) or 'none'}.{near} A package adds a tracker by an entry "
                f"point in the group `{PLUGINS}` that names a subclass of GeneralTracker."
            )
        kind = plugins[name].load()
        if getattr(kind, "name", None) != name:
            raise ConfigError(
                f"The entry point {name} in the group `{PLUGINS}` names {plugins[name].value}. It must name a subclass "
                f"of GeneralTracker whose `name` is {name!r}."
            )
        register_tracker_class(kind)
    return LOGGER_TYPE_TO_CLASS[name]


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Make `log_with` accept the name of a tracker of yours, from the next `Accelerator` on.

    The class has a `name` and `requires_logging_directory`. It is made with the name of the project, the logging
    directory if it requires one, and its part of `init_kwargs`.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise wrong_type("tracker_class", tracker_class, "a class derived from GeneralTracker")
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or not name or not hasattr(tracker_class, "requires_logging_directory"):
        raise ConfigError(f"{tracker_class.__name__} needs a name and requires_logging_directory in its class.")
    if name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(
            f"{tracker_class.__name__} takes the place of the tracker {name} ({LOGGER_TYPE_TO_CLASS[name].__name__}).",
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def filter_trackers(
    log_with: Tracker | Sequence[Tracker] | None, logging_dir: str | os.PathLike[str] | None = None
) -> list[Any]:
    """Return the trackers that `log_with` asks for, each once; raise ConfigError for one that can't be used.

    It takes names of trackers, members of `LoggerType`, trackers of your own, or `"all"`: those whose client is
    installed, those of plugins, and JSON lines if there is a `logging_dir`.
    """
    asked = log_with if isinstance(log_with, (list, tuple)) else [] if log_with is None else [log_with]
    wants_all = any(isinstance(each, str) and str(each) == "all" for each in asked)
    chosen: list[Any] = [each for each in asked if not isinstance(each, str)] if wants_all else list(asked)
    if wants_all:
        chosen += [kind for kind in get_available_trackers() if kind != "jsonl" or logging_dir is not None]
    trackers: list[Any] = []
    for each in chosen:
        tracker = _checked(each, logging_dir)
        if tracker not in trackers:
            trackers.append(tracker)
    return trackers


def _checked(asked: Any, logging_dir: str | os.PathLike[str] | None) -> Any:
    if isinstance(asked, GeneralTracker):
        return asked
    if isinstance(asked, type) and issubclass(asked, GeneralTracker):
        raise wrong_type("log_with", asked, f"a tracker, such as {asked.__name__}(...)")
    name = str(asked) if isinstance(asked, str) else asked
    kind = _class_of(name)
    if kind.__module__.startswith("farflung.") and not has_client(name):
        raise ConfigError(f"log_with={name!r}, but its client is not installed: `pip install {name}`.")
    if kind.requires_logging_directory and logging_dir is None:
        raise ConfigError(
            f"Logging with `{name}` requires a `logging_dir`, which is {shown(logging_dir)}. Give "
            "Accelerator(project_dir=...), or a logging_dir in its ProjectConfiguration."
        )
    return LoggerType(name) if name in LoggerType else name


class Tracking:
    """The trackers that `log_with` asks for (`asked`), those of the latest run (`started`), and what they lost."""

    def __init__(self, log_with: Any, logging_dir: str | os.PathLike[str] | None) -> None:
        self.asked = filter_trackers(log_with, logging_dir)
        self.started: list[Any] = []
        self.lost: Counter[str] = Counter()
        self.step: int | None = None
        self.is_running = False  # from `start` to `finish`
        self.is_over = False  # `started` are those of a run that has ended
        self._has_warned = False
        self._logging_dir = logging_dir

    def check_names(self, called: str, arguments: Arguments) -> None:
        """Refuse arguments for a tracker that does not exist. Those for one that is not asked for are left unread."""
        own = [tracker.name for tracker in (*self.asked, *self.started) if not isinstance(tracker, str)]
        for name in arguments:
            if name == "all" or (name not in LOGGER_TYPE_TO_CLASS and name not in LoggerType):
                check_word(called, name, [*LOGGER_TYPE_TO_CLASS, *_plugins(), *own])

    @property
    def records(self) -> bool:
        """Whether trackers record: those of `start`, or that a script added itself, until `finish`."""
        return bool(self.started) and not self.is_over

    def start(self, project: str | None, config: Any, arguments: Arguments) -> None:
        """Make the trackers that are named, start all, and have them store `config` if there is one.

        If this raises, trackers that have been started are finished, and `start` may be called again.
        """
        trackers = [] if self.is_over else [*self.started]
        for asked in self.asked:
            if isinstance(asked, str):
                kind: Any = LOGGER_TYPE_TO_CLASS[str(asked)]
                place = (self._logging_dir,) if kind.requires_logging_directory else ()
                asked = kind(project, *place, **arguments.get(str(asked), {}))
            trackers.append(asked)
        with ExitStack() as begun:
            for tracker in trackers:
                self._attempt(tracker, "start")
                begun.callback(self._attempt, tracker, "finish")
                if config is not None:
                    self._attempt(tracker, "store_init_configuration", config)
            begun.pop_all()
        self.started[:], self.is_running, self.is_over = trackers, True, False

    def log(self, values: Mapping[str, Any], step: int | None, arguments: Arguments) -> None:
        if not self.records:
            if (self.asked or self.started) and not self._has_warned:
                self._has_warned = True
                warnings.warn("log() records nothing before init_trackers() and after end_training().", stacklevel=3)
            return
        self.step = step
        for tracker in self.started:
            self._attempt(tracker, "log", values, step=step, **arguments.get(tracker.name, {}))

    def finish(self) -> None:
        """Finish the trackers, and say what they lost."""
        for tracker in self.started if self.records else ():
            self._attempt(tracker, "finish")
        self.is_running, self.is_over = False, bool(self.started)
        for name, number in self.lost.items():
            warnings.warn(f"The tracker {name} lost {counted(number, 'event')} of this run.", stacklevel=3)
        self.lost.clear()

    def _attempt(self, tracker: Any, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a tracker's method. What it raises is an event lost; a warning tells of the first."""
        try:
            getattr(tracker, method)(*args, **kwargs)
        except Exception as error:
            if method == "start" and isinstance(error, TypeError):
                raise  # an argument that the client does not have: nothing has been trained yet
            self.lost[tracker.name] += 1
            if self.lost[tracker.name] == 1:
                warnings.warn(
                    f"The tracker {tracker.name} failed in {method}: {type(error).__name__}: {error}. Training "
                    "continues without what it can't record; end_training says how much that was.",
                    stacklevel=4,
                )
