# SPDX-License-Identifier: Apache-2.0
"""Modules that this room seldom uses: loaded on first use, not with the Accelerator.

Python collects all garbage, torch's too, when an import makes some ten thousand objects: 0.08 s in mid-import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farflung.base.lazy import LazyModule

if TYPE_CHECKING:
    from farflung.accelerator import ema as ema, outer as outer
    from farflung.big_model import load as load
    from farflung.checkpoint import export as export, manager as manager, writer as writer
    from farflung.config import launch as launch
    from farflung.data import slots as slots, ticks as ticks
    from farflung.hosts import elastic as elastic
    from farflung.methods import arguments as arguments, recipes as recipes
    from farflung.resume import models as models
    from farflung.trackers import tracking as tracking
else:
    ema = LazyModule("farflung.accelerator.ema")
    outer = LazyModule("farflung.accelerator.outer")
    load = LazyModule("farflung.big_model.load")
    export = LazyModule("farflung.checkpoint.export")
    manager = LazyModule("farflung.checkpoint.manager")
    writer = LazyModule("farflung.checkpoint.writer")
    launch = LazyModule("farflung.config.launch")
    ticks = LazyModule("farflung.data.ticks")
    slots = LazyModule("farflung.data.slots")
    elastic = LazyModule("farflung.hosts.elastic")
    arguments = LazyModule("farflung.methods.arguments")
    recipes = LazyModule("farflung.methods.recipes")
    models = LazyModule("farflung.resume.models")
    tracking = LazyModule("farflung.trackers.tracking")
