# SPDX-License-Identifier: Apache-2.0
"""Experiment trackers, where scripts look for them. A client library is loaded when its tracker starts."""

from farflung.tracking.base import GeneralTracker, on_main_process
from farflung.tracking.choose import (
    LOGGER_TYPE_TO_CLASS,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
)
from farflung.tracking.clients import AimTracker, ClearMLTracker, CometMLTracker, DVCLiveTracker
from farflung.tracking.jsonl import JSONLTracker
from farflung.tracking.mlflow import MLflowTracker
from farflung.tracking.runs import SwanLabTracker, TrackioTracker, WandBTracker
from farflung.tracking.tensorboard import TensorBoardTracker

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "JSONLTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]
