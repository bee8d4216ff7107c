# SPDX-License-Identifier: Apache-2.0
"""Experiment trackers, where scripts look for them. A client library is loaded when its tracker starts."""

from importlib import import_module
from typing import Any

from farflung.tracking.base import GeneralTracker as GeneralTracker, on_main_process as on_main_process
from farflung.tracking.clients import (
    MLflowTracker as MLflowTracker,
    TensorBoardTracker as TensorBoardTracker,
    TrackioTracker as TrackioTracker,
    WandBTracker as WandBTracker,
)
from farflung.tracking.jsonl import JSONLTracker as JSONLTracker
from farflung.tracking.tracking import (
    LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS,
    filter_trackers as filter_trackers,
    get_available_trackers as get_available_trackers,
    register_tracker_class as register_tracker_class,
)


def __getattr__(name: str) -> Any:
    """Return a name of Accelerate's that is absent here, such as `CometMLTracker`."""
    return getattr(import_module("farflung.compat.absent"), name)
