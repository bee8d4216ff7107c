# SPDX-License-Identifier: Apache-2.0
"""Modules that this room seldom uses: loaded on first use, not with the Accelerator.

Python collects all garbage, torch's too, when an import makes some ten thousand objects: 0.08 s in mid-import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farflung.base.lazy import LazyModule

if TYPE_CHECKING:
    from farflung.accelerator import join as join, outer as outer
    from farflung.big_model import load as load
    from farflung.checkpoint import export as export, manager as manager, writer as writer
    from farflung.config import launch as launch, parallelism as parallelism, sharding as sharding
    from farflung.data import slots as slots
    from farflung.integrations import elastic as elastic
    from farflung.outer import arguments as arguments, recipes as recipes
    from farflung.precision import fp8 as fp8
    from farflung.resume import models as models
    from farflung.tools import memory as memory
    from farflung.trackers import base as base, tracking as tracking
else:
    join = LazyModule("farflung.accelerator.join")
    outer = LazyModule("farflung.accelerator.outer")
    load = LazyModule("farflung.big_model.load")
    export = LazyModule("farflung.checkpoint.export")
    manager = LazyModule("farflung.checkpoint.manager")
    writer = LazyModule("farflung.checkpoint.writer")
    launch = LazyModule("farflung.config.launch")
    parallelism = LazyModule("farflung.config.parallelism")
    sharding = LazyModule("farflung.config.sharding")
    slots = LazyModule("farflung.data.slots")
    elastic = LazyModule("farflung.integrations.elastic")
    arguments = LazyModule("farflung.outer.arguments")
    recipes = LazyModule("farflung.outer.recipes")
    fp8 = LazyModule("farflung.precision.fp8")
    models = LazyModule("farflung.resume.models")
    memory = LazyModule("farflung.tools.memory")
    base = LazyModule("farflung.trackers.base")
    tracking = LazyModule("farflung.trackers.tracking")
