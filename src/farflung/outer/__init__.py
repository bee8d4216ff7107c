# SPDX-License-Identifier: Apache-2.0
"""The outer loop: replicas that train independently and synchronize every H steps."""

import farflung.outer.recipes as recipes
from farflung.outer.aggregate import GatherMean, Gossip, Mean, ReduceScatterMean, TrimmedMean
from farflung.outer.codec.base import Cast, Identity
from farflung.outer.codec.blockwise import E3M0, Fp8, Int4, Int8
from farflung.outer.codec.feedback import ErrorFeedback
from farflung.outer.codec.sparse import TopK
from farflung.outer.engine import OuterLoop
from farflung.outer.fragments import apart, blocks, by_bytes, strided, whole
from farflung.outer.inner import Average, Keep, Reset
from farflung.outer.joined import Joined, joined
from farflung.outer.merge import Blend, Replace
from farflung.outer.recipe import Recipe
from farflung.outer.recipes import *  # noqa: F403 - its __all__ is the list of recipes
from farflung.outer.schedule import ByTime, Every, Levels, Quadratic, Streaming, Warmup
from farflung.outer.stats import Round, Stats
from farflung.outer.weighting import ByWork, ClippedToMedian, WithoutOutliers

__all__ = [
    "E3M0",
    "Average",
    "Blend",
    "ByTime",
    "ByWork",
    "Cast",
    "ClippedToMedian",
    "ErrorFeedback",
    "Every",
    "Fp8",
    "GatherMean",
    "Gossip",
    "Identity",
    "Int4",
    "Int8",
    "Joined",
    "Keep",
    "Levels",
    "Mean",
    "OuterLoop",
    "Quadratic",
    "Recipe",
    "ReduceScatterMean",
    "Replace",
    "Reset",
    "Round",
    "Stats",
    "Streaming",
    "TopK",
    "TrimmedMean",
    "Warmup",
    "WithoutOutliers",
    "apart",
    "blocks",
    "by_bytes",
    "joined",
    "strided",
    "whole",
]
__all__ += recipes.__all__
