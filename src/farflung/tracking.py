# SPDX-License-Identifier: Apache-2.0
"""Experiment trackers, where scripts look for them. A client library is loaded when its tracker starts."""

from farflung.compat.absent import __getattr__ as __getattr__
from farflung.trackers.base import GeneralTracker as GeneralTracker, on_main_process as on_main_process
from farflung.trackers.clients import (
    MLflowTracker as MLflowTracker,
    TensorBoardTracker as TensorBoardTracker,
    TrackioTracker as TrackioTracker,
    WandBTracker as WandBTracker,
)
from farflung.trackers.jsonl import JSONLTracker as JSONLTracker
from farflung.trackers.tracking import (
    LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS,
    filter_trackers as filter_trackers,
    get_available_trackers as get_available_trackers,
    register_tracker_class as register_tracker_class,
)
