# SPDX-License-Identifier: Apache-2.0
"""From what `log_with` says to trackers: which there are, which are installed, and which need a folder."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

from farflung.base.checks import check_word, shown, wrong_type
from farflung.base.enums import LoggerType
from farflung.base.errors import ConfigError
from farflung.base.optional import compare_versions, is_installed
from farflung.tracking.base import GeneralTracker
from farflung.tracking.clients import (
    AimTracker,
    ClearMLTracker,
    CometMLTracker,
    DVCLiveTracker,
    SwanLabTracker,
    TrackioTracker,
    WandBTracker,
)
from farflung.tracking.jsonl import JSONLTracker
from farflung.tracking.mlflow import MLflowTracker
from farflung.tracking.tensorboard import TensorBoardTracker

# By name; `register_tracker_class` adds to it, and so do scripts.
LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {
    "aim": AimTracker,
    "clearml": ClearMLTracker,
    "comet_ml": CometMLTracker,
    "dvclive": DVCLiveTracker,
    "jsonl": JSONLTracker,
    "mlflow": MLflowTracker,
    "swanlab": SwanLabTracker,
    "tensorboard": TensorBoardTracker,
    "trackio": TrackioTracker,
    "wandb": WandBTracker,
}
Tracker = str | LoggerType | GeneralTracker


def get_available_trackers() -> list[str]:
    """Return the names of the trackers whose client is installed, and `jsonl`, which needs none."""
    return [*(kind for kind in LoggerType if kind is not LoggerType.ALL and has_client(str(kind))), "jsonl"]


def has_client(name: str) -> bool:
    """Say whether the library of the tracker `name` is installed, in a version that the tracker can use."""
    if name == "tensorboard":
        return is_installed("tensorboard") or is_installed("tensorboardX")
    if name == "aim":
        return is_installed("aim") and compare_versions("aim", "<", "4.0.0")
    return name == "jsonl" or is_installed(name, *(["mlflow", "mlflow-skinny"] if name == "mlflow" else []))


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let `log_with` name a tracker of yours, from the next `Accelerator` on.

    The class has a `name` and `requires_logging_directory`. It is made with the name of the project, the logging
    directory where it requires one, and its part of `init_kwargs`.
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
    installed, and JSON lines where there is a `logging_dir`.
    """
    asked = log_with if isinstance(log_with, (list, tuple)) else [] if log_with is None else [log_with]
    wants_all = any(isinstance(each, str) and str(each) == "all" for each in asked)
    chosen: list[Any] = [each for each in asked if not isinstance(each, str)] if wants_all else list(asked)
    if wants_all:
        chosen += [kind for kind in get_available_trackers() if kind != "jsonl" or logging_dir is not None]
    found: list[Any] = []
    for each in chosen:
        tracker = _checked(each, logging_dir)
        if tracker not in found:
            found.append(tracker)
    return found


def _checked(asked: Any, logging_dir: str | os.PathLike[str] | None) -> Any:
    if isinstance(asked, GeneralTracker):
        return asked
    if isinstance(asked, type) and issubclass(asked, GeneralTracker):
        raise wrong_type("log_with", asked, f"a tracker, such as {asked.__name__}(...)")
    name = str(asked) if isinstance(asked, str) else asked
    check_word("log_with", name, ["all", *LOGGER_TYPE_TO_CLASS])
    kind = LOGGER_TYPE_TO_CLASS[name]
    if kind.__module__.startswith("farflung.") and not has_client(name):
        raise ConfigError(f"log_with={name!r}, but its client is not installed: `pip install {name}`.")
    if kind.requires_logging_directory and logging_dir is None:
        raise ConfigError(
            f"Logging with `{name}` requires a `logging_dir`, which is {shown(logging_dir)}. Give "
            "Accelerator(project_dir=...), or a logging_dir in its ProjectConfiguration."
        )
    return LoggerType(name) if name in LoggerType else name
